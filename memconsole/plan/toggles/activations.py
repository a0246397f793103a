"""The rows that reduce activations: checkpointing, accumulation, tiled MLP, activation offload."""

from __future__ import annotations

from typing import Any

from memconsole.plan import catalog
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.tiles import tile_tokens
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


def _not_tiled(plan: Plan) -> str | None:
    """Why the MLP cannot be computed in tiles, or None."""
    o = plan.optimize
    if not o.tiled_mlp:
        return None
    if o.gradient_checkpointing == "selective":
        return "selective checkpointing keeps the MLP's products, which tiles compute again; use none, attention or full"
    if o.compile:
        return "tiles are not compiled; set optimize.compile = false"
    if plan.backend == "jax" and plan.device.count > 1:
        return "JAX would exchange the gradients of every tile; set device.count = 1, or backend = torch"
    if o.lora_dropout and o.lora_targets in ("all", "mlp"):
        return (
            "all tiles would drop the same inputs of an adapter; set optimize.lora_dropout = 0, or "
            "optimize.lora_targets = attention"
        )
    return None


def _one_tile(plan: Plan, kind: str) -> str | None:
    """Why tiles save nothing, if the micro-batch or the model says so."""
    model = catalog.model(plan)
    if not isinstance(model, Architecture):
        return None
    if model.experts:
        return "experts have no tiles: what each of them computes is kept for all its tokens"
    most = tile_tokens(model.hidden_size)
    if plan.micro_batch_tokens > most:
        return None
    return f"a micro-batch has {plan.micro_batch_tokens:,} tokens, and a tile up to {most:,}"


def _tiles_log_line(plan: Plan, kind: str) -> str | None:
    if not plan.optimize.tiled_mlp:
        return None
    if (why := _one_tile(plan, kind)) is not None:
        return f"Tiled MLP changes nothing: {why}"
    return "Tiled MLP enabled - each block's MLP is computed for a few tokens at a time"


TILED_MLP = Optimization(
    key="optimize.tiled_mlp",
    keyboard="G",
    label="tiled MLP",
    short="tiled MLP",
    help="computes each block's MLP for a few tokens at a time, so that its wide activations exist for these only",
    costs="the MLP is computed twice, unless checkpointing does so already",
    values=fixed(False, True),
    conflicts={"optimize.tiled_mlp": _not_tiled},
    result=always(Result.SAME),
    reach=Reach.STEP,
    touches=("activations",),
    saves_nothing=_one_tile,
    remedy=RemedyRule(rank=61),
    says=_tiles_log_line,
    evaluating=unchanged,
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
