"""Computes in idle time what the next key press will need: block programs for plans two toggles away.

A key press prices every value of every toggle. One table takes about 0.1 ms if the programs of its blocks are
cached, and several milliseconds if one has to be built.
"""

from __future__ import annotations

from collections.abc import Iterator

from memconsole.memory.activations import torch_step
from memconsole.memory.estimate import model_of
from memconsole.memory.hybrid import parts
from memconsole.memory.seconds import step_seconds
from memconsole.memory.state.step_sizes import StepSizes, step_of
from memconsole.memory.tracers.question import neighbours
from memconsole.plan.machine.budget import Budget
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.toggles.optimizations import OPTIMIZATIONS


def prepared(plan: Plan, budget: Budget, first: str = "") -> Iterator[None]:
    """Fill the caches for every plan that is two toggles away from `plan`. The generator yields after each plan, so
    that the caller can stop. It starts with the optimization whose key is `first`, and leaves for last the first
    toggles whose blocks are the same as those of another."""
    if not isinstance(model_of(plan), Architecture):
        return  # only decoders have block programs
    seen: set[object] = set()
    alike = []
    for pressed in neighbours(plan, first, budget.kind):
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
        model = model_of(plan)
        steps = [step_of(one, model, budget.kind) for one in parts(plan)]
    except PlanError:
        return
    if plan.backend == "torch":
        for step in steps:
            torch_step.prepare(step)
    step_seconds(plan, model, budget)


def _step(plan: Plan, budget: Budget) -> StepSizes:
    return step_of(plan, model_of(plan), budget.kind)
