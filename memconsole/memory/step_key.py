"""The settings of a plan that decide which tensors a training step makes: every cache key of a step uses them.

A setting is part of the key unless this file or its optimization's row excludes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from memconsole.plan.plan import SETTINGS, Plan
from memconsole.plan.sections.data import OF_RATINGS, OF_WINDOWS
from memconsole.plan.sections.model import SIZES
from memconsole.plan.toggles.optimization import Reach
from memconsole.plan.toggles.optimizations import OPTIMIZATIONS
from memconsole.plan.training import recipe

NAMED_OTHERWISE = frozenset(
    {
        "backend",
        "model.name",
        "model.target_params",
        "model.weights",
        "model.embedding_size",
        "model.adapter_size",
        *SIZES["regressor"],
        "data.vocab_size",
        "data.tokenizer",
        "device.name",
        "device.memory_fraction",
    }
)
"""Settings that a key contains in another form: as the backend, the architecture or the kind of device."""

OUTSIDE_THE_STEP = frozenset(
    {
        "data.source",
        "data.text_column",
        *OF_RATINGS,
        *OF_WINDOWS,
        "data.template",
        "data.loss_on",
        "data.split",
        "data.tokenizer_examples",
        "data.characters",
        "data.lowercase",
        "data.code_field",
        "data.validation_fraction",
        "data.held_out",
        "data.validation",
        "data.mix",
        "data.cache_gib",
        "device.threads",
        "train.dpo_beta",
        "train.orpo_lambda",
        "train.simpo_beta",
        "train.simpo_gamma",
        "train.expert_balance",
        "train.epochs",
        "train.max_steps",
        "train.learning_rate",
        "train.scale_learning_rate",
        "train.reference_batch",
        "train.seed",
        "train.warmup_steps",
        "train.warmup_ratio",
        "train.schedule",
        "train.decay_share",
        "train.decay_until",
        "train.minimum_learning_rate",
        "train.beta2",
        "train.epsilon",
        "train.log_every",
        "train.tensorboard",
        "train.wandb",
        "train.mlflow",
        "train.evaluate_every",
        "train.evaluation_batches",
        "train.evaluation_train_batches",
        "train.early_stopping_patience",
        "train.early_stopping_minimum",
        "train.checkpoint_every",
        "train.checkpoint_minutes",
        "train.save_only_best",
        "train.keep_checkpoints",
        "train.preflight",
        "train.on_out_of_memory",
        "train.answered_records",
        "train.sample_tokens",
        "launch.on",
        "launch.partition",
        "launch.time_limit",
        "launch.devices_per_node",
        "launch.save_seconds",
        "launch.options",
    }
)
"""Settings that belong to no optimization and do not change a step's tensors: scalars that the step reads, and what
happens between steps."""

SWITCHES = frozenset(
    {
        "train.beta1",
        "train.weight_decay",
        "train.grad_clip",
        "train.dropout",
        "train.attention_dropout",
        "train.ema_decay",
    }
)
"""Numbers that change a step's tensors only by being zero or not."""


def _owned(reach: Reach) -> tuple[str, ...]:
    """The settings of all optimizations with this reach whose values go into the key unchanged."""
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
_switches = _reader(sorted(SWITCHES - {"train.weight_decay"}))


def step_settings(plan: Plan, kind: str, *, update: bool = True) -> tuple[Any, ...]:
    """The values in `plan` that shape a training step on a kind of device. Sizes, the architecture, and names of models
    and devices are left out. Without `update`, only the forward and backward pass count."""
    found = (
        *_of_step(plan),
        *(coarse(plan, kind) for coarse in _COARSE),
        *(number > 0 for number in _switches(plan)[1:]),
        recipe.decays(plan),
    )
    return (*found, *_of_update(plan)) if update else found
