"""What learning of preferences teaches and costs: a small model learns answers of two kinds, and then which is preferred.

    python tests/bench/preferences.py [--write]

In each backend a run with next-token loss learns both kinds of answers, and runs of DPO, ORPO and SimPO begin with its
weights: all weights or adapters, with full logits or chunks. The time of a step is compared with that of a step with
next-token loss on the same rows. With `--write` the results go to results/preferences.json and into docs/training.md.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.trained import BACKENDS, into_page, machine, markdown, trained

RESULTS = Path(__file__).with_name("results") / "preferences.json"
PAGE = ROOT / "docs" / "training.md"
MIB = 2**20
ANIMALS = ("heron", "fox", "otter", "crow", "badger", "hare", "owl", "newt")
PLACES = ("pond", "wood", "river", "barn", "hill", "hedge", "mill", "marsh")
PAIRS = 800
MODEL: dict[str, object] = {
    "model.name": "stories",
    "model.target_params": 3_000_000,
    "data.template": "chatml",
    "data.vocab_size": 4096,
    "data.sequence_length": 128,
    "train.batch_size": 16,
    "train.sample_tokens": 0,
    "train.answered_records": 0,
    "device.name": "cpu",
}
CASES: dict[str, dict[str, object]] = {
    "DPO, all weights": {"train.objective": "dpo", "train.learning_rate": 1e-4},
    "DPO, all weights, chunked loss": {
        "train.objective": "dpo",
        "train.learning_rate": 1e-4,
        "optimize.fused_loss": True,
    },
    "DPO, LoRA, rank 8": {
        "train.objective": "dpo",
        "train.learning_rate": 1e-3,
        "optimize.lora_rank": 8,
    },
    "ORPO, all weights": {"train.objective": "orpo", "train.learning_rate": 1e-4},
    "SimPO, all weights": {"train.objective": "simpo", "train.learning_rate": 1e-4},
}
STEPS, ROUNDS = 60, 7


def write_data(folder: Path) -> tuple[Path, Path]:
    """Questions with one of two answers, and with both of them. The polite one is preferred."""
    draw = random.Random(0)
    answered, pairs = [], []
    for number in range(PAIRS):
        kind = draw.randrange(len(ANIMALS))
        prompt = f"Where does {ANIMALS[kind]} {number} live?"
        both = f"It lives at the {PLACES[kind]}, sir.", f"At the {PLACES[kind]}."
        answered.append({"prompt": prompt, "completion": draw.choice(both)})
        pairs.append({"prompt": prompt, "chosen": both[0], "rejected": both[1]})
    found = folder / "answered.jsonl", folder / "pairs.jsonl"
    for path, rows in zip(found, (answered, pairs), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


def measured(backend: str, folder: Path) -> list[dict[str, Any]]:
    """One row for each case."""
    answered, pairs = write_data(folder)
    plain = {**MODEL, "backend": backend, "data.source": answered, "data.loss_on": "answers"}
    begun = trained({**plain, "train.max_steps": 150}, folder)
    rows = []
    for name, changes in CASES.items():
        settings = {
            **changes,
            "train.max_steps": STEPS,
            "data.source": pairs,
        }
        found = trained(settings, folder, options=("--from", begun["run"]))
        last = found["evaluations"][-1]
        rows.append(
            {
                "backend": backend,
                "case": name,
                "loss": last["loss"],
                "reward_accuracy": last["metrics"]["reward_accuracy"],
                "margin": last["metrics"]["reward_margin"],
                "estimated_bytes": estimated_bytes(found["plan"]),
                "step_bytes": found["memory"]["by_phase"]["train"],
                "step_ratio": step_ratio(backend, changes),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def estimated_bytes(stored: dict[str, Any]) -> int:
    """The formula's peak of a run's plan, which no earlier run corrects."""
    from memconsole import typed_json
    from memconsole.devices.budget import budget
    from memconsole.memory.estimate import table_of
    from memconsole.plan.plan import Plan

    plan = typed_json.convert(stored, Plan)
    return table_of(plan, budget(plan, None)).peak_bytes


def step_ratio(backend: str, changes: dict[str, object]) -> float:
    """Seconds of a step of the case, divided by those of a step of next-token loss on the same rows: the median of rounds that
    alternate."""
    import numpy as np

    from memconsole.plan import catalog
    from memconsole.plan.plan import Plan, replace
    from memconsole_trainer.backends import engine_factory
    from memconsole_trainer.engine import Batch
    from memconsole_trainer.weights.initialize import InitialWeights

    engines, batches = {}, {}
    for objective in ("next-token", changes["train.objective"]):
        settings = {**MODEL, **changes, "backend": backend, "train.objective": objective}
        plan = replace(Plan(), {**settings, "model.weights": "random"})
        model = catalog.model(plan)
        shape = 1, plan.train.batch_size, plan.data.sequence_length
        tokens = np.random.default_rng(0).integers(0, 4096, shape).astype(np.int32)
        arrays = {"inputs": tokens, "targets": tokens}
        if objective == "dpo":
            arrays["reference"] = np.zeros(shape[:2], np.float32)
        batches[objective] = Batch(arrays, float(plan.train.batch_size))
        engines[objective] = engine_factory(backend)(plan, None)
        engines[objective].build(plan, model, 100, InitialWeights(model, 0))
    ratios = []
    for _ in range(ROUNDS):
        seconds = {}
        for objective, engine in engines.items():
            began = time.perf_counter()
            for _ in range(2):
                engine.train_step(batches[objective])
            engine.synchronize()
            engine.take_metrics()
            seconds[objective] = time.perf_counter() - began
        ratios.append(seconds[changes["train.objective"]] / seconds["next-token"])
    return statistics.median(ratios[1:])


def table(rows: list[dict[str, Any]]) -> str:
    head = ["", "backend", "loss", "reward accuracy", "reward margin", "step, estimated MiB", "measured", "time of a step"]  # fmt: skip
    return markdown(
        [head]
        + [
            [
                row["case"],
                row["backend"],
                f"{row['loss']:.3f}",
                f"{row['reward_accuracy']:.1%}",
                f"{row['margin']:.2f}",
                f"{row['estimated_bytes'] / MIB:.1f}",
                f"{row['step_bytes'] / MIB:.1f}",
                f"{row['step_ratio']:.2f}x",
            ]
            for row in rows
        ],
        left=2,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rows = []
    for backend in BACKENDS:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            rows += measured(backend, Path(folder))
    print(table(rows))
    if options.write:
        RESULTS.write_text(json.dumps({**machine(), "rows": rows}, indent=1) + "\n")
        into_page(PAGE, "preferences", table(rows))


if __name__ == "__main__":
    main()
