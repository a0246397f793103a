"""Whether each optimizer learns with the rate, warm-up and decay that a plan gets when it sets none.

    python tests/bench/recipe.py [--write] [OPTIMIZER ...]

Trains a decoder of 300,000 parameters in torch with each optimizer, once with the optimizer's own recipe and once with
AdamW's rate and decay. `--write` keeps the losses in results/recipe.json, those of the named optimizers or of all, and
the table in docs/training.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.plan.plan import Plan, replace
from memconsole.plan.training import recipe
from tests.bench.trained import Settings, into_page, machine, markdown, run

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


def measured(optimizer: str) -> dict[str, Any]:
    """The recipe, its validation loss, the unigram loss beside it, and the loss with AdamW's recipe."""
    mine: dict[str, Any] = {**SMALL, "optimize.optimizer": optimizer}
    plan = replace(Plan(), mine)
    like = recipe.with_recipe(replace(plan, {"optimize.optimizer": "adamw"})).train
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
    rows = [["optimizer", "rate", "decay", "loss", "with AdamW's rate", "unigram"]]
    for optimizer in recipe.OPTIMIZER_FACTORS:
        one = results[optimizer]
        other = one.get("as_adamw")
        rows.append(
            [
                optimizer,
                f"{one['learning_rate']:g}",
                f"{one['weight_decay']:g}",
                f"{one['loss']:.2f}",
                "" if other is None else f"{other:.2f}",
                f"{one['unigram']:.2f}",
            ]
        )
    return markdown(rows)


def main() -> None:
    named = [word for word in sys.argv[1:] if word != "--write"]
    results = json.loads(RESULTS.read_text())["results"] if named else {}
    results |= {name: measured(name) for name in named or recipe.OPTIMIZER_FACTORS}
    print(table(results))
    if "--write" in sys.argv[1:]:
        document = {"results": results, "command": "python tests/bench/recipe.py", **machine()}
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
        into_page(PAGE, "recipe", table(results))


if __name__ == "__main__":
    main()
