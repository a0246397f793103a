"""Progress of a run: counters that a checkpoint stores so that a resumed run reports the same
numbers."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from memconsole.plan.models.model import Model
from memconsole.plan.plan import SETTINGS, Plan, get, quote, replace
from memconsole.plan.tasks.judging import Score, improves
from memconsole.plan.tasks.task import Task
from memconsole.plan.training.resuming import CHANGEABLE


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


_USUAL = replace(Plan(), {"train.weight_decay": 0.1})
"""Fingerprints leave out these values, those of the first version."""


def fingerprint(
    plan: Plan, model: Model, free: frozenset[str] = CHANGEABLE, *, as_it_is: bool = False
) -> str:
    """Hash of every setting that must not change when a run is resumed: all but the `free` ones and
    the device.

    Settings at their default are left out, so runs stay resumable when a newer version adds a
    setting. How a step's rows are spread over devices and micro-batches does not count, unless the
    plan is taken `as_it_is`, as for older checkpoints.
    """
    parts = (plan.backend, _counted(plan, free, as_it_is=as_it_is), _shape(model))
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


_LATER_SIZES: dict[str, Any] = {
    "rotary_size": None,
    "unrotated_every": 0,
    "joint_query_key_norm": False,
    "pre_norms": True,
    "parallel_residual": False,
    "experts": 0,
    "experts_per_token": 0,
    "normalized_shares": False,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
    "attention_factor": 1.0,
    "short_factors": (),
    "long_factors": (),
    "absent": (),
}
"""Fields of models that fingerprints leave out at these values, as older checkpoints do, which know no such fields."""


def _shape(model: Model) -> Any:
    def kept(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            name: kept(one)
            for name, one in value.items()
            if name not in _LATER_SIZES or one != _LATER_SIZES[name]
        }

    return kept(msgspec.to_builtins(model))


def counted_settings(plan: Plan) -> dict[str, Any]:
    """The settings that `fingerprint` counts and those of the model, by key; without those at their default."""
    sections = {"model": _changed(plan.model, Plan().model), **_counted(plan)}
    named = {f"{name}.{key}": v for name, own in sections.items() for key, v in own.items()}
    return {"backend": plan.backend, **named}


def difference_words(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The settings in which two results of `counted_settings` differ, with both values; empty if there are none."""
    usual = {key: get(_USUAL, key) for key in SETTINGS}
    before, now = {**usual, **before}, {**usual, **now}
    keys = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    return ", ".join(f"{k} {quote(before.get(k))} → {quote(now.get(k))}" for k in keys)


def _counted(
    plan: Plan, free: frozenset[str] = CHANGEABLE, *, as_it_is: bool = False
) -> dict[str, dict[str, Any]]:
    """The settings that `fingerprint` counts, by section."""
    if not as_it_is:
        plan = msgspec.structs.replace(
            plan,
            train=msgspec.structs.replace(plan.train, batch_size=plan.effective_batch),
            optimize=msgspec.structs.replace(plan.optimize, accumulation_steps=1, sharding="none"),
        )
    counted = {
        name: _changed(getattr(plan, name), getattr(_USUAL, name))
        for name in ("data", "train", "optimize")
    }
    for key in free:
        section, _, name = key.partition(".")
        counted.get(section, {}).pop(name, None)
    if plan.hybrid.on:
        counted["hybrid"] = _changed(plan.hybrid, Plan().hybrid)
    return counted


def _changed(section: Any, default: Any) -> dict[str, Any]:
    """The settings of a section that differ from their default."""
    usual = msgspec.to_builtins(default)
    return {k: v for k, v in msgspec.to_builtins(section).items() if v != usual[k]}
