"""What an evaluation came to beside its loss, in the words of the run's task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from memconsole.plan.tasks import Measure, Task


class Evaluated(Protocol):
    """An evaluation, as events and reports have it."""

    @property
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def bits_per_byte(self) -> float | None: ...


class Figure(NamedTuple):
    """One number of an evaluation."""

    measure: Measure
    value: float
    baseline: bool
    """Whether it is the loss of a model that knows next to nothing, not of the one that is trained."""

    @property
    def words(self) -> str:
        """The number with its name, baselines in brackets."""
        label = self.measure.label
        return f"({label} {self.value:.4f})" if self.baseline else f"{self.value:.4f} {label}"


def baseline_of(task: Task, evaluations: Sequence[Evaluated]) -> Figure | None:
    """The baseline to beat at the last evaluation: the lowest loss. None where there is none."""
    found = figures(task, evaluations[-1]) if evaluations else ()
    return min((f for f in found if f.baseline), key=lambda f: f.value, default=None)


def figures(task: Task, evaluation: Evaluated) -> tuple[Figure, ...]:
    """The task's measures, then its baselines, as far as the evaluation has them."""
    found = dict(evaluation.metrics)
    if evaluation.bits_per_byte is not None:
        found["bits_per_byte"] = evaluation.bits_per_byte
    return tuple(
        Figure(measure, found[measure.key], baseline)
        for measures, baseline in (
            (task.derived, False),
            (task.measures, False),
            (task.baselines, True),
        )
        for measure in measures
        if measure.key in found
    )
