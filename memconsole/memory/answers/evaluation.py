"""Smaller evaluation batches for plans whose evaluation needs the most memory."""

from __future__ import annotations

from memconsole.memory.table import EVALUATION, MemoryTable
from memconsole.plan import plan as plans
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.toggles.micro_batches import half
from memconsole.plan.toggles.sizes import EVALUATION_BATCH_SIZE

ROWS = EVALUATION_BATCH_SIZE.key
COUNTED = ("train.evaluation_batches", "train.evaluation_train_batches")
"""Limits in batches. They grow as batches shrink, so that as many rows are evaluated."""
OF_EVALUATION = (
    (ROWS, EVALUATION_BATCH_SIZE.label),
    (COUNTED[0], "evaluation batches"),
    (COUNTED[1], "training batches evaluated"),
)
"""The settings that change, with their labels."""


def fewer_at_once(plan: Plan, table: MemoryTable, keep: frozenset[str]) -> Plan | None:
    """`plan`, whose table is given, with half as many rows in an evaluation batch and as many evaluated. None if
    another phase is the peak, if there is one row, or if `keep` has a setting that would change."""
    rows = plan.evaluation_batch
    if table.peak_phase != EVALUATION or rows == plan.rows_together:
        return None
    fewer = half(rows, plan.rows_together)
    counts = {
        key: plan.evaluation_batches(plans.get(plan, key)) * (rows // fewer) for key in COUNTED
    }
    changes = {ROWS: fewer, **{key: count for key, count in counts.items() if count}}
    try:
        return None if keep & changes.keys() else plans.replace(plan, changes)
    except PlanError:  # more batches than a setting allows
        return None
