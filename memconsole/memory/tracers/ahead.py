"""What the next key press will ask for, made while the keys rest: blocks of a plan's neighbours' neighbours.

A table is priced in a tenth of a millisecond where its blocks' programs are remembered, and in some milliseconds
where one is made for the first time; a key press prices every value of every toggle.
"""

from __future__ import annotations

from collections.abc import Iterator

from memconsole.memory.activations import torch_step
from memconsole.memory.estimate import model_of
from memconsole.memory.seconds import step_seconds
from memconsole.memory.state.step_sizes import StepSizes, step_of
from memconsole.memory.tracers.question import neighbours
from memconsole.plan.architecture import Architecture
from memconsole.plan.budget import Budget
from memconsole.plan.optimizations import OPTIMIZATIONS
from memconsole.plan.plan import Plan, PlanError


def prepared(plan: Plan, budget: Budget, first: str = "") -> Iterator[None]:
    """Make ready, a plan at a time, what every value of every toggle will need behind each key press from `plan`;
    presses on the optimization with the key `first` come first, those that leave the blocks as others do last. Stops
    between any two plans."""
    if not isinstance(model_of(plan), Architecture):
        return  # its blocks have no programs to make
    seen: set[object] = set()
    alike = []
    for pressed in neighbours(plan, first):
        blocks = torch_step.structure(_step(pressed, budget))
        if blocks in seen:
            alike.append(pressed)
            continue
        seen.add(blocks)
        yield from _around(pressed, budget)
    for pressed in alike:
        yield from _around(pressed, budget)


def _around(plan: Plan, budget: Budget) -> Iterator[None]:
    for row in OPTIMIZATIONS:
        present = row.value(plan)
        for value in row.values(plan):
            if value != present:
                _make(row.apply(plan, value), budget)
                yield


def _make(plan: Plan, budget: Budget) -> None:
    try:
        step = _step(plan, budget)
    except PlanError:
        return
    if plan.backend == "torch":
        torch_step.prepare(step)
    step_seconds(plan, step.model, budget)


def _step(plan: Plan, budget: Budget) -> StepSizes:
    return step_of(plan, model_of(plan), budget.kind)
