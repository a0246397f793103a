"""Whole runs of DPO: pairs stay together, the reference is that of the starting weights, and a resume is exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memconsole.plan.plan import Plan, replace
from memconsole.runs.record.directory import create_run
from memconsole.runs.record.log import events
from memconsole_trainer.data.text.rows.pairs import SCORED
from memconsole_trainer.tasks.preference import FILE
from tests.training.harness.runs import TINY, attempt, final, state_hashes, told

ANIMALS = ("heron", "fox", "otter", "crow", "badger", "hare", "owl", "newt")
SETTINGS: dict[str, Any] = {
    **TINY,
    "model.weights": "random",
    "data.template": "prompt",
    "data.sequence_length": 24,
    "train.objective": "dpo",
    "train.epochs": 2,
    "train.max_steps": 8,
    "train.log_every": 1,
    "train.evaluate_every": 4,
    "train.answered_records": 2,
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [
        {
            "prompt": f"Where does {ANIMALS[number % 8]} {number} live? ",
            "chosen": f"It lives in wood {number % 3}, sir.",
            "rejected": "In a wood." if number != 5 else "In a wood. " * 30,
        }
        for number in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(autouse=True)
def _own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def plan(pairs: Path, backend: str, **changes: Any) -> Plan:
    settings = {key.replace("__", "."): value for key, value in changes.items()}
    return replace(Plan(), {**SETTINGS, "backend": backend, "data.source": str(pairs), **settings})


@pytest.mark.parametrize(
    ("backend", "streaming"), [("torch", True), ("torch", False), ("jax", True)]
)
def test_a_run_on_preferences_learns_them_and_a_resumed_one_is_the_same(
    backend: str, streaming: bool, pairs: Path
) -> None:
    whole = create_run(plan(pairs, backend, data__streaming=streaming))
    assert attempt(whole) == 0, final(whole)
    (warning,) = [
        w.message for w in told(whole, events.Warning) if "longer than a row" in w.message
    ]
    assert warning.startswith("1 of ")
    first, last = told(whole, events.Evaluation)
    assert first.metrics["reference_loss"] == pytest.approx(np.log(2.0))
    assert last.loss < first.loss < first.metrics["reference_loss"]
    assert last.metrics["preferred_share"] == 1.0
    assert last.metrics["reward_margin"] == pytest.approx(
        last.metrics["chosen_reward"] - last.metrics["rejected_reward"], abs=1e-5
    )
    assert "token_f1" in last.metrics, (
        "held-out prompts are answered, and compared with the chosen answer"
    )
    began = told(whole, events.Step)[0]
    assert began.loss == pytest.approx(np.log(2.0), abs=1e-5), "the first step has no preference"
    scored = np.load(whole.path / FILE)
    assert scored.dtype == SCORED
    assert len(scored) == 2 * 60, "every answer, also those of held-out pairs"

    again = create_run(plan(pairs, backend, data__streaming=streaming))
    assert attempt(again, lambda phase, step: step == 5) == 75
    kept = (again.path / FILE).read_bytes()
    assert attempt(again) == 0
    assert (again.path / FILE).read_bytes() == kept, (
        "the trained weights do not replace the reference"
    )
    assert state_hashes(again) == state_hashes(whole)
    assert [e.loss for e in told(again, events.Evaluation)] == [first.loss, last.loss]


def test_without_its_reference_a_run_is_not_resumed(
    pairs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = create_run(plan(pairs, "torch"))
    assert attempt(run, lambda phase, step: step == 3) == 75
    (run.path / FILE).unlink()
    assert attempt(run) != 0
    assert final(run)["reason"] == "bad_data"
    words = capsys.readouterr().err
    assert FILE in words
    assert "--from-scratch" in words


def test_pairs_that_the_reference_has_not_scored_are_refused(
    pairs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = create_run(plan(pairs, "torch", train__evaluate_every=0))
    assert attempt(run, lambda phase, step: step == 3) == 75
    scored = np.load(run.path / FILE)
    with (run.path / FILE).open("wb") as file:
        np.save(file, scored[:10])
    assert attempt(run) != 0
    assert final(run)["reason"] == "bad_data"
    assert "has not scored some of these pairs" in capsys.readouterr().err


def test_held_out_pairs_without_an_answer_in_their_rows_are_refused(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "Where? " * 30, "chosen": "Here.", "rejected": "No."}))
    run = create_run(plan(pairs, "torch", data__validation=str(long)))
    assert attempt(run) != 0
    assert final(run)["reason"] == "bad_data"
    assert "no answer of the held-out pairs" in capsys.readouterr().err
