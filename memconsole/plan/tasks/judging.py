"""Which evaluation of a run is best: by the measure of its task, or by the loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from memconsole.plan.tasks.task import Measure, Task

_Judged = TypeVar("_Judged")


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """One figure that evaluations are compared by."""

    key: str
    value: float
    lower_is_better: bool = True

    @property
    def cost(self) -> float:
        """The value, or its negative: lower is better."""
        return self.value if self.lower_is_better else -self.value


def scores_of(task: Task, loss: float | None, metrics: Mapping[str, float]) -> tuple[Score, ...]:
    """What an evaluation is compared by: the task's measures that it has, in the task's order, and
    then its loss."""
    values = dict(metrics) | ({} if loss is None else {task.loss.key: loss})
    return tuple(
        Score(key=m.key, value=values[m.key], lower_is_better=m.lower_is_better)
        for m in (*task.judges, task.loss)
        if m.key in values and math.isfinite(values[m.key])
    )


def best_of(judged: Iterable[tuple[_Judged, Sequence[Score]]]) -> tuple[_Judged, Score] | None:
    """The best one and the score that decided. Of equal ones that with the lowest loss is best, then the first.

    The first measure that all of them have decides; the loss is none of these. If there is no such measure, the first
    that any has decides among those that have it: a closed loop that is simulated at some evaluations only is not
    compared with the loss of others.
    """
    candidates = [(candidate, scores) for candidate, scores in judged if scores]
    if not candidates:
        return None
    decisive = _decisive_key([scores for _, scores in candidates])
    compared = [
        (candidate, score, scores[-1])
        for candidate, scores in candidates
        for score in scores
        if score.key == decisive
    ]
    best, score, _ = min(compared, key=lambda c: (c[1].cost, c[2].cost))
    return best, score


def _decisive_key(scores: Sequence[Sequence[Score]]) -> str:
    """The measure by which evaluations with these scores are compared, as `best_of` says."""
    measures = [{score.key for score in each[:-1]} for each in scores]  # without the loss
    shared = [score.key for score in scores[0] if all(score.key in keys for keys in measures)]
    return shared[0] if shared else max(scores, key=len)[0].key


def improves(
    task: Task, best: dict[str, float], scores: Sequence[Score], minimum: float = 0.0
) -> bool:
    """Whether an evaluation is better than the best one before it, by more than `minimum` of the
    measure that decides. `best` holds the values of the best one, and is updated."""
    before = scores_of(task, best.get(task.loss.key), best)
    if before:
        first = before[0]
        value = first.value + (-minimum if first.lower_is_better else minimum)
        before = (msgspec.structs.replace(first, value=value), *before[1:])
    better = best_of(((False, before), (True, scores)))
    if better is None or not better[0]:
        return False
    best.clear()
    best.update({score.key: score.value for score in scores})
    return True


def measure_of(task: Task, key: str) -> Measure:
    """The measure called `key`: one of the measures that judge the task's evaluations, or its loss."""
    return next(m for m in (*task.judges, task.loss) if m.key == key)
