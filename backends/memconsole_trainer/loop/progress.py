"""How far a run has come: the numbers a checkpoint carries so that a resumed run tells the same story."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from memconsole.plan.model import Model
from memconsole.plan.plan import Plan


class Progress(msgspec.Struct, kw_only=True):
    """Counted over all attempts. Seconds are wall time of the trainer."""

    total_steps: int
    """The learning-rate schedule ends here; fixed when the run starts."""
    steps_per_epoch: int
    step: int = 0
    epoch: int = 1
    """The one being trained, from 1."""
    tokens: int = 0
    data: dict[str, Any] = {}
    """State of the pipeline after the last batch used."""
    epoch_nats: float = 0.0
    epoch_tokens: float = 0
    epoch_first_step: int = 0
    epoch_seconds: float = 0.0
    elapsed_seconds: float = 0.0
    epoch_minutes: list[float] = []
    skipped_steps: int = 0
    """Of fp16 training: steps that changed nothing, because a gradient overflowed."""
    skipped_in_a_row: int = 0
    window_nats: float = 0.0
    window_tokens: float = 0
    validation_loss: float | None = None
    validation_step: int = 0
    best_validation_loss: float | None = None
    patience_loss: float | None = None
    """Of early stopping: the validation loss that a later one must be below."""
    stale_evaluations: int = 0
    """Evaluations in a row that were not."""
    judged_step: int = 0
    """Of the last evaluation that was counted."""

    def add_loss(self, loss: float, weight: float, begins_window: bool = False) -> None:
        """Count one step's mean loss over `weight` into the epoch's and the log window's."""
        self.epoch_nats += loss * weight
        self.epoch_tokens += weight
        if begins_window:
            self.window_nats, self.window_tokens = 0.0, 0
        self.window_nats += loss * weight
        self.window_tokens += weight

    @property
    def epoch_loss(self) -> float | None:
        """Nats per token of the epoch so far."""
        return self.epoch_nats / self.epoch_tokens if self.epoch_tokens else None

    def end_epoch(self, data: dict[str, Any]) -> None:
        """Go on to the next epoch, whose pipeline begins at `data`."""
        self.epoch_minutes = [*self.epoch_minutes, self.epoch_seconds / 60]
        self.epoch += 1
        self.data = data
        self.epoch_nats, self.epoch_tokens = 0.0, 0
        self.epoch_first_step, self.epoch_seconds = self.step, 0.0

    def finished(self, plan: Plan) -> bool:
        """Whether the plan is done. `max_steps` decides alone where it is given."""
        if self.stopped_early(plan):
            return True
        if plan.train.max_steps is not None:
            return self.step >= plan.train.max_steps
        return self.epoch > plan.train.epochs

    def judge(self, loss: float | None, minimum: float) -> None:
        """Count this step's evaluation for early stopping, once; `loss` None where it was not finite.

        Better is a loss more than `minimum` nats below the last one that was better.
        """
        if self.judged_step == self.step > 0:
            return
        self.judged_step = self.step
        if loss is not None and (self.patience_loss is None or loss < self.patience_loss - minimum):
            self.patience_loss, self.stale_evaluations = loss, 0
        else:
            self.stale_evaluations += 1

    def stopped_early(self, plan: Plan) -> bool:
        """Whether the validation loss has not become better for as long as the plan waits."""
        return 0 < plan.train.early_stopping_patience <= self.stale_evaluations

    @property
    def window_loss(self) -> float | None:
        """Nats per token since the log window began.

        Windows begin at fixed steps, whatever was saved or stopped in between, so that a resumed run
        says of a step what an uninterrupted one says.
        """
        return self.window_nats / self.window_tokens if self.window_tokens else None

    @property
    def average_epoch_minutes(self) -> float | None:
        return sum(self.epoch_minutes) / len(self.epoch_minutes) if self.epoch_minutes else None


def start(plan: Plan, steps_per_epoch: int) -> Progress:
    """Progress of a new run."""
    total = plan.train.max_steps or steps_per_epoch * plan.train.epochs
    return Progress(total_steps=total, steps_per_epoch=steps_per_epoch)


def fingerprint(plan: Plan, model: Model) -> str:
    """Of every setting that the continuation of a run depends on.

    What only says how a run is watched and kept, when it ends early and on which device it computes may change between
    attempts. Settings at their default do not count: one that a newer version adds leaves the
    runs of older versions resumable.
    """
    free = (
        "preflight",
        "on_out_of_memory",
        "log_every",
        "evaluate_every",
        "evaluation_batches",
        "evaluation_batch_size",
        "early_stopping_patience",
        "early_stopping_minimum",
        "checkpoint_every",
        "keep_checkpoints",
        "sample_tokens",
        "tensorboard",
    )
    counted = {
        name: _changed(getattr(plan, name), getattr(Plan(), name))
        for name in ("data", "train", "optimize")
    }
    for key in free:
        counted["train"].pop(key, None)
    parts = (plan.backend, counted, model)
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def _changed(section: Any, default: Any) -> dict[str, Any]:
    """The settings of a section that are not as by default."""
    usual = msgspec.to_builtins(default)
    return {k: v for k, v in msgspec.to_builtins(section).items() if v != usual[k]}
