"""Settings that people bring from nanoGPT: where the decay ends, saving only the best, and the end of a text held out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from memconsole.plan.check import check
from memconsole.plan.plan import SETTINGS, Plan, PlanError, replace
from memconsole.plan.sections.words import meant
from memconsole.runs.record.log import events
from memconsole.runs.record.run_store import create_run
from memconsole_trainer.schedule import learning_rate
from tests.training.harness.runs import attempt, plan, told
from tests.unit.window_file import window_file


def nanogpt(step: int, peak: float, low: float, warmup: int, decay: int) -> float:
    """`get_lr` of nanoGPT's train.py, with the warm-up and the end of this program: both are reached at a step of their
    own, and not one later."""
    if step < warmup:
        return peak * (step + 1) / warmup
    if step >= decay - 1:
        return low
    ratio = (step - warmup) / (decay - 1 - warmup)
    return low + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (peak - low)


def test_the_rate_falls_until_the_step_asked_for_and_stays() -> None:
    settings = {"train.learning_rate": 6e-4, "train.warmup_steps": 20, "train.max_steps": 600}
    wanted = replace(Plan(), {**settings, "train.decay_until": 400})
    for step in range(600):
        rate = learning_rate(step, wanted, 600)
        assert rate == pytest.approx(nanogpt(step, 6e-4, 6e-5, 20, 400), rel=1e-12)
    longer = replace(wanted, {"train.decay_until": 1000})
    without = replace(wanted, {"train.decay_until": None})
    assert [learning_rate(s, longer, 600) for s in range(600)] == [
        learning_rate(s, without, 600) for s in range(600)
    ]
    for schedule in ("linear", "wsd"):
        other = replace(wanted, {"train.schedule": schedule})
        assert learning_rate(399, other, 600) == pytest.approx(6e-5)
        assert learning_rate(599, other, 600) == pytest.approx(6e-5)
        assert learning_rate(300, other, 600) > 6e-5


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("lr_decay_iters", "train.decay_until"),
        ("min_lr", "train.minimum_learning_rate"),
        ("always_save_checkpoint", "train.save_only_best"),
        ("eval_iters", "train.evaluation_batches"),
        ("chronological", "data.held_out"),
    ],
)
def test_the_words_of_nanogpt_find_their_settings(word: str, key: str) -> None:
    assert meant(word, SETTINGS) == [key]


def test_only_the_first_the_best_and_the_last_checkpoint_are_saved(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    settings: dict[str, Any] = {
        "train__max_steps": 12, "train__evaluate_every": 2, "train__checkpoint_every": 1,
        "train__learning_rate": 0.05, "train__warmup_steps": 0, "train__preflight": False,
        "train__sample_tokens": 0, "data__held_out": "last",
    }  # fmt: skip
    run = create_run(plan(text, train__save_only_best=True, **settings))
    assert attempt(run, lambda phase, step: step >= 7) == 75
    assert attempt(run) == 0
    best = [e.step for e in told(run, events.Evaluation) if e.best]
    assert 0 < len(best) < len(told(run, events.Evaluation))
    saved = [c.step for c in told(run, events.Checkpoint)]
    assert saved == sorted({1, 7, 12, *best}), "7: the stop"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"data.held_out": "last", "data.source": "hf://a/b"},
            "ends is not known while it streams",
        ),
        (
            {"data.held_out": "last", "model.name": "lqr", "data.source": "windows.h5"},
            "is for text",
        ),
        ({"train.save_only_best": True, "data.validation_fraction": 0.0}, "no evaluation to be"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    changes: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    window_file(tmp_path / "windows.h5", length=128)
    with pytest.raises(PlanError, match=words):
        check(replace(Plan(), changes))
