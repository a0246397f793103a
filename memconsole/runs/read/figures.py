"""The measures of an evaluation besides its loss, named by the run's task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from memconsole.plan.tasks import Measure, Task


class Evaluated(Protocol):
    """An evaluation, as events and reports store it."""

    @property
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def bits_per_byte(self) -> float | None: ...


class Figure(NamedTuple):
    """One number of an evaluation."""

    measure: Measure
    value: float
    baseline: bool
    """Whether the number is a baseline: the loss of a trivial model, not of the trained one."""

    @property
    def words(self) -> str:
        """The number with its name; a baseline is in brackets."""
        label = self.measure.label
        return f"({label} {self.value:.4f})" if self.baseline else f"{self.value:.4f} {label}"


def baseline_of(task: Task, evaluations: Sequence[Evaluated]) -> Figure | None:
    """The lowest baseline loss at the last evaluation, which the model must beat; or None."""
    found = figures(task, evaluations[-1]) if evaluations else ()
    return min((f for f in found if f.baseline), key=lambda f: f.value, default=None)


def figures(task: Task, evaluation: Evaluated) -> tuple[Figure, ...]:
    """The task's headline measures and then its baselines, those that the evaluation has."""
    found = dict(evaluation.metrics)
    if evaluation.bits_per_byte is not None:
        found["bits_per_byte"] = evaluation.bits_per_byte
    return tuple(
        Figure(measure, found[measure.key], baseline)
        for measures, baseline in (
            (task.measures, False),
            (task.derived, False),
            (task.baselines, True),
        )
        for measure in measures
        if measure.headline and measure.key in found
    )
