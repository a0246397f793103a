"""The rows that change how a step is computed: precision, chunked loss, compilation."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from memconsole.plan import catalog
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import ModelChoice, Plan, PlanError
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


def _adapters_need_fp32(plan: Plan) -> str | None:
    if plan.optimize.precision != "bf16-sr" or plan.optimize.lora_rank == 0:
        return None
    return (
        "with adapters bf16-sr saves nothing more than bf16: adapters stay in fp32, the frozen base is in 16 bits "
        "either way; set optimize.precision = bf16"
    )


def _widened_by_xla(plan: Plan, kind: str) -> str | None:
    if plan.backend == "jax" and kind == "cpu":
        return "XLA on a CPU computes and stores 16-bit types in 32 bits"
    return None


def _wider_or_copied(present: Plan, changed: Plan) -> str:
    if changed.optimize.precision == "fp32":
        return "fp32 computes and keeps every number in 32 bits"
    if present.optimize.precision == "bf16-sr":
        return "the weights are then kept in fp32, with copies in 16 bits"
    return f"the 16-bit copies of the weights outweigh the smaller activations in {changed.backend}"


def _without_rounding(plan: Plan) -> dict[str, Any]:
    """For `evaluating`: stochastic rounding happens only in updates, so it is switched off."""
    return {"optimize.precision": "bf16"} if plan.optimize.precision == "bf16-sr" else {}


PRECISION = Optimization(
    key="optimize.precision",
    keyboard="1",
    label="mixed precision",
    short="mixed precision",
    help="computes in 16 bits; bf16 and fp16 keep weights in fp32, bf16-sr stores bf16 with stochastic rounding",
    costs="results are rounded; slower than fp32 on many CPUs",
    values=fixed("fp32", "bf16", "fp16", "bf16-sr"),
    conflicts={"optimize.precision": _adapters_need_fp32},
    result=always(Result.ARITHMETIC),
    reach=Reach.STEP,
    touches=("activations", "logits and loss", "weights"),
    saves_nothing=_widened_by_xla,
    outweighed=_wider_or_copied,
    remedy=RemedyRule(rank=30),
    says=None,  # each backend logs its compute types itself
    evaluating=_without_rounding,
)


def _chunks_log_line(plan: Plan, kind: str) -> str | None:
    if not plan.optimize.fused_loss:
        return None
    return "Chunked loss enabled - the full logits never exist"


FUSED_LOSS = Optimization(
    key="optimize.fused_loss",
    keyboard="5",
    label="chunked loss",
    short="chunked loss",
    help="computes head and loss for one chunk of tokens at a time; the full logits never exist",
    costs="the forward pass also computes the gradients of the head",
    values=fixed(False, True),
    conflicts={},
    result=always(Result.SAME),
    reach=Reach.STEP,
    touches=("logits and loss",),
    remedy=RemedyRule(rank=50),
    says=_chunks_log_line,
    evaluating=unchanged,
)


def _compiler_memory(plan: Plan, kind: str) -> str | None:
    if plan.backend == "jax":
        return "it changes the time; memory is estimated as that of blocks in a loop either way"
    if kind == "cpu":
        return "the compiler takes more in the trainer than compiled blocks save"
    return "at the peak, compiled blocks hold as much as others, and more with adapters"


def _not_compiled(plan: Plan) -> str | None:
    """Why blocks cannot be compiled, or None."""
    if not plan.optimize.compile:
        return None
    if _has_experts(plan.model):
        return f"{plan.model.name} has experts; how many tokens an expert gets changes from batch to batch; expected false"
    if plan.backend != "torch":
        return None
    dropped = [
        key
        for key, share in (
            ("train.dropout", plan.train.dropout),
            ("train.attention_dropout", plan.train.attention_dropout),
            ("optimize.lora_dropout", plan.optimize.lora_dropout),
        )
        if share
    ]
    if not dropped:
        return None
    return f"masks of dropout are drawn anew for each step, outside of compiled blocks; set {dropped[0]} = 0"


@lru_cache(maxsize=64)
def _has_experts(choice: ModelChoice) -> bool:
    """Whether a model has experts. It is cached, because a key press asks dozens of times."""
    try:
        model = catalog.model(Plan(model=choice))
    except PlanError:
        return False
    return isinstance(model, Architecture) and model.experts > 0


COMPILE = Optimization(
    key="optimize.compile",
    keyboard="0",
    label="compiled blocks",
    short="compiled blocks",
    help="torch.compile fuses a block's operations into fewer kernels; in JAX each block is compiled, not one in a loop",
    costs="the first step waits for the compiler, which takes host memory",
    values=fixed(False, True),
    absent_on={("jax", "cpu"): "on a CPU, JAX runs blocks in a loop, which takes less memory"},
    conflicts={"optimize.compile": _not_compiled},
    result=always(Result.SAME),
    reach=Reach.STEP,
    touches=("activations",),
    saves_nothing=_compiler_memory,
    remedy=None,  # its purpose is to save time, and it needs a compiler on the machine
    says=None,  # each backend logs itself what it compiles
    evaluating=switched_off({"optimize.compile": False}),
)
