"""Early stopping: when it stops, what is said of it, and that a resumed run judges as an unbroken one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memconsole.plan.check import check
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.plan.tasks import TASKS
from memconsole.plan.tasks.judging import scores_of
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log import events
from memconsole.runs.record.run_store import create_run
from memconsole_trainer.loop.progress import Progress
from tests.training.harness.runs import attempt, final, plan, told


@pytest.fixture(autouse=True)
def _own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def judged(
    losses: list[float | None], minimum: float = 0.0, task: str = "language", **metrics: list[float]
) -> list[int]:
    progress, found = Progress(total_steps=100, steps_per_epoch=10), []
    for n, loss in enumerate(losses):
        progress.step += 1
        own = {key: values[n] for key, values in metrics.items()}
        scores = () if loss is None else scores_of(TASKS[task], loss, own)
        progress.judge(TASKS[task], scores, minimum)
        progress.judge(TASKS[task], scores, minimum)  # another look at the step counts for nothing
        found.append(progress.stale_evaluations)
    return found


def test_evaluations_that_bring_nothing_are_counted_and_a_better_one_starts_anew() -> None:
    assert judged([5.0, 4.0, 4.0, 4.1, 3.9, 3.9]) == [0, 0, 1, 2, 0, 1]
    assert judged([5.0, None, 4.0]) == [0, 1, 0]
    # Small steps are no improvement one by one, but add up against the last one that counted.
    assert judged([5.0, 4.95, 4.91, 4.89], minimum=0.1) == [0, 1, 2, 0]


def test_evaluations_count_by_the_measure_that_judges_the_best_checkpoint() -> None:
    rising = {"task": "recommendation", "ndcg_at_10": [0.1, 0.2, 0.3, 0.3, 0.3]}
    assert judged([2.0, 2.1, 2.2, 2.1, 2.3], **rising) == [0, 0, 0, 0, 1]  # type: ignore[arg-type]
    assert judged([2.0, 2.1, 2.2, 2.1, 2.3], 0.15, **rising) == [0, 1, 0, 1, 2]  # type: ignore[arg-type]


def counters(run: RunDirectory) -> tuple[int, int, dict[str, float]]:
    state = json.loads((run.committed_checkpoints()[-1] / "state.json").read_text())["progress"]
    return state["judged_step"], state["stale_evaluations"], state["patience_scores"]


def test_a_run_stops_early_says_why_and_a_resumed_one_stops_at_the_same_step(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # No loss of this small run is 9 nats better than the first.
    early = plan(
        text,
        train__max_steps=40,
        train__evaluate_every=3,
        train__early_stopping_patience=3,
        train__early_stopping_minimum=9.0,
    )
    whole, broken = create_run(early), create_run(early)
    assert attempt(whole) == 0
    assert final(whole)["step"] == 12
    (ended,) = told(whole, events.Ended)
    assert ended.early.startswith("stopped early at step 12 of 40")
    assert "more than 9" in ended.early
    assert "in 3 evaluations" in ended.early
    assert "Stopped early at step 12" in capsys.readouterr().out
    # Stopped in the middle of an evaluation, and between two of them.
    assert attempt(broken, lambda phase, step: phase == "evaluate" and step == 6) == 75
    assert attempt(broken, lambda phase, step: step == 10) == 75
    assert attempt(broken) == 0
    assert counters(broken) == counters(whole)
    assert final(broken)["step"] == 12
    evaluated = [(e.step, e.loss) for e in told(broken, events.Evaluation)]
    assert evaluated == [(e.step, e.loss) for e in told(whole, events.Evaluation)]


def test_patience_0_never_stops_and_patience_without_validation_is_refused() -> None:
    progress = Progress(total_steps=9, steps_per_epoch=9, step=5, stale_evaluations=100)
    assert not progress.finished(Plan())
    assert progress.finished(replace(Plan(), {"train.early_stopping_patience": 100}))
    wrong = {"train.early_stopping_patience": 2, "data.validation_fraction": 0.0}
    with pytest.raises(PlanError, match="no validation loss to watch"):
        check(replace(Plan(), wrong))
