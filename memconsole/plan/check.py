"""Impossible combinations of settings, each refused with one line: key, value, what is allowed.

`check` is for every plan, also for plans that are only priced. `optimizations.check_trainable` tests whether the
plan's backend implements its settings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from memconsole.plan import catalog
from memconsole.plan.data.added_tokens import check_given_tokenizer
from memconsole.plan.data.check_records import check_records
from memconsole.plan.data.mixture import MIX, VALIDATION, check_mixture, parts, validation_plan
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import BACKENDS, SETTINGS, Plan, PlanError, get, quote
from memconsole.plan.sections.data import OF_RATINGS, OF_TEXT, OF_WINDOWS
from memconsole.plan.sections.model import SIZES
from memconsole.plan.tasks import task_of
from memconsole.plan.toggles.optimizations import check_conflicts
from memconsole.plan.training.origin import RANDOM, check_origin, checkpoint_of

_LOCAL_KINDS: tuple[tuple[re.Pattern[str], str | None], ...] = (
    (re.compile(r"auto"), None),
    (re.compile(r"cpu"), "cpu"),
    (re.compile(r"cuda(:\d{1,3})?"), "gpu"),
    (re.compile(r"mps"), "apple"),
    (re.compile(r"tpu(:\d{1,3})?"), "tpu"),
)
"""Names of this machine's devices, with their kind; None: the plan's backend picks it."""
_UNSUPPORTED = {
    ("jax", "apple"): "the jax backend has no Apple GPU; use backend = torch, or device cpu",
    ("torch", "tpu"): "the torch backend has no TPU; use backend = jax",
}
_ONE_SOURCE = "learns from one source and holds out a share of it"
_WITHOUT_TEXT = {
    MIX: _ONE_SOURCE,
    VALIDATION: _ONE_SOURCE,
    "data.held_out": "has its own way to hold out, set it to spread",
}
"""What a model that reads no text does in place of a setting of text."""
_REFUSED_IF_UNUSED = (
    "data.stride",
    "data.isolate_documents",
    "optimize.fused_loss",
    "optimize.tiled_mlp",
)
"""Settings that are refused if a task does not use them. Other unused settings say only how data are held, or what is
shown."""


def check(plan: Plan) -> None:
    """Raise `PlanError` for the first impossible combination; return if the plan can be priced.

    Also looks up the model, the dataset and the catalog device, so unknown names are refused here.
    """
    kind = device_kind(plan.device.name)
    _check_backend(plan, kind)
    _check_model_settings(plan)
    model = catalog.model(plan)
    task_of(plan).check(plan, model)
    if isinstance(model, Architecture):
        _check_positions(plan, model)
        _check_vocabulary(plan, model)
        check_mixture(plan)
        for part in (*(part.plan for part in parts(plan)), validation_plan(plan)):
            if part is not None:
                check_records(part)
    else:
        _check_without_text(plan)
        _refuse_set(plan, ("train.objective",), "is for language models; leave it out")
        _refuse_set(plan, ("train.expert_balance",), "{model} has no experts; leave it out")
        _check_no_dropout(plan)
    _check_rows(plan)
    _check_validation(plan)
    _check_warmup(plan)
    check_conflicts(plan)
    catalog.dataset(plan)


def device_kind(name: str) -> str | None:
    """cpu | gpu | rocm | apple | tpu of a device name; None for auto. Raises `PlanError`."""
    for pattern, kind in _LOCAL_KINDS:
        if pattern.fullmatch(name):
            return kind
    return catalog.catalog_device(name).kind


def check_start(plan: Plan) -> None:
    """Raise `PlanError` if the plan can be priced, but its first weights or its tokenizer are not
    what a person expects."""
    check_origin(plan)
    model = catalog.model(plan)
    if isinstance(model, Architecture) and plan.data.tokenizer is None:
        check_given_tokenizer(plan, model.vocab_size)


def _check_backend(plan: Plan, kind: str | None) -> None:
    reason = _UNSUPPORTED.get((plan.backend, kind or ""))
    if reason and plan.backend in BACKENDS:
        raise _error("device.name", quote(plan.device.name), reason)


def _refuse_set(plan: Plan, keys: Iterable[str], reason: str) -> None:
    """Raise `PlanError` for the first of `keys` that is not at its default. `reason` is written only then: {model}
    stands for the model's name, {quoted} for the name in quotes."""
    for key in keys:
        if get(plan, key) != SETTINGS[key].default:
            name = plan.model.name
            raise _error(key, quote(get(plan, key)), reason.format(model=name, quoted=quote(name)))


def _check_model_settings(plan: Plan) -> None:
    entry = catalog.models().get(plan.model.name)
    for kind, keys in SIZES.items():
        if entry is None or getattr(entry, kind) is None:
            _refuse_set(plan, keys, f"{{quoted}} is not a {kind}; leave it out")
    if entry is None or entry.recommender is None:
        _refuse_set(plan, OF_RATINGS, "is for ratings; {model} reads none, leave it out")
    if entry is None or entry.regressor is None:
        _refuse_set(plan, OF_WINDOWS, "is for windows of numbers; {model} reads none, leave it out")
    checkpoint = checkpoint_of(plan)
    if checkpoint is not None and not os.path.isfile(checkpoint / "MANIFEST.json"):
        reason = (
            f"expected {RANDOM}, a checkpoint of a run such as RUN/checkpoints/best, or none for those "
            "in the model's directory"
        )
        raise _error("model.weights", quote(plan.model.weights), reason)
    target = plan.model.target_params
    if target is not None and (entry is None or entry.kind == "fixed"):
        sized = ", ".join(e.name for e in catalog.models().values() if e.kind == "sized")
        reason = (
            f"{quote(plan.model.name)} has one size; leave it out, or use a sized model: {sized}"
        )
        if entry is not None and entry.regressor is not None:
            reason = f"{quote(entry.name)} is sized by model.layers and model.hidden_size"
        raise _error("model.target_params", f"{target:,}", reason)


def _check_positions(plan: Plan, architecture: Architecture) -> None:
    length = plan.data.sequence_length
    if architecture.positions == "learned" and length > architecture.max_positions:
        raise _error(
            "data.sequence_length",
            f"{length:,}",
            f"{quote(plan.model.name)} has {architecture.max_positions:,} learned positions; "
            f"expected at most {architecture.max_positions:,}",
        )


def _check_vocabulary(plan: Plan, architecture: Architecture) -> None:
    asked = plan.data.vocab_size
    if plan.data.tokenizer is not None:
        check_given_tokenizer(plan, architecture.vocab_size)
    elif asked is not None and asked > architecture.vocab_size:
        raise _error(
            "data.vocab_size",
            f"{asked:,}",
            f"{quote(plan.model.name)} has {architecture.vocab_size:,} entries; "
            f"expected at most {architecture.vocab_size:,}",
        )


def _check_without_text(plan: Plan) -> None:
    """Refuse what only tasks with text use, and what a task without text says that it does not use."""
    for key in OF_TEXT:
        reason = _WITHOUT_TEXT.get(key, "reads none, leave it out")
        _refuse_set(plan, (key,), f"is for text; {{model}} {reason}")
    unused = task_of(plan).not_applicable(plan)
    for key in _REFUSED_IF_UNUSED:
        if key in unused:
            _refuse_set(plan, (key,), f"{unused[key]}; leave it out")


def _check_rows(plan: Plan) -> None:
    stride, length = plan.data.stride, plan.data.sequence_length
    if stride is not None and stride > length:
        raise _error(
            "data.stride",
            f"{stride:,}",
            f"rows would skip tokens; expected at most data.sequence_length = {length:,}",
        )


def _check_validation(plan: Plan) -> None:
    validates = plan.data.validation or plan.data.validation_fraction
    if plan.train.save_only_best and not validates:
        raise _error(
            "train.save_only_best",
            "true",
            "there is no evaluation to be the best; set data.validation, or data.validation_fraction above 0",
        )
    if plan.data.held_out == "last":
        _check_held_out_last(plan)
    if plan.train.early_stopping_patience and not validates:
        raise _error(
            "train.early_stopping_patience",
            f"{plan.train.early_stopping_patience:,}",
            "there is no validation loss to watch; set data.validation, or data.validation_fraction above 0",
        )


def _check_held_out_last(plan: Plan) -> None:
    """Refuse `data.held_out = last` for data whose end is not known."""
    for part in parts(plan):
        if part.plan.data.streaming and catalog.dataset(part.plan).kind == "hub":
            reason = (
                f"where {quote(part.plan.data.source)} ends is not known while it streams; set it to spread, set "
                "data.streaming = false, or name data.validation"
            )
            raise _error("data.held_out", '"last"', reason)


def _check_no_dropout(plan: Plan) -> None:
    """Refuse dropout of attention where a model of another task than language has none."""
    value = plan.train.attention_dropout
    if value:
        reason = f"is for language models; {plan.model.name} does not have it, set it to 0"
        raise _error("train.attention_dropout", f"{value:g}", reason)


def _check_warmup(plan: Plan) -> None:
    steps, ratio = plan.train.warmup_steps, plan.train.warmup_ratio
    if steps is not None and ratio is not None:
        raise _error(
            "train.warmup_ratio",
            f"{ratio:g}",
            f"train.warmup_steps = {steps:,} says it already; set one of them",
        )


def _error(key: str, value: str, reason: str) -> PlanError:
    return PlanError(f"{key} = {value}: {reason}", key)
