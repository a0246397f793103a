"""The fingerprint of a run's settings, which tells whether a checkpoint fits a plan."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from memconsole.plan.models.model import Model
from memconsole.plan.plan import SETTINGS, Plan, get, quote, replace
from memconsole.plan.training.resuming import CHANGEABLE

_DEFAULTS = replace(Plan(), {"train.weight_decay": 0.1})
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
    parts = (plan.backend, _counted(plan, free, as_it_is=as_it_is), _model_fields(model))
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


_ADDED_FIELDS: dict[str, Any] = {
    "rotary_size": None,
    "scaled_local_layers": False,
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
    "query_beta": 0.0,
    "absent": (),
}
"""Fields of models that fingerprints leave out at these values, as older checkpoints do, which know no such fields."""


def _model_fields(model: Model) -> Any:
    """The fields of a model that `fingerprint` counts."""

    def kept(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            name: kept(one)
            for name, one in value.items()
            if name not in _ADDED_FIELDS or one != _ADDED_FIELDS[name]
        }

    return kept(msgspec.to_builtins(model))


def counted_settings(plan: Plan) -> dict[str, Any]:
    """The settings that `fingerprint` counts and those of the model, by key; without those at their default."""
    sections = {"model": _changed(plan.model, Plan().model), **_counted(plan)}
    named = {f"{name}.{key}": v for name, own in sections.items() for key, v in own.items()}
    return {"backend": plan.backend, **named}


def difference_words(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The settings in which two results of `counted_settings` differ, with both values; empty if there are none."""
    usual = {key: get(_DEFAULTS, key) for key in SETTINGS}
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
        name: _changed(getattr(plan, name), getattr(_DEFAULTS, name))
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
