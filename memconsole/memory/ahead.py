"""What the next key press will ask for, made while the keys rest: blocks of a plan's neighbours' neighbours.

A table is priced in a tenth of a millisecond where its blocks' programs are remembered, and in some milliseconds
where one is made for the first time; a key press prices every value of every toggle.
"""

from __future__ import annotations

from collections.abc import Iterator

from memconsole.memory import torch_moments
from memconsole.memory.estimate import architecture_of
from memconsole.memory.matter import neighbours
from memconsole.memory.moments import step_of
from memconsole.memory.seconds import step_seconds
from memconsole.memory.table import Budget
from memconsole.plan.optimizations import OPTIMIZATIONS
from memconsole.plan.plan import Plan, PlanError


def prepared(plan: Plan, budget: Budget, first: str = "") -> Iterator[None]:
    """Make ready, a plan at a time, what every value of every toggle will need behind each key press from `plan`;
    presses on the optimization with the key `first` come first. Stops between any two plans."""
    for pressed in neighbours(plan, first):
        for row in OPTIMIZATIONS:
            present = row.value(pressed)
            for value in row.values(pressed):
                if value != present:
                    _make(row.apply(pressed, value), budget)
                    yield


def _make(plan: Plan, budget: Budget) -> None:
    try:
        architecture = architecture_of(plan)
    except PlanError:
        return
    step = step_of(plan, architecture, budget.kind)
    if plan.backend == "torch":
        torch_moments.prepare(step)
    step_seconds(plan, architecture, budget)
