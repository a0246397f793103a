"""The plan screen's solving: one key fits the plan to its device, one pins a setting, two find the largest sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from textual import on, work
from textual.message import Message
from textual.worker import get_current_worker

from memconsole.plan import plan as plans
from memconsole.plan.plan import Plan, PlanError
from memconsole.tui.draw.ink import fit as shortened
from memconsole.tui.draw.words import value_word
from memconsole.tui.plan.exact import ExactPlan
from memconsole.units import format_bytes


@dataclass(frozen=True)
class Solution:
    """What was found for one plan: the plan to go to, and what to say."""

    given: Plan
    plan: Plan
    words: str
    role: str = "good"


Solve = Callable[[], Solution]


class FitPlan(ExactPlan, inherit_bindings=False):
    """The part of `PlanScreen` that solves; the rest is in the methods below."""

    class Solved(Message, bubble=False):
        """A plan was solved off the event loop."""

        def __init__(self, solution: Solution) -> None:
            super().__init__()
            self.solution = solution

    def change(self, make: Callable[[Plan], Plan]) -> None:
        raise NotImplementedError

    def action_fit(self) -> None:
        """The fastest settings that fit, as one step that can be undone."""
        self._solve("fitting …", self._fitted)

    def action_largest_batch(self) -> None:
        self._solve("looking for the largest micro-batch …", self._largest("train.batch_size"))

    def action_largest_length(self) -> None:
        self._solve("looking for the longest rows …", self._largest("data.sequence_length"))

    def action_pin(self) -> None:
        """Pin the selected optimization, or let go of it."""
        row = self.view.row
        pinned = self.view.pinned ^ {row.key}
        words = (
            f"pinned: {self.shown_key('fit')} leaves it alone"
            if row.key in pinned
            else "not pinned any more"
        )
        self._show(replace(self.view, pinned=pinned))
        self.notice(f"{row.label} is {words}")

    def _solve(self, waiting: str, solve: Callable[[], Solution]) -> None:
        if self.view.estimate is None or self.view.problem:
            self.notice(f"cannot be solved: {self.view.problem or 'not priced yet'}", "bad")
            return
        self.notice(waiting)
        self._solve_in_worker(self.view.plan, solve)

    @work(thread=True, exclusive=True, group="solving", exit_on_error=False)
    def _solve_in_worker(self, plan: Plan, solve: Callable[[], Solution]) -> None:
        try:
            solution = solve()
        except PlanError as error:
            solution = Solution(plan, plan, str(error), "bad")
        if not get_current_worker().is_cancelled:
            self.post_message(self.Solved(solution))

    @on(Solved)
    def _apply(self, message: Solved) -> None:
        solution = message.solution
        if solution.given != self.view.plan:
            self.notice("the plan changed meanwhile: press the key again", "warn")
            return
        self.change(lambda _: solution.plan)
        self.notice(shortened(solution.words, max(20, self.size.width - 2)), solution.role)

    def _fitted(self) -> Solution:
        """Runs on the worker's thread; the view is one immutable value."""
        from memconsole.devices.budget import budget
        from memconsole.devices.planned import catalog_budgets, missing_compiler
        from memconsole.memory.answers.solve import fit, smallest_device_fitted
        from memconsole.memory.estimate import table_of

        view, lookup = self.view, self.exact_lookup
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

    def _largest(self, key: str) -> Callable[[], Solution]:
        def find() -> Solution:
            from memconsole.devices.budget import budget
            from memconsole.memory.answers import advice
            from memconsole.memory.estimate import table_of

            view, lookup = self.view, self.exact_lookup
            device = budget(view.plan, view.devices)
            batch = key == "train.batch_size"
            search = advice.largest_micro_batch if batch else advice.largest_sequence_length
            size = search(view.plan, device, lambda plan, on: table_of(plan, on, lookup))
            name = "micro-batch" if batch else "sequence length"
            if size is None:
                words = f"no {name} fits {format_bytes(device.usable_bytes)}; {self.shown_key('fit')} changes other settings"
                return Solution(view.plan, view.plan, words, "bad")
            plan = plans.replace(view.plan, {key: size})
            words = f"largest {name}: {size:,} tokens" if not batch else (
                f"largest {name}: {size:,} rows, {plan.effective_batch:,} rows per step"
            )  # fmt: skip
            return Solution(view.plan, plan, words)

        return find
