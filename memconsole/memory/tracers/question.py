"""What a tracer is asked about: a plan on a device, the keys that name its answer, and its neighbours."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from memconsole.memory.estimate import model_of
from memconsole.memory.exact import affine
from memconsole.plan.budget import Budget
from memconsole.plan.check import check
from memconsole.plan.model import Model
from memconsole.plan.optimization import Optimization
from memconsole.plan.optimizations import BY_KEY, OPTIMIZATIONS
from memconsole.plan.plan import Plan, PlanError, uncompiled


class TracedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One plan on one kind of device."""

    plan: Plan
    model: Model
    kind: str
    target: str
    """The catalog device, empty for this machine's own."""
    key: str
    """Plans of one key have one answer."""
    structure: str
    """Plans of one structure may share a timeline."""


def traced_plan(plan: Plan, budget: Budget) -> TracedPlan:
    """What to ask about `plan` on the device of `budget`: as it runs without torch.compile. Raises `PlanError`."""
    plan = uncompiled(plan)
    model = model_of(plan)
    structure = f"{plan.backend} {affine.structure_key(plan, model, budget.kind)}"
    target = "" if budget.local else plan.device.name
    key = " ".join(
        (
            structure,
            f"device={target},{budget.name}",
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


def neighbours(plan: Plan, first: str = "") -> Iterator[Plan]:
    """The plans that one key press makes of `plan` and that can be trained, most likely first.

    `first` is the key of the selected optimization: its next value, then every row's, then its other values.
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
        if row.refusal(plan, value) is not None:
            continue
        try:
            changed = row.apply(plan, value)
            check(changed)
        except PlanError:
            continue
        if changed not in seen:
            seen.add(changed)
            yield changed
