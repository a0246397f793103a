"""What each optimization really saves: short real runs with and without it, estimate beside measurement.

``make bench`` writes savings.json next to this file and prints the README's table. Memory is what the
run itself reports (on a CPU the growth of anonymous memory).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).with_name("savings.json")
MIB = 2**20

PLAIN = {
    "model.name": "stories",
    "model.target_params": "10_000_000",
    "data.vocab_size": "8192",
    "data.sequence_length": "256",
    "data.max_examples": "30",
    "data.shuffle_buffer": "1000",
    "train.batch_size": "8",
    "train.max_steps": "4",
    "train.log_every": "1",
    "train.warmup_steps": "2",
    "train.evaluation_batches": "2",
    "train.sample_tokens": "0",
}
TOGGLES: dict[str, dict[str, str]] = {
    "plain": {},
    "mixed precision (bf16)": {"optimize.precision": "bf16"},
    "gradient checkpointing, selective": {"optimize.gradient_checkpointing": "selective"},
    "gradient checkpointing, full": {"optimize.gradient_checkpointing": "full"},
    "chunked cross-entropy": {"optimize.fused_loss": "true"},
    "accumulation 4 x 2 rows": {"optimize.accumulation_steps": "4", "train.batch_size": "2"},
    "8-bit AdamW": {"optimize.optimizer": "adamw-8bit"},
    "lion": {"optimize.optimizer": "lion"},
    "adafactor": {"optimize.optimizer": "adafactor"},
    "LoRA rank 8 on a frozen base": {"optimize.lora_rank": "8", "optimize.freeze_base": "true"},
    "checkpointing + chunked loss + accumulation 4": {
        "optimize.gradient_checkpointing": "full",
        "optimize.fused_loss": "true",
        "optimize.accumulation_steps": "4",
        "train.batch_size": "2",
    },
}


def measure(backend: str, changes: dict[str, str], state: str) -> dict[str, Any]:
    """One short run; bytes at the peak, estimated and measured, and its speed."""
    settings = {**PLAIN, "backend": backend, "device.name": "auto", **changes}
    arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    done = subprocess.run(
        [sys.executable, "-m", "memconsole", "train", "--json", "--force", *arguments],
        env={**os.environ, "XDG_STATE_HOME": state},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    report = json.loads(done.stdout)
    return {
        "estimated_bytes": report["memory"]["estimated"]["peak_bytes"],
        "measured_bytes": report["memory"]["measured"]["peak_bytes"],
    }


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The README's table, one row a toggle."""
    backends = list(results)
    head = ["optimization"]
    for backend in backends:
        head += [f"{backend}: estimated MiB", "measured MiB", "saves"]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    for toggle in results[backends[0]]:
        row = [toggle]
        for backend in backends:
            if toggle not in results[backend]:
                row += ["n/a"] * 3
                continue
            one, plain = results[backend][toggle], results[backend]["plain"]
            saved = 1 - one["measured_bytes"] / plain["measured_bytes"]
            row += [
                f"{one['estimated_bytes'] / MIB:,.0f}",
                f"{one['measured_bytes'] / MIB:,.0f}",
                "" if toggle == "plain" else f"{saved:.0%}",
            ]
        rows.append(row)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", action="append", choices=("torch", "jax"))
    parser.add_argument("--print", action="store_true", help="print the recorded table only")
    options = parser.parse_args()
    if options.print:
        print(table(json.loads(OUTPUT.read_text())["results"]))
        return
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for backend in options.backend or ["torch", "jax"]:
        results[backend] = {}
        for toggle, changes in TOGGLES.items():
            with tempfile.TemporaryDirectory() as state:
                results[backend][toggle] = measure(backend, changes, state)
            print(backend, toggle, results[backend][toggle], file=sys.stderr, flush=True)
    names = ("torch", "jax", "flax", "optax")
    document = {
        "command": "make bench",
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: metadata.version(name) for name in names},
        "plan": PLAIN,
        "results": results,
    }
    OUTPUT.write_text(json.dumps(document, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
