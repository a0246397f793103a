"""The plan screen's files: plan files, the command line, and other plans to compare with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from memconsole.given_path import given_path
from memconsole.plan import plan_file
from memconsole.plan.data.paths import absolute, load
from memconsole.plan.plan import Plan, PlanError
from memconsole.runs.record.files import write_atomic
from memconsole.tui.plan.dialogs.owner import PlanOwner
from memconsole.tui.plan.pricing import price

if TYPE_CHECKING:
    from memconsole.tui.draw.comparing_plans import PricedPlan

_NEWEST_RUNS = 20
"""The newest runs are offered for comparing."""


class PlanFiles:
    """Reads, writes and compares plans for the plan screen."""

    def __init__(self, owner: PlanOwner) -> None:
        self._owner = owner

    def save(self) -> None:
        from memconsole.tui.screens.prompt import PromptScreen, path_refusal

        def entered(word: object) -> None:
            if not isinstance(word, str):
                return
            path = given_path(word)
            try:
                text = plan_file.dumps(absolute(self._owner.view.plan))
                write_atomic(path, text.encode(), 0o644)
            except PlanError as error:
                self._owner.notice(f"not saved: {error}", "bad")
            except OSError as error:
                self._owner.notice(f"not saved: {path}: {error.strerror}", "bad")
            else:
                self._owner.notice(f"saved as {path.absolute()}", "good")

        about = "a TOML file; memconsole train --plan FILE trains it"
        self._owner.open(
            PromptScreen("save plan as", "plan.toml", about, path_refusal(), ()), entered
        )

    def load(self) -> None:
        from memconsole.tui.screens.prompt import PromptScreen

        def refusal(word: str) -> str | None:
            try:
                load(Path(word))
            except PlanError as error:
                return str(error)
            return None

        def entered(word: object) -> None:
            if isinstance(word, str):
                self._owner.change(lambda _: load(Path(word)))

        about = f"a TOML file written by {self._key('save')} or by hand"
        self._owner.open(
            PromptScreen("open plan", "plan.toml", about, refusal, (".toml",)), entered
        )

    def command(self) -> None:
        from memconsole.tui.screens.command import CommandScreen

        self._owner.open(CommandScreen(self._owner.view.plan))

    # Comparing with another plan

    def compare(self) -> None:
        """Pick a plan to compare with: an earlier state, a preset, a run's plan or a file."""
        from memconsole.tui.plan.dialogs.side_by_side import ComparePlansScreen
        from memconsole.tui.screens.pick import Choice, PickScreen

        others = self._others()
        choices = [Choice(name, name, note, 28) for name, (note, _) in others.items()]

        def taken(value: object) -> None:
            if isinstance(value, Plan):
                self._owner.change(lambda _: value)

        def picked(value: object) -> None:
            if not isinstance(value, str):
                return
            try:
                make = others[value][1] if value in others else lambda: load(Path(value))
                other = self._priced_under(value, make())
            except (PlanError, OSError) as error:
                self._owner.notice(str(error), "bad")
                return
            this = self._priced_under("this plan", self._owner.view.plan)
            self._owner.open(ComparePlansScreen(this, other), taken)

        screen = PickScreen("put beside this plan", choices, free_text="plan file", suffixes=())
        self._owner.open(screen, picked)

    def _others(self) -> dict[str, tuple[str, Callable[[], Plan]]]:
        """Name → (note, how to get the plan)."""
        from memconsole.plan import catalog
        from memconsole.runs.record.directory import RunError
        from memconsole.runs.record.run_store import list_runs

        others: dict[str, tuple[str, Callable[[], Plan]]] = {}
        undo = self._owner.view.undo
        if undo:
            others["before the last change"] = (
                f"what {self._key('undo')} goes back to",
                lambda: undo[-1],
            )
        if len(undo) > 1:
            others["as it began"] = (f"{len(undo)} changes ago", lambda: undo[0])
        try:
            runs = list_runs()[:_NEWEST_RUNS]
        except (RunError, OSError):
            runs = []
        for run in runs:
            others[run.id] = (f"run {run.name}", run.read_given_plan)
        for name, entry in catalog.presets().items():
            others[name] = (f"preset · {entry.label}", lambda name=name: catalog.preset(name))  # type: ignore[misc]
        return others

    def _priced_under(self, name: str, plan: Plan) -> PricedPlan:
        from memconsole.tui.draw.comparing_plans import PricedPlan

        priced = price(plan, self._owner.view.devices, self._owner.lookup)
        return PricedPlan(name, plan, priced.estimate, priced.problem)

    def _key(self, id: str) -> str:
        return self._owner.view.keys.shown("plan", id)
