"""The rows that reduce activations: checkpointing, accumulation, activation offload."""

from __future__ import annotations

from typing import Any

from memconsole.plan.plan import Plan
from memconsole.plan.toggles.micro_batches import more_steps, searched_steps
from memconsole.plan.toggles.optimization import (
    Optimization,
    Reach,
    RemedyRule,
    Result,
    always,
    fixed,
    switched_off,
    unchanged,
)

_KEPT = {
    "full": "block inputs only",
    "attention": "block inputs and attention outputs",
    "selective": "matmul and attention outputs",
}


def _checkpointing_log_line(plan: Plan, kind: str) -> str | None:
    what = _KEPT.get(plan.optimize.gradient_checkpointing)
    return what and f"Gradient checkpointing (remat) enabled - keeps {what}"


CHECKPOINTING = Optimization(
    key="optimize.gradient_checkpointing",
    keyboard="2",
    label="gradient checkpointing (remat)",
    short="checkpointing",
    help="recomputes activations: full keeps block inputs, attention also its outputs, selective matmul outputs",
    costs="the backward pass takes longer",
    values=fixed("none", "selective", "attention", "full"),
    conflicts={},
    result=always(Result.SAME),
    reach=Reach.STEP,
    touches=("activations",),
    remedy=RemedyRule(rank=60),
    says=_checkpointing_log_line,
    evaluating=unchanged,
)


def _accumulation_values(plan: Plan) -> tuple[Any, ...]:
    rows = plan.train.batch_size * plan.optimize.accumulation_steps // plan.rows_together
    steps = tuple(n for n in (1, 2, 4, 8, 16, 32, 64) if rows % n == 0 and n <= rows)
    present = plan.optimize.accumulation_steps
    return steps if present in steps else tuple(sorted({*steps, present}))


def _keep_effective_batch(plan: Plan, steps: int) -> dict[str, Any]:
    rows = plan.train.batch_size * plan.optimize.accumulation_steps
    return {"optimize.accumulation_steps": steps, "train.batch_size": max(1, rows // steps)}


def _micro_batches_traced(plan: Plan, kind: str) -> int:
    """The number of micro-batches that matters for a trace. A CPU holds the rows of the whole step; on other devices
    all micro-batches after the first are identical."""
    steps = plan.optimize.accumulation_steps
    return steps if kind == "cpu" else min(2, steps)


def _larger_or_copied(present: Plan, changed: Plan) -> str:
    if changed.optimize.accumulation_steps < present.optimize.accumulation_steps:
        return "with fewer micro-batches per step each of them is larger"
    return "the gradient copy of accumulation outweighs the smaller micro-batch"


def _accumulation_log_line(plan: Plan, kind: str) -> str | None:
    steps = plan.optimize.accumulation_steps
    if steps == 1:
        return None
    return f"Gradient accumulation: {steps} steps (effective batch {plan.effective_batch})"


ACCUMULATION = Optimization(
    key="optimize.accumulation_steps",
    keyboard="3",
    label="gradient accumulation",
    short="accumulation",
    help="one optimizer step adds up the gradients of several smaller micro-batches",
    costs="gradients stay in memory between micro-batches; small matmuls are slower",
    values=_accumulation_values,
    searched=searched_steps,
    changes=_keep_effective_batch,
    conflicts={},
    result=always(Result.SAME),
    reach=Reach.STEP,
    traced=_micro_batches_traced,
    touches=("activations", "logits and loss"),
    outweighed=_larger_or_copied,
    remedy=RemedyRule(rank=20, values=more_steps),
    says=_accumulation_log_line,
    evaluating=switched_off({"optimize.accumulation_steps": 1}),
)


def _out_of_reach(plan: Plan) -> str | None:
    """Why activations kept for the backward pass cannot be offloaded, or None."""
    o = plan.optimize
    if not o.activation_offload:
        return None
    if plan.backend == "jax" and o.gradient_checkpointing != "full":
        return "JAX moves the inputs of checkpointed blocks; set optimize.gradient_checkpointing = full"
    if o.gradient_checkpointing in ("selective", "attention"):
        return (
            f"{o.gradient_checkpointing} checkpointing keeps its outputs itself; use none or full"
        )
    if o.compile and plan.backend == "jax":
        return "JAX moves inputs in the loop over blocks; set optimize.compile = false"
    if o.compile:
        return "compiled blocks keep their activations inside their own graph; set optimize.compile = false"
    return None


def _offload_log_line(plan: Plan, kind: str) -> str | None:
    if not plan.optimize.activation_offload:
        return None
    where = "on disk" if kind in ("cpu", "apple") else "in pinned host memory"
    return f"Activation offload: what blocks keep waits {where}"


ACTIVATION_OFFLOAD = Optimization(
    key="optimize.activation_offload",
    keyboard="8",
    label="activation offload",
    short="activation offload",
    help="moves kept activations to pinned host memory until the backward pass; on a CPU or Apple GPU to disk",
    costs="each pass transfers activations",
    values=fixed(False, True),
    conflicts={"optimize.activation_offload": _out_of_reach},
    result=always(Result.SAME),
    reach=Reach.STEP,
    touches=("activations",),
    remedy=RemedyRule(rank=62),
    says=_offload_log_line,
    evaluating=switched_off({"optimize.activation_offload": False}),
)
