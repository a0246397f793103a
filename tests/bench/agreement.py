"""Whether both backends train the same: losses of 200 steps from the same weights on the same rows.

    python tests/bench/agreement.py [--only WORD] [--print]

For each optimization that both backends train, a run in each of a small decoder; the figure is the largest
difference of the two losses of one step, as a share. Results go to results/agreement.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.optimizations import ROWS
from tests.bench.trained import (
    BACKENDS,
    RefusedError,
    Settings,
    machine,
    markdown,
    run,
)

RESULTS = Path(__file__).with_name("results") / "agreement.json"
BAR = 0.01
SMALL: Settings = {
    "model.name": "stories",
    "model.target_params": 500_000,
    "data.vocab_size": 2048,
    "data.sequence_length": 64,
    "data.max_examples": 60,
    "data.shuffle_buffer": 1000,
    "train.batch_size": 16,
    "train.max_steps": 200,
    "train.log_every": 1,
    "train.warmup_steps": 20,
    "train.learning_rate": 1e-3,
    "train.evaluation_batches": 1,
    "train.sample_tokens": 0,
    "device.name": "cpu",
}
ALONE = (
    "optimizer in backward",
    "activation offload",
    "activation offload + chunked",
    "torch.compile",
)
"""What torch alone trains."""


def compared(changes: Settings) -> dict[str, object]:
    """The largest difference of a step's two losses as a share, its step, and both last losses."""
    losses = []
    for backend in BACKENDS:
        report = run({**SMALL, **changes, "backend": backend})
        losses.append({s["step"]: s["loss"] for s in report["steps"]})
    ours, theirs = losses
    differences = {step: abs(theirs[step] / ours[step] - 1) for step in ours}
    worst = max(differences, key=lambda step: differences[step])
    last = max(ours)
    return {
        "largest_difference": differences[worst],
        "at_step": worst,
        "steps": len(ours),
        "torch_loss": ours[last],
        "jax_loss": theirs[last],
    }


def table(results: dict[str, dict[str, float]]) -> str:
    rows = [["optimization", "largest difference", "at step", "torch, last loss", "jax"]]
    for name, one in results.items():
        figures = [f"{one['largest_difference']:.3%}", str(one["at_step"])]
        rows.append([name, *figures, f"{one['torch_loss']:.4f}", f"{one['jax_loss']:.4f}"])
    return markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--print", action="store_true", help="the table of what is stored")
    options = parser.parse_args()
    document = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"results": {}}
    for name, changes in ROWS.items():
        if options.print or name in ALONE or options.only not in name:
            continue
        try:
            document["results"][name] = compared(changes)
        except RefusedError as error:
            sys.exit(f"{name}: {error}")
        print(name, document["results"][name], file=sys.stderr, flush=True)
        document.update(command="python tests/bench/agreement.py", **machine())
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document["results"]))
    far = [n for n, one in document["results"].items() if one["largest_difference"] > BAR]
    if far:
        sys.exit(f"beyond {BAR:.0%}: {', '.join(far)}")


if __name__ == "__main__":
    main()
