"""Every memory optimization in the order of the console's list, and the checks that involve all of them."""

from __future__ import annotations

from typing import Any

from memconsole.plan import plan as plans
from memconsole.plan.plan import Plan, PlanError, quote
from memconsole.plan.processes import processes
from memconsole.plan.toggles import (
    activations,
    adapters,
    arithmetic,
    data,
    heap,
    hybrid,
    sharding,
    sizes,
    update,
)
from memconsole.plan.toggles.optimization import Length, Note, Optimization

OPTIMIZATIONS: tuple[Optimization, ...] = (
    arithmetic.PRECISION,
    activations.CHECKPOINTING,
    activations.ACCUMULATION,
    update.OPTIMIZER,
    arithmetic.FUSED_LOSS,
    activations.TILED_MLP,
    adapters.LORA,
    update.OPTIMIZER_OFFLOAD,
    activations.ACTIVATION_OFFLOAD,
    sharding.SHARDING,
    arithmetic.COMPILE,
    update.OPTIMIZER_IN_BACKWARD,
    adapters.BASE_STORAGE,
    hybrid.HYBRID,
    sizes.BATCH_SIZE,
    sizes.EVALUATION_BATCH_SIZE,
    sizes.SEQUENCE_LENGTH,
    data.STRIDE,
    data.ISOLATE_DOCUMENTS,
    data.STREAMING,
    data.SHUFFLE_BUFFER,
    data.MAX_EXAMPLES,
    heap.HEAP,
)

BY_KEY: dict[str, Optimization] = {row.key: row for row in OPTIMIZATIONS}

_CONFLICTS = tuple((key, reason) for row in OPTIMIZATIONS for key, reason in row.conflicts.items())


def notes(plan: Plan, kind: str, length: Length) -> tuple[Note, ...]:
    """The notes on a plan that is to train on a kind of device, in the order of the list."""
    return tuple(
        Note(row.key, words)
        for row in OPTIMIZATIONS
        if row.notes
        for words in row.notes(plan, kind, length)
    )


def conflict(plan: Plan) -> tuple[str, str] | None:
    """The first setting that conflicts with the plan's others, and the reason; None without a conflict."""
    for key, why in _CONFLICTS:
        reason = why(plan)
        if reason is not None:
            return key, reason
    return None


def check_conflicts(plan: Plan) -> None:
    """Raise `PlanError` for optimizations that exclude each other."""
    key_and_reason = conflict(plan)
    if key_and_reason is not None:
        key, reason = key_and_reason
        raise PlanError(f"{key} = {quote(plans.get(plan, key))}: {reason}", key)


def check_trainable(plan: Plan, kind: str | None = None) -> None:
    """Raise `PlanError` if the plan's combination cannot be trained on a kind of device, naming key and reason. Without a
    `kind` it is that of the plan's device, if its name tells."""
    for row in OPTIMIZATIONS:
        reason = row.refusal(plan, kind=kind)
        if reason:
            raise PlanError(f"{row.key} = {quote(row.value(plan))}: {reason}", row.key)
    _check_devices(plan)


def _check_devices(plan: Plan) -> None:
    """Raise `PlanError` if the number of devices and `optimize.sharding` do not fit each other."""
    count, how = plan.device.count, plan.optimize.sharding
    if count == 1 and how != "none":
        reason = "there is one device; set device.count, or optimize.sharding = none"
        raise PlanError(f"optimize.sharding = {how}: {reason}", "optimize.sharding")
    if count > 1 and how == "none":
        reason = "set optimize.sharding = ddp or fsdp, which say how devices train together"
        raise PlanError(f"device.count = {count}: {reason}", "device.count")
    if count > 1 and plan.device.name in ("mps", "tpu") and plan.backend == "torch":
        reason = f"there is one device called {plan.device.name}; set device.count = 1"
        raise PlanError(f"device.count = {count}: {reason}", "device.count")
    processes(plan)


def with_value(row: Optimization, plan: Plan, value: Any) -> Plan:
    """`plan` with `row` set to `value`. Raises `PlanError` if another optimization of the plan excludes it."""
    changed = row.apply(plan, value)
    check_conflicts(changed)
    return changed


def only_evaluating(plan: Plan) -> Plan:
    """`plan` without the optimizations that only training needs, on one device."""
    off = {key: value for row in OPTIMIZATIONS for key, value in row.evaluating(plan).items()}
    return plans.replace(plan, {"device.count": 1, **off})
