"""Optimizations that exclude each other: which pair, and why. The one list that plans, keys and solver read."""

from __future__ import annotations

from memconsole.plan.sections import EIGHT_BIT, Plan, PlanError, quote


def conflict(plan: Plan) -> tuple[str, str] | None:
    """The optimization that cannot stand beside the plan's others, and the reason; None where all can."""
    o = plan.optimize
    if o.freeze_base and o.lora_rank == 0:
        return "freeze_base", "nothing is left to train; set optimize.lora_rank too"
    if o.lora_rank > 0 and not o.freeze_base:
        return (
            "lora_rank",
            "adapters are trained on a frozen base; set optimize.freeze_base = true too",
        )
    if o.base_storage != "bf16" and o.lora_rank == 0:
        return (
            "base_storage",
            "only a frozen base can be stored in codes; set optimize.lora_rank and freeze_base too",
        )
    if o.optimizer_offload != "none":
        reason = _needs_state_whole(plan)
        if reason:
            return "optimizer_offload", reason
    if o.lora_rank > 0 and o.precision == "bf16-sr":
        return (
            "precision",
            "adapters are trained in fp32, and bf16 already stores the frozen base in 16 bits; "
            "set optimize.precision = bf16",
        )
    if o.activation_offload:
        reason = _keeps_out_of_reach(plan)
        if reason:
            return "activation_offload", reason
    if o.optimizer_in_backward:
        reason = _needs_every_gradient(plan)
        if reason:
            return "optimizer_in_backward", reason
    return None


_NARROW = (
    "its state already has 8 bits; set optimize.optimizer = adamw, or optimizer_offload = pinned"
)
_COMPACT = {
    **dict.fromkeys(EIGHT_BIT, _NARROW),
    "adafactor": "its state is a row and a column of each matrix, too little to compress; set optimizer_offload = pinned",
}
"""Optimizers whose state is not made smaller, and why."""


def _needs_state_whole(plan: Plan) -> str:
    """Why the optimizer's state cannot come to the device weight by weight; empty where it can."""
    if plan.backend == "jax" and plan.optimize.optimizer_offload == "cpu":
        return (
            "JAX reaches host memory that is pinned alone; set optimize.optimizer_offload = pinned"
        )
    if plan.optimize.optimizer_offload == "compressed":
        return _COMPACT.get(plan.optimize.optimizer, "")
    return ""


def _keeps_out_of_reach(plan: Plan) -> str:
    """Why what blocks keep for the backward pass cannot be moved; empty where it can."""
    o = plan.optimize
    if plan.backend == "jax" and o.gradient_checkpointing != "full":
        return "JAX moves the inputs of checkpointed blocks; set optimize.gradient_checkpointing = full"
    if o.gradient_checkpointing in ("selective", "attention"):
        return (
            f"{o.gradient_checkpointing} checkpointing keeps its outputs itself; use none or full"
        )
    if o.compile:
        return "compiled blocks keep their activations inside their own graph; set optimize.compile = false"
    return ""


def _needs_every_gradient(plan: Plan) -> str:
    """Why no weight may be updated before every gradient is there; empty where it may."""
    if plan.optimize.accumulation_steps > 1:
        return (
            "gradients are added up over micro-batches first; set optimize.accumulation_steps = 1"
        )
    if plan.train.on_out_of_memory == "halve":
        return "halved micro-batches are added up first; set train.on_out_of_memory = stop"
    if plan.train.grad_clip > 0:
        return "clipping needs the norm of all gradients first; set train.grad_clip = 0"
    if plan.optimize.precision == "fp16":
        return "fp16 skips a step if any gradient overflowed; set optimize.precision = bf16"
    return ""


def check_conflicts(plan: Plan) -> None:
    """Raise `PlanError` for optimizations that exclude each other."""
    found = conflict(plan)
    if found:
        key, reason = found
        shown = quote(getattr(plan.optimize, key))
        raise PlanError(f"optimize.{key} = {shown}: {reason}", f"optimize.{key}")
