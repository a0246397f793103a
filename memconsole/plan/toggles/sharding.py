"""The row of several devices: what each of them holds of weights, gradients and optimizer state."""

from __future__ import annotations

from memconsole.plan.plan import Plan
from memconsole.plan.sections.optimize import EIGHT_BIT
from memconsole.plan.toggles.optimization import (
    Optimization,
    Reach,
    Result,
    always,
    fixed,
    switched_off,
)

_WHOLE_MATRICES = {
    "adafactor": "its update takes means over whole matrices, but each device holds only some rows",
    "apollo-mini": "its update takes norms of whole matrices, but each device holds only some rows",
    "muon": "its update orthogonalizes whole matrices, but each device holds only some rows",
    **dict.fromkeys(EIGHT_BIT, "a device's rows may end inside a block of 8-bit state"),
}
"""torch optimizers that cannot update some rows of a weight alone, and why."""


def _sharding_conflict(plan: Plan) -> str | None:
    """Why the plan's other settings cannot be trained on several devices in this way, or None."""
    o = plan.optimize
    if o.sharding == "none":
        return None
    if plan.hybrid.on:
        return "a jump moves weights that one device holds; set hybrid.mode = off"
    if plan.backend == "jax":
        return _jax_conflict(plan)
    if plan.backend != "torch":
        return None
    if o.optimizer_in_backward:
        return (
            "gradients are added up over the devices before a weight is updated; "
            "set optimize.optimizer_in_backward = false"
        )
    if o.precision == "bf16-sr":
        return (
            "gradients of 16-bit weights would be added up over the devices in 16 bits; "
            "set optimize.precision = bf16"
        )
    return _torch_fsdp_conflict(plan) if o.sharding == "fsdp" else None


def _jax_conflict(plan: Plan) -> str | None:
    """Why JAX cannot train a plan with one program over several devices, or None."""
    o = plan.optimize
    if o.optimizer_offload != "none":
        return (
            "a program over several devices keeps its optimizer state on them; "
            "set optimize.optimizer_offload = none"
        )
    if o.activation_offload:
        return (
            "a program over several devices keeps its activations on them; "
            "set optimize.activation_offload = false"
        )
    if o.sharding == "ddp":
        return None
    if o.optimizer in EIGHT_BIT:
        return (
            "8-bit state is updated in slices of whole weights; "
            "set optimize.optimizer = adamw, or sharding = ddp"
        )
    if o.base_storage != "none":
        return (
            "the codes of a frozen base are not split over the devices; "
            "set optimize.base_storage = none, or sharding = ddp"
        )
    if o.compile:
        return (
            "without a loop over blocks, the weights of several blocks may be gathered at once; "
            "set optimize.compile = false, or sharding = ddp"
        )
    return None


def _torch_fsdp_conflict(plan: Plan) -> str | None:
    """Why a torch plan cannot be trained with weights that are split by rows over the devices, or None."""
    o = plan.optimize
    if o.optimizer in _WHOLE_MATRICES:
        return f"{_WHOLE_MATRICES[o.optimizer]}; set optimize.optimizer = adamw, or sharding = ddp"
    if o.base_storage != "none":
        return (
            "the codes of a frozen base are not split over the devices; "
            "set optimize.base_storage = none, or sharding = ddp"
        )
    if o.optimizer_offload == "compressed":
        return (
            "the state of a weight is rounded as a whole; "
            "set optimize.optimizer_offload = pinned, or sharding = ddp"
        )
    if o.activation_offload:
        return (
            "a block's saved activations include its gathered weights, which would be written out too; "
            "set optimize.activation_offload = false, or sharding = ddp"
        )
    if o.compile:
        return (
            "gathering a block's weights breaks its compiled graph; "
            "set optimize.compile = false, or sharding = ddp"
        )
    return None


def _one_device(plan: Plan, kind: str) -> str | None:
    return "one device: there is nothing to split over" if plan.device.count == 1 else None


MEANINGS = {
    "ddp": "every device holds all weights",
    "fsdp": "every device holds a share of weights, gradients and optimizer state",
}
"""What each way of sharding means, in a few words."""


def _log_line(plan: Plan, kind: str) -> str | None:
    o, count = plan.optimize, plan.device.count
    if o.sharding == "none":
        return None
    return f"Sharding: {o.sharding} over {count:,} devices - {MEANINGS[o.sharding]}"


SHARDING = Optimization(
    key="optimize.sharding",
    keyboard="9",
    label="sharding over devices",
    short="sharding",
    help="ddp copies the model to each device; fsdp splits weights, gradients and optimizer state",
    costs="devices exchange gradients, with fsdp also the weights of each block",
    values=fixed("none", "ddp", "fsdp"),
    conflicts={"optimize.sharding": _sharding_conflict},
    result=always(Result.SAME),
    reach=Reach.STEP,
    touches=("optimizer state", "gradients", "weights"),
    saves_nothing=_one_device,
    remedy=None,  # a plan that does not fit gives the machine no more devices
    says=_log_line,
    evaluating=switched_off({"optimize.sharding": "none"}),
)
