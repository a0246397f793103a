"""Whole runs on preferences: pairs stay together, DPO's reference is the starting weights, and a resume is exact."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from memconsole.memory.estimate import model_of
from memconsole.memory.run_time import run_steps, steps_are_known
from memconsole.plan.plan import Plan, replace
from memconsole.plan.training.resuming import changed
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log import events
from memconsole.runs.record.records import PAUSED
from memconsole.runs.record.run_store import create_run
from memconsole_trainer.data.text.rows.pairs import SCORED, each_once
from memconsole_trainer.tasks import preference
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
    rows[3]["rejected"] = rows[3]["chosen"]
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
    assert warning.startswith(
        ("1 of ", "2 of ")
    )  # a row that is trained and evaluated counts twice
    scoring = [m for m in told(whole, events.Memory) if m.phase == "reference"]
    assert scoring, "the gauges show memory while answers are scored"
    first, last = told(whole, events.Evaluation)
    assert first.metrics["reference_loss"] == pytest.approx(np.log(2.0))
    assert last.loss < first.loss < first.metrics["reference_loss"]
    assert last.metrics["reward_accuracy"] == 1.0
    assert last.metrics["reward_margin"] == pytest.approx(
        last.metrics["chosen_reward"] - last.metrics["rejected_reward"], abs=1e-5
    )
    assert "token_f1" in last.metrics, (
        "held-out prompts are answered, and compared with the chosen answer"
    )
    began = told(whole, events.Step)[0]
    assert began.loss == pytest.approx(np.log(2.0), abs=1e-5), "the first step has no preference"
    again = create_run(plan(pairs, backend, data__streaming=streaming))
    assert attempt(again, lambda phase, step: step == 5) == 75
    kept = (again.path / FILE).read_bytes()
    assert attempt(again) == 0
    assert (again.path / FILE).read_bytes() == kept, (
        "the trained weights do not replace the reference"
    )
    assert state_hashes(again) == state_hashes(whole)
    assert [e.loss for e in told(again, events.Evaluation)] == [first.loss, last.loss]


@pytest.mark.parametrize(
    ("backend", "objective"), [("torch", "orpo"), ("jax", "orpo"), ("torch", "simpo")]
)
def test_a_run_without_a_reference_scores_nothing_and_resumes_exactly(
    backend: str, objective: str, pairs: Path
) -> None:
    whole, again = (create_run(plan(pairs, backend, train__objective=objective)) for _ in range(2))
    phases: list[str] = []

    def watch(phase: str, step: int) -> bool:
        phases.append(phase)
        return False

    assert attempt(whole, watch) == 0, final(whole)
    assert "train" in phases
    assert "reference" not in phases
    assert not (whole.path / FILE).exists()
    first, last = told(whole, events.Evaluation)
    assert "reference_loss" not in last.metrics
    assert last.loss < first.loss
    assert last.metrics["reward_accuracy"] == 1.0
    assert last.metrics["reward_margin"] == pytest.approx(
        last.metrics["chosen_reward"] - last.metrics["rejected_reward"], abs=1e-5
    )
    assert attempt(again, lambda phase, step: step == 5) == 75
    assert attempt(again) == 0
    assert state_hashes(again) == state_hashes(whole)


@pytest.mark.parametrize("objective", ["next-token", "simpo"])
def test_a_plan_knows_the_steps_of_records_that_a_run_has_counted(
    objective: str, pairs: Path, tmp_path: Path
) -> None:
    records = tmp_path / "records.jsonl"
    answered = [json.loads(line) for line in pairs.read_text().splitlines()]
    records.write_text(
        "".join(
            json.dumps({"prompt": r["prompt"], "completion": r["chosen"]}) + "\n" for r in answered
        )
    )
    source = records if objective == "next-token" else pairs
    changes = {"train__max_steps": None, "train__epochs": 1, "train__objective": objective}
    changes |= {"train__batch_size": 2, "optimize__accumulation_steps": 1}
    made = plan(source, "torch", **changes)
    run = create_run(made)
    assert attempt(run) == 0, final(run)
    (total,) = {p.total_steps for p in told(run, events.Phase) if p.total_steps is not None}
    assert steps_are_known(made)
    assert run_steps(made, model_of(made)) == total


def scored(run: RunDirectory) -> NDArray[np.void]:
    """The log-likelihoods that a run keeps."""
    found: NDArray[np.void] = np.load(run.path / FILE)["answers"]
    assert found.dtype == SCORED
    return found


def test_a_row_that_was_scored_twice_has_the_likelihood_that_came_first() -> None:
    twice = np.array([(7, -2.0), (3, -1.0), (7, -2.5)], SCORED)
    assert each_once(twice).tolist() == [(3, -1.0), (7, -2.0)]


def test_a_run_scores_what_it_trains_and_a_longer_one_scores_the_rest(pairs: Path) -> None:
    run = create_run(plan(pairs, "torch", train__max_steps=2))
    assert attempt(run) == 0, final(run)
    few = scored(run)
    assert len(few) < 2 * 50
    run.write_plan(changed(run.read_plan(), {"train.max_steps": 12}))  # more than an epoch
    assert attempt(run) == 0, final(run)
    every = scored(run)
    assert len(every) == 2 * 59, "all but two that are equal, also those of held-out pairs"
    *_, warning = [w.message for w in told(run, events.Warning) if "teach nothing" in w.message]
    assert warning.startswith(
        ("1 of ", "2 of ")
    )  # a row that is trained and evaluated counts twice
    assert np.isin(few, every).all(), "with the starting weights, not those of step 2"


def test_scoring_that_was_stopped_goes_on_with_what_it_has(pairs: Path) -> None:
    whole, run = (create_run(plan(pairs, "torch")) for _ in range(2))
    assert attempt(whole) == 0
    batches = 0

    def third_batch(phase: str, step: int) -> bool:
        nonlocal batches
        batches += phase == "reference"
        return batches == 3

    assert attempt(run, third_batch) == 75
    some = scored(run)
    assert 0 < len(some) < len(scored(whole))
    assert attempt(run) == 0, final(run)
    assert np.isin(some, scored(run)).all()
    assert np.array_equal(scored(run), scored(whole))
    assert state_hashes(run) == state_hashes(whole)


def test_a_full_disk_does_not_end_scoring_or_change_how_it_ended(
    pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create_run(plan(pairs, "torch", train__max_steps=1))
    monkeypatch.setattr(preference, "KEPT_SECONDS", 0.0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(preference, "write_atomic", full)
        batches = 0

        def third_batch(phase: str, step: int) -> bool:
            nonlocal batches
            batches += phase == "reference"
            return batches == 3

        assert attempt(run, third_batch) == 75, final(run)
    assert attempt(run) == 0, final(run)


def test_what_is_scored_is_kept_once_a_minute(pairs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = create_run(plan(pairs, "torch"))
    monkeypatch.setattr(preference, "KEPT_SECONDS", 0.0)
    kept: list[int] = []

    def watch(phase: str, step: int) -> bool:
        if phase == "reference" and (run.path / FILE).exists():
            kept.append(len(scored(run)))
        return False

    assert attempt(run, watch) == 0
    assert len(set(kept)) > 2, "a killed trainer would find them"


def test_a_run_pauses_while_its_answers_are_scored(pairs: Path) -> None:
    run = create_run(plan(pairs, "torch", train__max_steps=1))

    def pause_once(phase: str, step: int) -> bool:
        number = run.newest_attempt()
        assert number is not None
        request = run.attempt_path(number) / PAUSED
        if phase == "reference" and "paused" not in seen:
            request.touch()
        if phase == "paused":
            request.unlink(missing_ok=True)
        seen.append(phase)
        return False

    seen: list[str] = []
    assert attempt(run, pause_once) == 0
    phases = [p.phase for p in told(run, events.Phase)]
    first = phases.index("paused")
    assert phases[first - 1] == phases[first + 1] == "reference"


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_lost_reference_is_made_again_of_the_starting_weights(damage: str, pairs: Path) -> None:
    whole, run = (create_run(plan(pairs, "torch")) for _ in range(2))
    assert attempt(whole) == 0
    assert attempt(run, lambda phase, step: step == 3) == 75
    file = run.path / FILE
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:100])
    assert attempt(run) == 0, final(run)
    assert np.array_equal(scored(run), scored(whole))
    assert state_hashes(run) == state_hashes(whole)


def test_a_run_whose_starting_weights_are_gone_needs_its_reference(
    pairs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = create_run(plan(pairs, "torch", train__max_steps=2))
    assert attempt(first) == 0
    begun = {
        "model.weights": str(first.committed_checkpoints()[-1]),
        "data.tokenizer": str(first.path / "tokenizer.json"),
        "data.vocab_size": 300,
    }
    run = create_run(replace(plan(pairs, "torch"), begun))
    assert attempt(run, lambda phase, step: step == 3) == 75, final(run)
    shutil.rmtree(first.path / "checkpoints")
    (run.path / FILE).unlink()
    assert attempt(run) != 0
    assert final(run)["reason"] == "bad_data"
    assert "the weights that training started from are gone" in capsys.readouterr().err


def test_held_out_pairs_without_an_answer_in_their_rows_are_refused(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "Where? " * 30, "chosen": "Here.", "rejected": "No."}))
    run = create_run(plan(pairs, "torch", data__validation=str(long)))
    assert attempt(run) != 0
    assert final(run)["reason"] == "bad_data"
    assert "the answers of every held-out pair are equal, or not within" in capsys.readouterr().err


def test_pairs_whose_answers_are_all_equal_are_refused_as_such(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alike = tmp_path / "alike.jsonl"
    alike.write_text('{"prompt": "Where? ", "chosen": "Here.", "rejected": "Here."}\n' * 30)
    changes = {"data__source": str(alike), "data__validation": str(pairs)}
    run = create_run(plan(pairs, "torch", **changes))
    assert attempt(run) != 0
    assert final(run)["reason"] == "bad_data"
    assert "are equal, or not within" in capsys.readouterr().err


def test_cut_answers_of_held_out_pairs_are_warned_of(pairs: Path, tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    answers = ("Here.", "There. " * 60), ("Here. " * 60, "There."), ("Here.", "There.")
    held.write_text(
        "".join(
            json.dumps({"prompt": "Where? ", "chosen": chosen, "rejected": rejected}) + "\n"
            for chosen, rejected in answers
        )
    )
    run = create_run(plan(pairs, "torch", data__validation=str(held), train__max_steps=1))
    assert attempt(run) == 0, final(run)
    warnings = [w.message for w in told(run, events.Warning) if "held-out pairs" in w.message]
    (warning,) = warnings
    assert warning.startswith(
        "2 of 3 held-out pairs are longer than a row and are cut, 2 of them before or in what is learned"
    )
