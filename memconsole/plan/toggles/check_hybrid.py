"""Settings with which weights cannot be predicted, each with the reason."""

from __future__ import annotations

from collections.abc import Callable

from memconsole.plan.plan import BACKENDS, Plan
from memconsole.plan.sections.hybrid import GRADIENT_PHASES, LEAST_MOVEMENTS, PhaseName
from memconsole.plan.sections.optimize import EIGHT_BIT


def _mode(plan: Plan) -> str | None:
    """Why a plan's other settings exclude hybrid training, or None."""
    o = plan.optimize
    if plan.backend not in BACKENDS:
        return f"the {plan.backend} backend does not predict weights; use backend = {' or '.join(BACKENDS)}"
    if o.precision not in ("fp32", "bf16"):
        return f"jumps move fp32 weights; set optimize.precision = fp32 or bf16, not {o.precision}"
    if plan.train.batch_size * o.accumulation_steps < 2:
        return (
            "a jump is measured on one half of a batch and confirmed on the other; "
            "set train.batch_size or optimize.accumulation_steps to at least 2"
        )
    return None


def _memory(plan: Plan) -> str | None:
    """Why the optimizer state cannot be put away as `hybrid.memory` says, or None."""
    h, o = plan.hybrid, plan.optimize
    if h.memory != "none" and o.optimizer_offload != "none":
        return "the state always waits on the host; set optimize.optimizer_offload = none"
    if h.memory == "compress" and o.optimizer in (*EIGHT_BIT, "adafactor", "apollo-mini"):
        return f"the state of {o.optimizer} is compact already; set hybrid.memory = cpu or pinned"
    return None


def _stride(plan: Plan) -> str | None:
    steps = plan.hybrid.lengths.full_steps
    most = steps // LEAST_MOVEMENTS
    if plan.hybrid.snapshot_stride <= most:
        return None
    least = LEAST_MOVEMENTS * plan.hybrid.snapshot_stride
    advice = f"set at most {most:,}" if most else f"set hybrid.full_steps to at least {least:,}"
    return (
        f"a jump needs {LEAST_MOVEMENTS} movements between snapshots of a full phase, which has "
        f"{steps:,} steps; {advice}"
    )


def _accumulation(plan: Plan) -> str | None:
    if plan.hybrid.accumulation != "scale-rate":
        return None
    if plan.train.on_out_of_memory == "halve":
        return (
            "the rate is divided by the micro-batches of a step, so that halving them after running out of memory "
            "would lower it; set train.on_out_of_memory = stop"
        )
    scaled = plan.train.scale_learning_rate
    if scaled == "none":
        return None
    return f"the rate is scaled already; set train.scale_learning_rate = none, not {scaled}"


def _precision_of(phase: PhaseName) -> Callable[[Plan], str | None]:
    """Why a phase cannot compute gradients in the precision that it is given, or None."""

    def reason(plan: Plan) -> str | None:
        own, o = plan.hybrid.precision_of(phase), plan.optimize
        if own in ("same", o.precision) or not (o.freeze_base or o.lora_rank):
            return None
        return f"a frozen base is stored for one precision; set it to same, or set optimize.precision = {own}"

    return reason


CONFLICTS: dict[str, Callable[[Plan], str | None]] = {
    "hybrid.mode": _mode,
    "hybrid.memory": _memory,
    "hybrid.snapshot_stride": _stride,
    "hybrid.accumulation": _accumulation,
    **{f"hybrid.{phase}_precision": _precision_of(phase) for phase in GRADIENT_PHASES},
}
"""Why a setting of a hybrid plan conflicts with its other settings; None without a conflict."""
