"""Whether each optimizer learns with the rate, warm-up and decay that a plan gets when it sets none.

    python tests/bench/recipe.py [--write]

Trains a decoder of 300,000 parameters with each optimizer in each backend, once with the optimizer's own recipe and
once with AdamW's rate and decay. `--write` keeps the losses in results/recipe.json and the table in docs/training.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.plan import recipe
from memconsole.plan.plan import Plan, replace
from tests.bench.trained import BACKENDS, Settings, into_page, machine, markdown, run

RESULTS = Path(__file__).with_name("results") / "recipe.json"
PAGE = ROOT / "docs" / "training.md"
SMALL: Settings = {
    "model.name": "stories",
    "model.target_params": 300_000,
    "data.source": "python-stdlib",
    "data.vocab_size": 512,
    "data.sequence_length": 64,
    "data.max_examples": 25,
    "train.batch_size": 16,
    "train.max_steps": 300,
    "train.evaluation_batches": 20,
    "train.sample_tokens": 0,
    "train.preflight": False,
    "device.name": "cpu",
}


def measured(backend: str, optimizer: str) -> dict[str, Any]:
    """The recipe, its validation loss, the unigram loss beside it, and the loss with AdamW's recipe."""
    mine: dict[str, Any] = {**SMALL, "backend": backend, "optimize.optimizer": optimizer}
    plan = replace(Plan(), mine)
    like = recipe.settled(replace(plan, {"optimize.optimizer": "adamw"})).train
    found = run(mine)["evaluations"][-1]
    numbers = {
        "learning_rate": recipe.learning_rate(plan),
        "weight_decay": recipe.weight_decay(plan),
        "loss": found["loss"],
        "unigram": found["metrics"]["unigram_loss"],
    }
    same = (numbers["learning_rate"], numbers["weight_decay"])
    if same != (like.learning_rate, like.weight_decay):
        theirs = {
            "train.learning_rate": like.learning_rate,
            "train.weight_decay": like.weight_decay,
        }
        numbers["as_adamw"] = run({**mine, **theirs})["evaluations"][-1]["loss"]
    return numbers


def table(results: dict[str, dict[str, Any]]) -> str:
    rows = [["optimizer", "rate", "decay"]]
    for backend in BACKENDS:
        rows[0] += [f"loss, {backend}", f"{backend} with AdamW's rate"]
    for optimizer in recipe.OF_OPTIMIZER:
        both = [results[backend][optimizer] for backend in BACKENDS]
        row = [optimizer, f"{both[0]['learning_rate']:g}", f"{both[0]['weight_decay']:g}"]
        for one in both:
            other = one.get("as_adamw")
            row += [f"{one['loss']:.2f}", "" if other is None else f"{other:.2f}"]
        rows.append(row)
    return markdown(rows)


def main() -> None:
    results = {
        backend: {name: measured(backend, name) for name in recipe.OF_OPTIMIZER}
        for backend in BACKENDS
    }
    print(table(results))
    if "--write" in sys.argv[1:]:
        document = {"results": results, "command": "python tests/bench/recipe.py", **machine()}
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
        into_page(PAGE, "recipe", table(results))


if __name__ == "__main__":
    main()
