"""The figures of a run: its best and final losses, and the measures of an evaluation, named by the run's task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple, Protocol

from memconsole.plan.tasks import Measure, Task
from memconsole.plan.tasks.judging import best_of, measure_of, scores_of
from memconsole.runs.read.state.facts import FactsSoFar
from memconsole.runs.record.log import events
from memconsole.units import format_measure


class Evaluated(Protocol):
    """An evaluation, as events and reports store it."""

    @property
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def bits_per_byte(self) -> float | None: ...


class StoredEvaluation(Evaluated, Protocol):
    """An evaluation with its loss and its step."""

    @property
    def loss(self) -> float | None: ...
    @property
    def step(self) -> int: ...


class Figure(NamedTuple):
    """One number of an evaluation."""

    measure: Measure
    value: float
    baseline: bool
    """Whether the number is a baseline: the loss of a trivial model, not of the trained one."""

    @property
    def title(self) -> str:
        """Its name in a table of a run's figures: ``final NDCG@10``, ``popularity's loss``."""
        label = self.measure.label
        return f"{label}'s loss" if self.baseline else f"final {label}"

    @property
    def words(self) -> str:
        """The number with its name; a baseline is in brackets."""
        label = self.measure.label
        return (
            f"({label} {format_measure(self.value)})"
            if self.baseline
            else f"{format_measure(self.value)} {label}"
        )


def baseline_of(task: Task, evaluations: Sequence[Evaluated]) -> Figure | None:
    """The lowest baseline loss at the last evaluation, which the model must beat; or None."""
    found = figures(task, evaluations[-1]) if evaluations else ()
    return min((f for f in found if f.baseline), key=lambda f: f.value, default=None)


def loss_units(tasks: Sequence[Task]) -> list[str]:
    """The unit of the loss of each of several runs, such as ``nats per token``; "" for each if all learned the same
    task."""
    if len({task.name for task in tasks}) == 1:
        return ["" for _ in tasks]
    return [f"{t.loss.unit} per {t.unit}" if t.loss.unit else t.loss.label for t in tasks]


class Best(NamedTuple):
    """The best evaluation of a run."""

    measure: Measure
    value: float
    step: int

    @property
    def words(self) -> str:
        """``0.1234 Recall@10 at step 400, higher is better``. The direction is left out for a loss."""
        found = f"{format_measure(self.value)} {self.measure.label} at step {self.step:,}"
        return found if self.measure.label == "loss" else f"{found}, {self.measure.direction}"


def best_evaluation(task: Task, evaluations: Iterable[StoredEvaluation]) -> Best | None:
    """The evaluation whose checkpoint `sample` and `export` use; None before the first evaluation."""
    found = best_of((one, scores_of(task, one.loss, one.metrics)) for one in evaluations)
    if found is None:
        return None
    evaluation, score = found
    return Best(measure_of(task, score.key), score.value, evaluation.step)


def best_validation_loss(
    facts: FactsSoFar, evaluations: Iterable[StoredEvaluation]
) -> float | None:
    """The least loss of all evaluations; None before the first one with a finite loss."""
    losses = [evaluation.loss for evaluation in evaluations]
    # The record of the best evaluation may be missing, and the last record tells its loss again.
    losses.append(facts.ended.best_validation_loss if facts.ended else None)
    return min((loss for loss in losses if loss is not None), default=None)


def final_train_loss(facts: FactsSoFar) -> float | None:
    """The mean loss of the newest steps; None before the first one, if it was not finite, or if no unit of them was
    learned."""
    return facts.loss if facts.ended is None else facts.ended.final_train_loss


def average_epoch_minutes(facts: FactsSoFar, epochs: Iterable[events.Epoch]) -> float | None:
    """The mean of all epochs of a finished run, of `epochs` of another; None before the first has ended."""
    if facts.ended is not None and facts.ended.average_epoch_minutes is not None:
        return facts.ended.average_epoch_minutes
    minutes = [epoch.minutes for epoch in epochs]
    return fmean(minutes) if minutes else None


def figures(task: Task, evaluation: Evaluated, *, summary: bool = False) -> tuple[Figure, ...]:
    """The task's headline measures, with `summary` also those of a summary, and then its baselines. Measures that the
    evaluation lacks are left out."""
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
        if (measure.headline or (summary and measure.summed_up)) and measure.key in found
    )
