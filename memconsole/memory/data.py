"""How much text a plan trains on, as far as its catalog entry tells before the run."""

from __future__ import annotations

from memconsole.plan import catalog
from memconsole.plan.plan import Plan, PlanError


def training_tokens(plan: Plan) -> int | None:
    """Tokens of one epoch, repeated ones of overlapping rows included; None where unknown."""
    tokens = dataset_tokens(plan)
    if tokens is None:
        return None
    rows = tokens * (1 - plan.data.validation_fraction) / plan.stride
    return max(1, int(rows)) * plan.data.sequence_length


def dataset_tokens(plan: Plan) -> int | None:
    """Tokens of the whole dataset, or None."""
    try:
        entry = catalog.dataset(plan)
    except PlanError:
        return None
    if not entry.bytes or not entry.bytes_per_token:
        return None
    return int(entry.bytes / entry.bytes_per_token)
