"""Which settings of a plan decide what a training step makes: what every cache key of a step is built from.

A setting is part of the key unless it says here, or in its optimization's row, that it changes no step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from memconsole.plan.optimization import Reach
from memconsole.plan.optimizations import OPTIMIZATIONS
from memconsole.plan.plan import SETTINGS, Plan

NAMED_OTHERWISE = frozenset(
    {
        "backend",
        "model.name",
        "model.target_params",
        "data.vocab_size",
        "data.tokenizer",
        "device.name",
        "device.memory_fraction",
    }
)
"""Settings that a key holds in another form: as the backend, the architecture or the kind of device."""

OUTSIDE_THE_STEP = frozenset(
    {
        "data.source",
        "data.text_column",
        "data.split",
        "data.tokenizer_examples",
        "data.validation_fraction",
        "train.epochs",
        "train.max_steps",
        "train.learning_rate",
        "train.scale_learning_rate",
        "train.reference_batch",
        "train.seed",
        "train.warmup_steps",
        "train.schedule",
        "train.decay_share",
        "train.minimum_learning_rate",
        "train.beta2",
        "train.epsilon",
        "train.log_every",
        "train.tensorboard",
        "train.evaluate_every",
        "train.evaluation_batches",
        "train.early_stopping_patience",
        "train.early_stopping_minimum",
        "train.checkpoint_every",
        "train.keep_checkpoints",
        "train.preflight",
        "train.on_out_of_memory",
        "train.sample_tokens",
    }
)
"""Settings of no optimization that leave a step's tensors as they are: numbers it reads, and what happens between
steps."""

SWITCHES = frozenset({"train.beta1", "train.weight_decay", "train.grad_clip", "train.ema_decay"})
"""Numbers of which a step's tensors depend on whether they are zero, and on nothing else."""


def _owned(reach: Reach) -> tuple[str, ...]:
    """The settings whose values count, of rows of one reach."""
    rows = (row for row in OPTIMIZATIONS if row.reach is reach and row.traced is None)
    return tuple(setting for row in rows for setting in row.settings)


def _reader(names: Iterable[str]) -> Callable[[Plan], tuple[Any, ...]]:
    """Reads several settings at once. It always reads the backend too, so that it returns a tuple."""
    return attrgetter("backend", *names)


_ROWS = frozenset(setting for row in OPTIMIZATIONS for setting in row.settings)
_COARSE = tuple(row.traced for row in OPTIMIZATIONS if row.traced is not None)
_STEP = (
    *_owned(Reach.STEP),
    *(key for key in SETTINGS if key not in _ROWS | NAMED_OTHERWISE | OUTSIDE_THE_STEP | SWITCHES),
)
_of_step, _of_update = _reader(_STEP), _reader(_owned(Reach.UPDATE))
_switches = _reader(sorted(SWITCHES))


def step_settings(plan: Plan, kind: str, *, update: bool = True) -> tuple[Any, ...]:
    """What `plan` says of a step on a kind of device, but for its sizes, its architecture and the names of models and
    devices; without `update`, of its forward and backward pass alone."""
    found = (
        *_of_step(plan),
        *(coarse(plan, kind) for coarse in _COARSE),
        *(number > 0 for number in _switches(plan)[1:]),
    )
    return (*found, *_of_update(plan)) if update else found
