"""Solves the plan on screen for its device: one key fits it, two find the largest sizes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from textual.geometry import Size

from memconsole.plan import plan as plans
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.tasks import task_of
from memconsole.tui.draw.ink import fit as shortened
from memconsole.tui.plan.owner import PlanOwner
from memconsole.tui.views.plan_view import PlanView
from memconsole.units import format_bytes, value_word

if TYPE_CHECKING:
    from memconsole.memory.estimate import Lookup


@dataclass(frozen=True)
class Solution:
    """The result for one plan: the plan to switch to, and a notice."""

    given: Plan
    plan: Plan
    words: str
    role: str = "good"


Solve = Callable[[PlanView, "Lookup | None"], Solution]


class SolverOwner(PlanOwner, Protocol):
    """What solving needs of the screen: the plan, and workers."""

    @property
    def size(self) -> Size: ...

    def run_worker(
        self,
        work: Coroutine[Any, Any, None],
        *,
        group: str = ...,
        exit_on_error: bool = ...,
        exclusive: bool = ...,
    ) -> object: ...


class Solver:
    """Solves in a thread. The result is used only if the plan has not changed meanwhile."""

    def __init__(self, owner: SolverOwner) -> None:
        self._owner = owner

    def fit(self) -> None:
        self._solve("fitting …", fitted)

    def largest_batch(self) -> None:
        waiting = "looking for the largest micro-batch …"
        self._solve(waiting, partial(largest, key="train.batch_size"))

    def largest_length(self) -> None:
        waiting = "looking for the longest rows …"
        self._solve(waiting, partial(largest, key="data.sequence_length"))

    def _solve(self, waiting: str, solve: Solve) -> None:
        view = self._owner.view
        if view.estimate is None or view.problem:
            self._owner.notice(f"cannot be solved: {view.problem or 'not priced yet'}", "bad")
            return
        self._owner.notice(waiting)
        self._owner.run_worker(
            self._answer(view, solve), group="solving", exclusive=True, exit_on_error=False
        )

    async def _answer(self, view: PlanView, solve: Solve) -> None:
        try:
            found = await asyncio.to_thread(solve, view, self._owner.lookup)
        except PlanError as error:
            found = Solution(view.plan, view.plan, str(error), "bad")
        if found.given != self._owner.view.plan:
            self._owner.notice("the plan changed meanwhile: press the key again", "warn")
            return
        self._owner.change(lambda _: found.plan)
        width = max(20, self._owner.size.width - 2)
        self._owner.notice(shortened(found.words, width), found.role)


def fitted(view: PlanView, lookup: Lookup | None) -> Solution:
    """The fastest settings that fit."""
    from memconsole.devices.budget import budget
    from memconsole.devices.planned import catalog_budgets, missing_compiler
    from memconsole.memory.answers.solve import fit, smallest_device_fitted
    from memconsole.memory.estimate import table_of

    device, keep = budget(view.plan, view.devices), view.pinned
    if not view.plan.optimize.compile and missing_compiler(view.plan, device):
        keep |= {"optimize.compile"}
    found = fit(view.plan, device, keep, lambda plan, on: table_of(plan, on, lookup))
    if not found.fits:
        _, component, size = found.floor
        smallest = smallest_device_fitted(view.plan, catalog_budgets(view.plan), keep)
        words = (
            f"no settings fit {format_bytes(device.usable_bytes)}: "
            f"{format_bytes(found.after.device_bytes)} needed, {format_bytes(size)} of it {component}; "
            f"smallest device: {smallest or 'none of the catalog'}"
        )
        return Solution(view.plan, view.plan, words, "bad")
    if not found.changes:
        words = "nothing to change: these are the fastest settings that fit"
        return Solution(view.plan, view.plan, words)
    changes = ", ".join(f"{c.label} {value_word(c.after)}" for c in found.changes)
    result = "/".join(found.result_changes) or "unchanged"
    words = f"fits, time ×{found.time_factor:.2f}, result {result}: {changes}"
    return Solution(view.plan, found.plan, words, "warn" if found.result_changes else "good")


def largest(view: PlanView, lookup: Lookup | None, key: str) -> Solution:
    """The largest micro-batch or sequence length that fits, with all other settings unchanged."""
    from memconsole.devices.budget import budget
    from memconsole.memory.answers import advice
    from memconsole.memory.estimate import table_of

    device = budget(view.plan, view.devices)
    batch = key == "train.batch_size"
    search = advice.largest_micro_batch if batch else advice.largest_sequence_length
    size = search(view.plan, device, lambda plan, on: table_of(plan, on, lookup))
    name = "micro-batch" if batch else "sequence length"
    if size is None:
        words = f"no {name} fits {format_bytes(device.usable_bytes)}; {view.keys.shown('plan', 'fit')} changes other settings"
        return Solution(view.plan, view.plan, words, "bad")
    plan = plans.replace(view.plan, {key: size})
    words = f"largest {name}: {size:,} {task_of(view.plan).positions}" if not batch else (
        f"largest {name}: {size:,} rows, {plan.effective_batch:,} rows per step"
    )  # fmt: skip
    return Solution(view.plan, plan, words)
