"""The start of a run takes longer for a model that is larger, or has more to rehearse."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from memconsole.memory.estimate import estimate, model_of
from memconsole.memory.run_time import START_SECONDS, run_seconds, run_steps, start_seconds
from memconsole.memory.seconds import step_seconds
from memconsole.plan.plan import Plan, replace
from tests.unit.memory.cards import card

MEASURED = {
    ("torch", "gearhead"): 7.5,
    ("jax", "gearhead"): 16.2,
    ("torch", "gpt2"): 19.1,
    ("jax", "gpt2"): 29.2,
}
"""Seconds until the first step, of three rounds the least or, for JAX, the first: `tests/bench/starting.py` with the
settings in `memory/run_time.py`."""


def start(**changes: Any) -> float:
    plan = replace(Plan(), {key.replace("__", "."): value for key, value in changes.items()})
    return start_seconds(plan, model_of(plan), card(2**36, "cpu"))


@pytest.mark.parametrize(("backend", "model"), MEASURED)
def test_the_start_of_larger_models_is_near_what_was_measured(backend: str, model: str) -> None:
    measured = MEASURED[backend, model]
    assert start(backend=backend, model__name=model) == pytest.approx(measured, rel=0.5)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_small_model_adds_next_to_nothing(backend: str) -> None:
    seconds = start(backend=backend)
    assert START_SECONDS[backend] < seconds < START_SECONDS[backend] + 0.2


def test_every_block_that_jax_compiles_adds_to_the_start() -> None:
    whole, loop = (
        start(backend="jax", model__name="gpt2", optimize__compile=compiles)
        for compiles in (True, False)
    )
    assert whole - loop == pytest.approx(50 - 19, rel=0.1)


def test_what_is_not_rehearsed_or_not_trained_takes_no_time() -> None:
    whole = start(model__name="gpt2")
    none = start(model__name="gpt2", train__preflight=False)
    few = start(model__name="gpt2", optimize__optimizer="sgd")
    assert START_SECONDS["torch"] + 2 < none < few < whole
    adapters = start(model__name="gpt2", optimize__lora_rank=8, optimize__freeze_base=True)
    assert none < adapters < none + 0.1


def test_the_start_is_part_of_the_run() -> None:
    plan = replace(Plan(), {"model.name": "gpt2", "train.max_steps": 10, "device.name": "cpu"})
    budget = card(2**36, "cpu")
    found = estimate(plan, budget)
    assert found.run_seconds == run_seconds(plan, model_of(plan), budget)
    begun = start_seconds(plan, model_of(plan), budget)
    assert found.run_seconds == pytest.approx(begun + 10 * found.step_seconds)


def test_a_pair_is_two_rows_however_short_its_answers_are(tmp_path: Path) -> None:
    pair = {"prompt": "Where does the heron live?", "chosen": "At the pond.", "rejected": "No."}
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({**pair, "id": n}) + "\n" for n in range(20_000)))
    changes = {
        "data.source": str(path), "data.template": "chatml", "data.validation_fraction": 0.1,
        "train.objective": "dpo", "train.epochs": 3, "train.batch_size": 16,
    }  # fmt: skip
    plan = replace(Plan(), changes)
    assert run_steps(plan, model_of(plan)) == pytest.approx(3 * 0.9 * 20_000 / 8, rel=0.01)
    few = replace(plan, {"data.max_examples": 100})
    assert run_steps(few, model_of(few)) == 3 * math.ceil(0.9 * 100 / 8)


def test_dpo_scores_the_pairs_that_it_trains_before_it_begins() -> None:
    """In a run of one step those of the step, in a long one those of an epoch: a forward pass each."""
    changes = {"device.name": "cpu", "train.objective": "dpo"}
    budget = card(2**36, "cpu")
    starts = {}
    for steps in (1, 2, 10**9, 2 * 10**9):
        plan = replace(Plan(), {**changes, "train.max_steps": steps})
        starts[steps] = start_seconds(plan, model_of(plan), budget)
    step = step_seconds(plan, model_of(plan), budget)
    assert 0.2 * step < starts[2] - starts[1] < 0.5 * step
    assert starts[2] < starts[10**9] == starts[2 * 10**9]
