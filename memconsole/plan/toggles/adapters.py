"""The rows of a frozen base: LoRA adapters, and the base stored in codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memconsole.plan import plan as plans
from memconsole.plan.plan import Plan
from memconsole.plan.tasks import task_of
from memconsole.plan.toggles.optimization import (
    Length,
    Optimization,
    Reach,
    RemedyRule,
    Result,
    always,
    fixed,
    switched_off,
)
from memconsole.plan.training.origin import frozen_at_random, refused_base
from memconsole.plan.training.trained import adapter_scale

RANKS = (8, 16, 64)
_OF_ADAPTERS = ("optimize.lora_alpha", "optimize.lora_targets", "optimize.lora_dropout")


def _freeze_base(plan: Plan, rank: int) -> dict[str, Any]:
    changes: dict[str, Any] = {"optimize.lora_rank": rank, "optimize.freeze_base": rank > 0}
    if not rank:
        changes |= {"optimize.lora_alpha": None, "optimize.lora_targets": "all"}
        changes["optimize.lora_dropout"] = 0.0
    return changes


def _nothing_to_train(plan: Plan) -> str | None:
    apart = task_of(plan).beside_base
    if plan.optimize.freeze_base and plan.optimize.lora_rank == 0 and not apart:
        return "nothing is left to train; set optimize.lora_rank too"
    return None


def _without_adapters(key: str) -> Callable[[Plan], str | None]:
    """Why a setting of adapters is refused in a plan that has none."""
    usual = plans.SETTINGS[key].default

    def why(plan: Plan) -> str | None:
        if plans.get(plan, key) == usual or plan.optimize.lora_rank:
            return None
        absent = task_of(plan).not_applicable(plan).get("optimize.lora_rank")
        return absent or "there are no adapters; set optimize.lora_rank"

    return why


def _ranks_worth_offering(plan: Plan) -> tuple[Any, ...]:
    """The ranks to offer. Adapters learn little on new weights, and all catalog models start from new weights."""
    from memconsole.plan import catalog

    if plan.model.name in catalog.models():
        return ()
    present = plan.optimize.lora_rank
    return tuple(rank for rank in RANKS if not present or rank < present)


def _whole_model(plan: Plan, kind: str) -> str | None:
    if plan.optimize.lora_rank or plan.optimize.freeze_base:
        return None
    return "without adapters the whole model has gradients and optimizer state"


def _adapters_log_line(plan: Plan, kind: str) -> str | None:
    rank = plan.optimize.lora_rank
    if not rank:
        return None
    where = plan.optimize.lora_targets
    matrices = "" if where == "all" else f" of {where} matrices"
    return f"LoRA adapters{matrices} of rank {rank}, scaled by {adapter_scale(plan):g}, on a frozen base"


def _random_base(plan: Plan, kind: str, length: Length) -> tuple[str, ...]:
    return tuple(filter(None, [frozen_at_random(plan), refused_base(plan)]))


LORA = Optimization(
    key="optimize.lora_rank",
    more_settings=("optimize.freeze_base", *_OF_ADAPTERS),
    keyboard="6",
    label="LoRA adapters on a frozen base",
    short="LoRA adapters",
    help="trains only low-rank adapters; the base has no gradients and no optimizer state",
    costs="fewer parameters learn",
    values=fixed(0, *RANKS),
    changes=_freeze_base,
    conflicts={
        "optimize.freeze_base": _nothing_to_train,
        **{key: _without_adapters(key) for key in _OF_ADAPTERS},
    },
    result=always(Result.ADAPTERS),
    reach=Reach.STEP,
    touches=("optimizer state", "gradients"),
    saves_nothing=_whole_model,
    remedy=RemedyRule(rank=69, values=_ranks_worth_offering),
    notes=_random_base,
    says=_adapters_log_line,
    evaluating=switched_off({"optimize.lora_rank": 0, "optimize.freeze_base": False}),
)


def _base_is_trained(plan: Plan) -> str | None:
    o = plan.optimize
    if o.base_storage == "none" or o.lora_rank or o.freeze_base:
        return None
    task = task_of(plan)
    absent = task.not_applicable(plan).get("optimize.base_storage")
    needed = "freeze_base" if task.beside_base else "lora_rank"
    return absent or f"only a frozen base can be stored in codes; set optimize.{needed} too"


def _codes_log_line(plan: Plan, kind: str) -> str | None:
    codes = plan.optimize.base_storage
    return None if codes == "none" else f"Frozen matrices stored in {codes} codes (QLoRA)"


BASE_STORAGE = Optimization(
    key="optimize.base_storage",
    keyboard="S",
    label="quantized frozen base (QLoRA)",
    short="quantized base",
    help="stores the matrices of a frozen base in int8 or nf4 codes, and decodes one at a time",
    costs="the base is rounded; both passes decode it",
    values=fixed("none", "int8", "nf4"),
    conflicts={"optimize.base_storage": _base_is_trained},
    result=always(Result.CODES),
    reach=Reach.STEP,
    touches=("weights",),
    remedy=RemedyRule(rank=68),
    says=_codes_log_line,
    evaluating=switched_off({"optimize.base_storage": "none"}),
)
