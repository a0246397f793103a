"""Solves the plan on screen for its device: one key fits it, two find the largest sizes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from memconsole.plan import plan as plans
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.tasks import task_of
from memconsole.plan.training.recipe import kept_rate
from memconsole.tui.plan.dialogs.owner import PlanOwner
from memconsole.tui.plan.pricing import calibrated_table
from memconsole.tui.plan.widgets.solved import Solution
from memconsole.tui.views.plan_view import PlanView
from memconsole.units import format_bytes, format_clock

if TYPE_CHECKING:
    from memconsole.memory.answers.solve import Faster
    from memconsole.memory.estimate import Lookup
    from memconsole.memory.table import MemoryTable
    from memconsole.plan.machine.budget import Budget


Solve = Callable[[PlanView, "Lookup | None"], Solution]


class SolverOwner(PlanOwner, Protocol):
    """What solving needs from the screen: the plan, and workers."""

    def run_worker(
        self,
        work: Coroutine[Any, Any, None],
        *,
        group: str = ...,
        exit_on_error: bool = ...,
        exclusive: bool = ...,
    ) -> object: ...

    def solved(self, solution: Solution) -> None:
        """Change to the plan of `solution`, and show what that changes."""


class Solver:
    """Solves in a thread, once the plan is priced. The result is used only if the plan has not changed meanwhile."""

    def __init__(self, owner: SolverOwner) -> None:
        self._owner = owner
        self._asked: tuple[str, Solve] | None = None
        """The search that waits until the plan is priced: its notice, and its function."""

    def fit(self) -> None:
        self._solve("fitting …", fitted)

    def largest_batch(self) -> None:
        waiting = "looking for the largest micro-batch …"
        self._solve(waiting, partial(largest, key="train.batch_size"))

    def largest_length(self) -> None:
        waiting = "looking for the longest rows …"
        self._solve(waiting, partial(largest, key="data.sequence_length"))

    def _solve(self, waiting: str, solve: Solve) -> None:
        self._asked = (waiting, solve)
        if self._owner.view.stale and not self._owner.view.problem:
            self._owner.notice(f"pricing this plan first, then {waiting}")
        else:
            self.priced()

    def plan_changed(self) -> None:
        """Drop the waiting search: it was for another plan."""
        self._asked = None

    def priced(self) -> None:
        """Run the search that waited until the plan was priced."""
        if self._asked is None:
            return
        (waiting, solve), self._asked = self._asked, None
        view = self._owner.view
        if view.problem:
            self._owner.notice(f"cannot be solved: {view.problem}", "bad")
            return
        self._owner.notice(waiting)
        self._owner.run_worker(
            self._answer(waiting, view, solve), group="solving", exclusive=True, exit_on_error=False
        )

    async def _answer(self, waiting: str, view: PlanView, solve: Solve) -> None:
        began = time.monotonic()
        solving = asyncio.create_task(asyncio.to_thread(solve, view, self._owner.lookup))
        try:
            while not (await asyncio.wait((solving,), timeout=1.0))[0]:
                if self._owner.view.plan == view.plan:
                    self._owner.notice(f"{waiting} {format_clock(time.monotonic() - began)}")
            solution = solving.result()
        except PlanError as error:
            solution = Solution(view.plan, view.plan, str(error), "bad")
        finally:
            solving.cancel()
        if solution.given != self._owner.view.plan:
            self._owner.notice("the plan changed meanwhile: press the key again", "warn")
            return
        if solution.plan == solution.given:
            self._owner.notice(solution.words, solution.role)
        else:
            self._owner.solved(solution)


def _calibrated(lookup: Lookup | None) -> Callable[[Plan, Budget], MemoryTable]:
    """Makes the tables that the screen shows: as exact as `lookup` allows, and calibrated."""
    from memconsole.memory.estimate import table_of

    return lambda plan, on: calibrated_table(plan, table_of(plan, on, lookup))


def fitted(view: PlanView, lookup: Lookup | None) -> Solution:
    """The fastest settings that fit."""
    from memconsole.devices.budget import budget
    from memconsole.devices.planned import catalog_budgets, devices_allowed, missing_compiler
    from memconsole.memory.answers.solve import faster, fit, smallest_device_fitted
    from memconsole.memory.verdict import Verdict

    device, keep = budget(view.plan, view.devices), view.pinned
    if not view.plan.optimize.compile and missing_compiler(view.plan, device):
        keep |= {"optimize.compile"}

    price = _calibrated(lookup)
    most = devices_allowed(view.plan, view.devices, device)
    solved = fit(view.plan, device, keep, price, devices=most)
    if not solved.fits:
        _, component, size = solved.floor
        budgets, allowed = catalog_budgets(view.plan), frozenset(solved.allowed)
        smallest = smallest_device_fitted(view.plan, budgets, keep, allow=allowed)
        words = (
            f"no settings fit {format_bytes(device.usable_bytes)}: "
            f"{format_bytes(solved.after.device_bytes)} needed, {format_bytes(size)} of it {component}; "
            f"smallest device at the same result: {smallest or 'none of the catalog'}"
        )
        return Solution(view.plan, view.plan, words, "bad")
    quicker = faster(view.plan, device, solved, keep, price, most)
    hint = f" · {faster_words(quicker, view.plan)}" if quicker else ""
    sure = solved.after.verdict is Verdict.FITS
    if not solved.changes:
        words = "nothing to change: these are the fastest settings that fit at the same result"
        words = words if sure else "nothing to change: no settings leave room for the whole band"
        return Solution(view.plan, view.plan, words + hint, "good" if sure else "warn")
    result = f"changes training by {' and '.join(solved.result_changes)}" if solved.result_changes else "training unchanged"  # fmt: skip
    kept = kept_rate(view.plan, solved.plan)
    words = f"{solved.after.verdict}, time ×{solved.time_factor:.2f}, {result}{hint}"
    words += f" · {kept}" if kept else ""
    harmless = sure and not solved.result_changes
    return Solution(view.plan, solved.plan, words, "good" if harmless else "warn")


def faster_words(faster: Faster, given: Plan) -> str:
    """``×3.1 faster if you allow 16-bit arithmetic``: everything that the faster plan changes in training."""
    from memconsole.memory.answers.results import results_changed

    results = " and ".join(result.value for result in results_changed(given, faster.plan))
    return f"×{faster.speedup:.1f} faster if you allow {results}"


def largest(view: PlanView, lookup: Lookup | None, key: str) -> Solution:
    """The largest micro-batch or sequence length that fits, with all other settings unchanged."""
    from memconsole.devices.budget import budget
    from memconsole.memory.answers import advice
    from memconsole.memory.verdict import Verdict

    device = budget(view.plan, view.devices)
    batch = key == "train.batch_size"
    search = advice.largest_micro_batch if batch else advice.largest_sequence_length
    best = search(view.plan, device, _calibrated(lookup))
    name = "micro-batch" if batch else "sequence length"
    if best is None:
        words = f"no {name} fits {format_bytes(device.usable_bytes)}; {view.keys.shown('plan', 'fit')} changes other settings"
        return Solution(view.plan, view.plan, words, "bad")
    plan = plans.replace(view.plan, {key: best.size})
    unit = "rows" if batch else task_of(view.plan).positions
    limit = "the model's positions" if best.all_positions else "with room for the band"
    room = limit if best.verdict is Verdict.FITS else "tight"
    words = f"largest {name}: {best.size:,} {unit}, {room}{_trains_otherwise(view.plan, plan)}"
    same = plan == view.plan and best.verdict is Verdict.FITS
    return Solution(view.plan, plan, words, "good" if same else "warn")


def _trains_otherwise(before: Plan, after: Plan) -> str:
    """What a new size changes in training."""
    if before == after:
        return "; nothing to change"
    if before.effective_batch != after.effective_batch:
        return f"; training changes: {before.effective_batch:,} → {after.effective_batch:,} rows per step at the same learning rate"  # fmt: skip
    length, new = before.data.sequence_length, after.data.sequence_length
    return f"; training changes: rows of {length:,} → {new:,} {task_of(before).positions}"
