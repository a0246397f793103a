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
    found = dict(metrics) | ({} if loss is None else {task.loss.key: loss})
    return tuple(
        Score(key=m.key, value=found[m.key], lower_is_better=m.lower_is_better)
        for m in (*task.judges, task.loss)
        if m.key in found and math.isfinite(found[m.key])
    )


def best_of(judged: Iterable[tuple[_Judged, Sequence[Score]]]) -> tuple[_Judged, Score] | None:
    """The best one and the score that decided. Of equal ones that with the lowest loss is best, then the first.

    The first measure that all of them have decides; the loss is none of these. If there is no such measure, the first
    that any has decides among those that have it: a closed loop that is simulated at some evaluations only is not
    compared with the loss of others.
    """
    every = [(one, scores) for one, scores in judged if scores]
    if not every:
        return None
    held = [{score.key for score in scores[:-1]} for _, scores in every]
    shared = [score.key for score in every[0][1] if all(score.key in keys for keys in held)]
    decisive = shared[0] if shared else max((scores for _, scores in every), key=len)[0].key
    scored = [(one, s, scores[-1]) for one, scores in every for s in scores if s.key == decisive]
    one, score, _ = min(scored, key=lambda found: (found[1].cost, found[2].cost))
    return one, score


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
    found = best_of(((False, before), (True, scores)))
    if found is None or not found[0]:
        return False
    best.clear()
    best.update({score.key: score.value for score in scores})
    return True


def measure_of(task: Task, key: str) -> Measure:
    """The measure called `key`: one of the measures that judge the task's evaluations, or its loss."""
    return next(m for m in (*task.judges, task.loss) if m.key == key)
