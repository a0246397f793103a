"""What weights lose as BitNet b1.58 codes that were not trained for it.

    python tests/bench/bitnet.py

A run of a small decoder in each backend, exported with `--format bitnet`; the figures are that export's own, of the
run's held-out text. Results go to results/bitnet.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.trained import BACKENDS, Settings, machine, markdown, trained

RESULTS = Path(__file__).with_name("results") / "bitnet.json"
PAGE = ROOT / "docs" / "training.md"
"""Quotes `sentence`."""
COMMAND = (sys.executable, "-m", "memconsole")
SMALL: Settings = {
    "model.name": "stories",
    "model.target_params": 300_000,
    "data.vocab_size": 512,
    "data.sequence_length": 128,
    "train.batch_size": 16,
    "train.max_steps": 600,
    "train.warmup_steps": 50,
    "train.learning_rate": 3e-3,
    "train.evaluation_batches": 20,
    "train.sample_tokens": 0,
    "device.name": "cpu",
}


def measured(backend: str) -> dict[str, Any]:
    """What a run's export wrote into `bitnet.json`."""
    with tempfile.TemporaryDirectory() as folder:
        trained({**SMALL, "backend": backend}, Path(folder))
        out = Path(folder) / "ternary"
        subprocess.run(
            [*COMMAND, "export", "latest", str(out), "--format", "bitnet"],
            env={**os.environ, "XDG_STATE_HOME": folder},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        found: dict[str, Any] = json.loads((out / "bitnet.json").read_text())
        return found


def sentence(results: dict[str, Any]) -> str:
    """What docs/training.md says of both."""
    before, after = (
        [results[backend]["validation"][when]["bits_per_byte"] for backend in BACKENDS]
        for when in ("before", "after")
    )
    return (
        f"from {before[0]:.2f} to {after[0]:.2f} bits per byte in torch "
        f"and from {before[1]:.2f} to {after[1]:.2f} in JAX"
    )


def table(results: dict[str, Any]) -> str:
    rows = [["backend", "bits per byte", "as codes", "zero", "MiB in fp32", "MiB"]]
    for backend, one in results.items():
        losses = [f"{one['validation'][w]['bits_per_byte']:.3f}" for w in ("before", "after")]
        sizes = [f"{one[name] / 2**20:.2f}" for name in ("fp32_bytes", "bytes")]
        rows.append([backend, *losses, f"{one['zero_share']:.0%}", *sizes])
    return markdown(rows)


def main() -> None:
    results = {backend: measured(backend) for backend in BACKENDS}
    document = {"results": results, "command": "python tests/bench/bitnet.py", **machine()}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    print(table(results))
    print(sentence(results))


if __name__ == "__main__":
    main()
