"""The plan that a tracer is asked about, the cache keys of its answer, and the plans one key press away."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from memconsole.memory.estimate import model_of
from memconsole.memory.exact import affine
from memconsole.memory.hybrid import plain
from memconsole.plan.check import check
from memconsole.plan.machine.budget import Budget
from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan, PlanError, uncompiled
from memconsole.plan.processes import nodes
from memconsole.plan.toggles.optimization import Optimization
from memconsole.plan.toggles.optimizations import BY_KEY, OPTIMIZATIONS


class TracedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One plan on one kind of device."""

    plan: Plan
    model: Model
    kind: str
    target: str
    """Catalog name of the device. Empty for a device of this machine that the catalog lacks, or that a tracer may open."""
    key: str
    """Plans with the same key have the same answer."""
    structure: str
    """Plans with the same structure may share a timeline."""


def traced_plan(plan: Plan, budget: Budget) -> TracedPlan:
    """The question for `plan` on the device of `budget`, without torch.compile and hybrid training. Raises
    `PlanError`."""
    plan = plain(uncompiled(plan) if plan.backend == "torch" else plan)
    model = model_of(plan)
    structure = f"{plan.backend} {affine.structure_key(plan, model, budget.kind)}"
    target = "" if budget.local else plan.device.name
    if budget.local and budget.kind == "gpu":
        target = budget.catalog_name  # a tracer opens no GPU, which may be training
    key = " ".join(
        (
            structure,
            f"device={target},{budget.name}",
            f"nodes={nodes(plan)}",
            f"rows={plan.train.batch_size}",
            f"tokens={plan.data.sequence_length}",
            f"steps={plan.optimize.accumulation_steps}",
        )
    )
    return TracedPlan(
        plan=plan,
        model=model,
        kind=budget.kind,
        target=target,
        key=key,
        structure=structure,
    )


def neighbours(plan: Plan, first: str = "", kind: str | None = None) -> Iterator[Plan]:
    """The plans one key press away from `plan` that a kind of device can train, most likely first.

    `first` is the key of the selected optimization. The order is: its next value, the next value of every other row,
    then its remaining values.
    """
    chosen = BY_KEY.get(first)
    presses: list[tuple[Optimization, object]] = []
    if chosen is not None:
        presses.append((chosen, chosen.next_value(plan)))
    presses += [(row, row.next_value(plan)) for row in OPTIMIZATIONS]
    if chosen is not None:
        presses += [(chosen, value) for value in chosen.values(plan)]
    seen = {plan}
    for row, value in presses:
        if row.refusal(plan, value, kind) is not None:
            continue
        try:
            changed = row.apply(plan, value)
            check(changed)
        except PlanError:
            continue
        if changed not in seen:
            seen.add(changed)
            yield changed
