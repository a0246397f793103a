"""Optimizations that exclude each other: which pair, and why. The one list that plans, keys and solver read."""

from __future__ import annotations

from memconsole.plan.sections import OptimizeChoice, PlanError, quote


def conflict(o: OptimizeChoice) -> tuple[str, str] | None:
    """The setting of `o` that cannot stand beside the others, and the reason; None where all can."""
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
    return None


def check_conflicts(o: OptimizeChoice) -> None:
    """Raise `PlanError` for optimizations that exclude each other."""
    found = conflict(o)
    if found:
        key, reason = found
        shown = quote(getattr(o, key))
        raise PlanError(f"optimize.{key} = {shown}: {reason}", f"optimize.{key}")
