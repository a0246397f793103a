"""The best evaluation is that with the best measure of its task, or with the lowest loss."""

from __future__ import annotations

import math

from memconsole.plan.tasks import TASKS
from memconsole.plan.tasks.judging import Score, best_of, improves, scores_of
from memconsole.runs.read.state.figures import best_evaluation
from memconsole.runs.record.log.events import Evaluation

RANKING, CONTROL, TEXT = TASKS["recommendation"], TASKS["regression"], TASKS["language"]


def evaluation(step: int, loss: float | None, **metrics: float) -> Evaluation:
    return Evaluation(
        step=step, loss=loss, bits_per_byte=None, tokens=1, seconds=1.0, metrics=metrics
    )


def test_the_measure_of_the_task_judges_and_its_direction_counts() -> None:
    higher = [
        evaluation(1, 1.0, recall_at_10=1.0, ndcg_at_10=0.2),
        evaluation(2, 2.0, recall_at_10=1.0, ndcg_at_10=0.3),
    ]
    found = best_evaluation(RANKING, higher)
    assert found is not None
    assert (found.step, found.measure.key, found.value) == (2, "ndcg_at_10", 0.3)
    assert found.words == "0.3000 NDCG@10 at step 2, higher is better"
    lower = [evaluation(1, 2.0, cost_ratio=1.5), evaluation(2, 1.0, cost_ratio=9.0)]
    assert best_evaluation(CONTROL, lower)[::2] == (CONTROL.judges[0], 1)  # type: ignore[index]
    assert best_evaluation(TEXT, lower)[::2] == (TEXT.loss, 2)  # type: ignore[index]


def test_the_loss_judges_where_no_measure_was_taken_and_one_that_was_taken_wins() -> None:
    losses = [evaluation(1, 3.0), evaluation(2, 2.0), evaluation(3, None)]
    assert best_evaluation(CONTROL, losses)[::2] == (CONTROL.loss, 2)  # type: ignore[index]
    mixed = [*losses, evaluation(4, 5.0, cost_ratio=2.0), evaluation(5, 1.0, cost_ratio=math.nan)]
    assert best_evaluation(CONTROL, mixed)[::2] == (CONTROL.judges[0], 4)  # type: ignore[index]
    assert best_evaluation(CONTROL, [evaluation(1, None)]) is None


def test_newer_checkpoints_are_compared_with_older_ones_by_the_measure_that_both_hold() -> None:
    older = [evaluation(1, 1.0, recall_at_10=0.9), evaluation(2, 2.0, recall_at_10=0.8)]
    assert best_evaluation(RANKING, older)[::2] == (RANKING.judges[1], 1)  # type: ignore[index]
    newer = evaluation(3, 9.0, recall_at_10=0.02, ndcg_at_10=0.01)
    assert best_evaluation(RANKING, [*older, newer])[::2] == (RANKING.judges[1], 1)  # type: ignore[index]
    best = {"recall_at_10": 0.9, "loss": 1.0}
    assert not improves(RANKING, best, scores_of(RANKING, newer.loss, newer.metrics))


def test_of_equal_ones_the_lowest_loss_is_best_and_then_the_first() -> None:
    equal = [evaluation(n, loss, ndcg_at_10=1.0) for n, loss in ((1, 3.0), (2, 2.0), (3, 2.0))]
    found = best_evaluation(RANKING, equal)
    assert found is not None
    assert (found.measure.key, found.value, found.step) == ("ndcg_at_10", 1.0, 2)
    score = (Score(key="loss", value=1.0),)
    assert best_of([("a", score), ("b", score)]) == ("a", score[0])
    assert best_of([("a", ())]) is None


def test_an_improvement_is_what_best_of_all_would_choose() -> None:
    told = [
        evaluation(1, 3.0), evaluation(2, 2.0), evaluation(3, 2.5, cost_ratio=4.0),
        evaluation(4, 1.0), evaluation(5, 2.9, cost_ratio=4.5), evaluation(6, 2.8, cost_ratio=3.0),
        evaluation(7, 2.9, cost_ratio=3.0), evaluation(8, 2.7, cost_ratio=3.0),
    ]  # fmt: skip
    best: dict[str, float] = {}
    for n, one in enumerate(told):
        better = improves(CONTROL, best, scores_of(CONTROL, one.loss, one.metrics))
        found = best_evaluation(CONTROL, told[: n + 1])
        assert found is not None
        assert better == (found.step == one.step), one.step
    assert best == {"cost_ratio": 3.0, "loss": 2.7}
