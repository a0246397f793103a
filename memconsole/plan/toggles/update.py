"""The rows that reduce gradients and optimizer state: the optimizer, where its state is stored, when it steps."""

from __future__ import annotations

from typing import Any

from memconsole.plan.plan import Plan
from memconsole.plan.sections.optimize import EIGHT_BIT
from memconsole.plan.toggles.optimization import (
    Optimization,
    Reach,
    RemedyRule,
    Result,
    always,
    fixed,
    switched_off,
)


def _optimizer_result(before: Any, after: Any) -> Result:
    return Result.STATE_8_BITS if {before, after} <= {"adamw", *EIGHT_BIT} else Result.OPTIMIZER


def _adapters_alone(plan: Plan, kind: str) -> str | None:
    narrow = plan.optimize.lora_rank and plan.optimize.optimizer in (*EIGHT_BIT, "apollo-mini")
    return "adapters keep their optimizer state in 32 bits" if narrow else None


def _optimizer_log_line(plan: Plan, kind: str) -> str:
    return f"Optimizer: {plan.optimize.optimizer}"


OPTIMIZER = Optimization(
    key="optimize.optimizer",
    keyboard="4",
    label="optimizer",
    short="optimizer",
    help="bytes of state per parameter: adamw 8, lion and sgd 4, muon 4 for matrices, 8-bit 2 in blocks (-all: also embedding, head), apollo-mini 0 for matrices, adafactor about 0",
    costs="another update rule learns differently; 8-bit embeddings are less stable",
    values=fixed(
        "adamw", "adamw-8bit", "adamw8-all", "adafactor", "apollo-mini", "lion", "muon", "sgd"
    ),
    conflicts={},
    result=_optimizer_result,
    reach=Reach.UPDATE,
    touches=("optimizer state",),
    remedy=RemedyRule(rank=40, values=fixed(*EIGHT_BIT, "apollo-mini", "adafactor")),
    says=_optimizer_log_line,
    saves_nothing=_adapters_alone,
    evaluating=switched_off(
        {"optimize.optimizer": "sgd", "train.beta1": 0.0}
    ),  # has no state at all
)


_NARROW = (
    "its state already has 8 bits; set optimize.optimizer = adamw, or optimizer_offload = pinned"
)
_COMPACT = {
    **dict.fromkeys(EIGHT_BIT, _NARROW),
    "adafactor": "its state is a row and a column of each matrix, too little to compress; set optimizer_offload = pinned",
    "apollo-mini": "its state is two vectors for each matrix, too little to compress; set optimizer_offload = pinned",
}
"""Optimizers whose state cannot be compressed, and why."""


def _needs_state_whole(plan: Plan) -> str | None:
    """Why the optimizer's state cannot be moved to the device weight by weight, or None."""
    o = plan.optimize
    if plan.backend == "jax" and o.optimizer_offload == "cpu":
        return (
            "JAX reaches only host memory that is pinned; set optimize.optimizer_offload = pinned"
        )
    return _COMPACT.get(o.optimizer) if o.optimizer_offload == "compressed" else None


def _offload_result(before: Any, after: Any) -> Result:
    return Result.STATE_16_BITS if "compressed" in (before, after) else Result.SAME


def _already_in_host_memory(plan: Plan, kind: str) -> str | None:
    if kind == "cpu" and plan.optimize.optimizer_offload in ("cpu", "pinned"):
        return "on a CPU the state already waits in host memory"
    return None


def _offload_log_line(plan: Plan, kind: str) -> str | None:
    o = plan.optimize
    if o.optimizer_offload == "none":
        return None
    narrow = " in 16 bits" if o.optimizer_offload == "compressed" else ""
    same = ", as everything else" if kind in ("cpu", "apple") else ""
    return f"Optimizer offload: its state waits{narrow} in host memory{same}"


OPTIMIZER_OFFLOAD = Optimization(
    key="optimize.optimizer_offload",
    keyboard="7",
    label="optimizer offload",
    short="optimizer offload",
    help="keeps optimizer state in host memory; each weight's state is on the device only for its update",
    costs="each step transfers the state twice; pinned overlaps with updates; compressed stores 16 bits",
    values=fixed("none", "cpu", "pinned", "compressed"),
    conflicts={"optimize.optimizer_offload": _needs_state_whole},
    result=_offload_result,
    reach=Reach.UPDATE,
    touches=("optimizer state",),
    saves_nothing=_already_in_host_memory,
    remedy=RemedyRule(rank=64),
    says=_offload_log_line,
    evaluating=switched_off({"optimize.optimizer_offload": "none"}),
)


def _needs_every_gradient(plan: Plan) -> str | None:
    """Why no weight may be updated before every gradient is computed, or None."""
    if not plan.optimize.optimizer_in_backward:
        return None
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
    return None


def _in_backward_log_line(plan: Plan, kind: str) -> str | None:
    if not plan.optimize.optimizer_in_backward:
        return None
    return "Optimizer in backward: each weight is updated as soon as its gradient is there"


OPTIMIZER_IN_BACKWARD = Optimization(
    key="optimize.optimizer_in_backward",
    keyboard="j",
    label="optimizer in backward",
    short="optim. in backward",
    help="updates each weight as soon as its gradient is computed, and then frees the gradient",
    costs="gradients cannot be accumulated or clipped by their global norm",
    values=fixed(False, True),
    absent={
        "jax": "not in JAX: a step is one program without hooks, and XLA decides when each update runs"
    },
    conflicts={"optimize.optimizer_in_backward": _needs_every_gradient},
    result=always(Result.SAME),
    reach=Reach.STEP,
    touches=("gradients",),
    remedy=RemedyRule(
        rank=66, along={"train.grad_clip": 0.0}, along_costs="gradients are not clipped"
    ),
    says=_in_backward_log_line,
    evaluating=switched_off({"optimize.optimizer_in_backward": False}),
)
