"""Progress of a run: counters that a checkpoint stores so that a resumed run reports the same
numbers."""

from __future__ import annotations

from typing import Any

import msgspec

from memconsole.plan.plan import Plan
from memconsole.plan.tasks.judging import Score, improves
from memconsole.plan.tasks.task import Task


class Progress(msgspec.Struct, kw_only=True):
    """Counters over all attempts. Seconds are wall time of the trainer."""

    total_steps: int
    """Length of the learning-rate schedule; fixed when the run starts."""
    steps_per_epoch: int
    step: int = 0
    epoch: int = 1
    """Number of the current epoch, counted from 1."""
    tokens: int = 0
    data: dict[str, Any] = {}
    """State of the data pipeline after the last batch used."""
    epoch_nats: float = 0.0
    epoch_tokens: float = 0
    epoch_first_step: int = 0
    epoch_seconds: float = 0.0
    elapsed_seconds: float = 0.0
    epoch_minutes: list[float] = []
    skipped_steps: int = 0
    """With fp16: steps that changed nothing because a gradient overflowed."""
    skipped_in_a_row: int = 0
    window_nats: float = 0.0
    window_tokens: float = 0
    validation_loss: float | None = None
    validation_step: int = 0
    best_validation_loss: float | None = None
    scores: tuple[Score, ...] = ()
    """The values of the last evaluation that decide which one is best; see `plan.tasks.judging`."""
    best_scores: dict[str, float] = {}
    """The values of the best evaluation so far."""
    patience_scores: dict[str, float] = {}
    """For early stopping: the values of the last evaluation that counted as an improvement."""
    stale_evaluations: int = 0
    """For early stopping: evaluations in a row without an improvement."""
    wanted: tuple[int | None, int] | None = None
    """`train.max_steps` and `train.epochs` that `total_steps` belongs to; None in older checkpoints."""
    judged_step: int = 0
    """Step of the last evaluation that early stopping counted."""

    def add_loss(self, loss: float, weight: float, begins_window: bool = False) -> None:
        """Add one step's mean loss, weighted by `weight`, to the sums of the epoch and the log
        window."""
        self.epoch_nats += loss * weight
        self.epoch_tokens += weight
        if begins_window:
            self.window_nats, self.window_tokens = 0.0, 0
        self.window_nats += loss * weight
        self.window_tokens += weight

    @property
    def epoch_loss(self) -> float | None:
        """Mean loss of the epoch so far; for language, nats per token."""
        return self.epoch_nats / self.epoch_tokens if self.epoch_tokens else None

    def end_epoch(self, data: dict[str, Any]) -> None:
        """Move on to the next epoch, whose data pipeline begins at state `data`."""
        self.epoch_minutes = [*self.epoch_minutes, self.epoch_seconds / 60]
        self.epoch += 1
        self.data = data
        self.epoch_nats, self.epoch_tokens = 0.0, 0
        self.epoch_first_step, self.epoch_seconds = self.step, 0.0

    def finished(self, plan: Plan) -> bool:
        """Whether training is done. If `max_steps` is set, the number of epochs is ignored."""
        if self.stopped_early(plan):
            return True
        if plan.train.max_steps is not None:
            return self.step >= plan.train.max_steps
        return self.epoch > plan.train.epochs

    def judge(self, task: Task, scores: tuple[Score, ...], minimum: float) -> None:
        """Count this step's evaluation for early stopping, once per step. It has no `scores` if its loss
        was not finite, and is an improvement if it is better than the last one by more than `minimum`."""
        if self.judged_step == self.step > 0:
            return
        self.judged_step = self.step
        better = improves(task, self.patience_scores, scores, minimum)
        self.stale_evaluations = 0 if better else self.stale_evaluations + 1

    def stopped_early(self, plan: Plan) -> bool:
        """Whether no evaluation was better for as many evaluations as the plan allows."""
        return 0 < plan.train.early_stopping_patience <= self.stale_evaluations

    @property
    def window_loss(self) -> float | None:
        """Mean loss since the log window began; for language, nats per token.

        Windows begin at fixed steps, independent of saves and stops, so a resumed run reports the
        same loss at a step as an uninterrupted run.
        """
        return self.window_nats / self.window_tokens if self.window_tokens else None

    @property
    def average_epoch_minutes(self) -> float | None:
        return sum(self.epoch_minutes) / len(self.epoch_minutes) if self.epoch_minutes else None


def start(plan: Plan, steps_per_epoch: int) -> Progress:
    """Progress of a new run."""
    total = plan.train.max_steps or steps_per_epoch * plan.train.epochs
    wanted = (plan.train.max_steps, plan.train.epochs)
    return Progress(total_steps=total, steps_per_epoch=steps_per_epoch, wanted=wanted)


def stretch(progress: Progress, plan: Plan) -> None:
    """Set the length of the schedule anew if the plan asks for other steps or epochs than before."""
    t = plan.train
    if progress.wanted in (None, (t.max_steps, t.epochs)):
        return
    left = t.epochs - progress.epoch + 1
    whole = progress.epoch_first_step + progress.steps_per_epoch * left
    progress.total_steps = max(t.max_steps or whole, progress.step, 1)
    progress.wanted = (t.max_steps, t.epochs)
