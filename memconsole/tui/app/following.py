"""The part of the app that follows a run, and starts, stops, pauses or resumes runs.

Workers that outlive a screen belong to the app. Each sends its result as one message.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from textual import on, work
from textual.worker import get_current_worker

from memconsole.devices.reading import Devices
from memconsole.plan.plan import Plan, PlanError
from memconsole.runs.read.shown.words import state_word
from memconsole.tui.app.leaving import LeavingApp
from memconsole.tui.app.messages import (
    ActionFailed,
    FollowFailed,
    Launched,
    PredictionReady,
    SnapshotArrived,
)
from memconsole.tui.keys.table import KeyTable
from memconsole.tui.screens.base import ConsoleModal, ConsoleScreen
from memconsole.tui.views.run_view import Pane, RunView

if TYPE_CHECKING:
    from memconsole.memory.tracers.exact_book import ExactBook
    from memconsole.runs.read.shown.snapshot import RunSnapshot
    from memconsole.runs.record.directory import RunDirectory
    from memconsole.runs.record.requests import Order


def _moved_on(before: RunSnapshot, now: RunSnapshot) -> bool:
    """Whether the run's state is another one, or a request to pause is withdrawn, so that a notice about it is outdated."""
    return state_word(before) != state_word(now) or before.pause_requested > now.pause_requested


def _same_sample(view: RunView, now: RunSnapshot) -> int:
    """The number of newer samples than the one that is read, if it is not the newest: it stays while others arrive."""
    if not view.sample or view.snapshot is None or not view.snapshot.samples:
        return view.sample
    newest = view.snapshot.samples[-1].step
    more = sum(sample.step > newest for sample in now.samples)
    return min(view.sample + more, max(0, len(now.samples) - 1))


class FollowingApp(LeavingApp, inherit_bindings=False):
    """Holds the `RunView` of the watched run. `ConsoleApp` adds the screens."""

    def __init__(self, *, slow_link: bool, keys: KeyTable) -> None:
        super().__init__()
        self.keys = keys
        """The keys of every action. Bindings, footer, help and lists are made from it."""
        self.slow_link = slow_link
        self.interval_seconds = 2.0 if slow_link else 1.0
        self.first_pane: Pane = "closed" if slow_link else "output"
        """The pane shown first for a live run. It is closed over a slow link, to send fewer
        bytes.
        """
        self.devices: Devices | None = None
        self.run_id = ""
        self.run_view = self._no_run()
        self.book: ExactBook | None = None
        """Exact numbers; None until they are first requested."""
        self._stop_following = threading.Event()
        self._snapshot_shown = threading.Event()

    def notice(self, words: str, role: str = "accent") -> None:
        """Show a one-row notice on the current screen."""
        raise NotImplementedError

    async def action_show_run(self) -> None:
        raise NotImplementedError

    def _no_run(self) -> RunView:
        return RunView(devices=self.devices, pane=self.first_pane, keys=self.keys)

    def stop_following(self) -> None:
        """Tell the follower's thread to end."""
        self._stop_following.set()
        self._snapshot_shown.set()

    # Following a run

    async def watch_run(self, reference: str) -> None:
        """Follow a run and show it."""
        self._follow_instead(reference)
        await self.action_show_run()

    def _follow_instead(self, reference: str) -> None:
        """Follow this run instead of the one before. The screens stay."""
        self._stop_following.set()
        self._stop_following = threading.Event()
        self.run_id = reference
        self.run_view = self._no_run()
        self._follow(reference, self._stop_following)

    @work(thread=True, exclusive=True, group="follow", exit_on_error=False)
    def _follow(self, reference: str, stop: threading.Event) -> None:
        """Post one frozen snapshot per tick, but none until the last one has been drawn."""
        from memconsole.runs.read.follow import Follower
        from memconsole.runs.record.directory import RunError
        from memconsole.runs.record.run_store import find_run

        try:
            run = find_run(reference)
            follower = Follower(run)
        except (RunError, PlanError, OSError) as error:
            self.post_message(FollowFailed(str(error), stopped=stop))
            return
        last, name = None, run.name
        while not stop.is_set():
            try:
                snapshot = follower.poll()
                os.stat(run.path)  # after the poll, which may have read it half deleted
            except FileNotFoundError:
                self.post_message(FollowFailed(f"run {name} has been deleted", stopped=stop))
                return
            except OSError as error:  # as of a network file system that does not answer
                words = error.strerror or type(error).__name__
                self.post_message(FollowFailed(f"run {name} cannot be read: {words}", stopped=stop))
                last = None
                stop.wait(self.interval_seconds)
                continue
            if snapshot != last and not stop.is_set():
                last, name = snapshot, snapshot.name
                self._snapshot_shown.clear()
                self.post_message(SnapshotArrived(snapshot, stopped=stop))
                while not self._snapshot_shown.wait(0.5) and not stop.is_set():
                    pass
            stop.wait(self.interval_seconds)

    @on(SnapshotArrived)
    def _snapshot_arrived(self, message: SnapshotArrived) -> None:
        if message.stopped.is_set():
            return
        snapshot, view = message.snapshot, self.run_view
        first = view.snapshot is None
        ended = view.live and not replace(view, snapshot=snapshot).live
        self.run_id = snapshot.id
        pane = view.pane
        if not first and not view.live and replace(view, snapshot=snapshot).live:
            pane = self.first_pane
        if ended:
            self.bell()  # tmux and terminals mark the window, in case nobody looks at it
        if ended or (first and snapshot.state == "finished"):
            pane = "summary"
        shown = replace(view, snapshot=snapshot, problem="", pane=pane)
        self.set_run_view(replace(shown, sample=_same_sample(view, snapshot)))
        self._snapshot_shown.set()
        if view.snapshot is None or view.snapshot.plan != snapshot.plan:
            self._predict(snapshot.id, snapshot.plan, self.devices)
        if view.snapshot is not None and _moved_on(view.snapshot, snapshot):
            for screen in self.screen_stack:
                if isinstance(screen, ConsoleScreen) and screen.SCREEN == "run":
                    screen.notice("")

    @on(FollowFailed)
    def _follow_failed(self, message: FollowFailed) -> None:
        if not message.stopped.is_set():
            self.set_run_view(replace(self.run_view, problem=message.reason))

    def set_run_view(self, view: RunView) -> None:
        """Change the run view and update the screens. The view changes only here."""
        self.run_view = view
        for screen in self.screen_stack:
            if isinstance(screen, ConsoleScreen):
                screen.run_changed(view)

    @work(thread=True, exclusive=True, group="prediction", exit_on_error=False)
    def _predict(self, run_id: str, plan: Plan, devices: Devices | None) -> None:
        from memconsole.tui.run.predictions import predicted

        estimate, problem = predicted(run_id, plan, devices)
        if not get_current_worker().is_cancelled:
            self.post_message(PredictionReady(run_id, estimate, problem))

    @on(PredictionReady)
    def _prediction_ready(self, message: PredictionReady) -> None:
        if message.run_id == self.run_id:
            self.set_run_view(
                replace(
                    self.run_view,
                    prediction=message.estimate,
                    prediction_problem=message.problem,
                )
            )

    def forget_run(self, run_id: str) -> None:
        """Clear the watched run, if it is this one; its files were deleted."""
        if self.run_id == run_id:
            self.stop_following()
            self.run_id, self.run_view = "", self._no_run()

    # Acting on runs

    @work(thread=True, exclusive=True, group="launch", exit_on_error=False)
    def launch(
        self, plan: Plan, name: str | None = None, after: RunDirectory | None = None
    ) -> None:
        """Check, price and start `plan` as a new run, or have it start once the run `after` has ended."""
        from memconsole.announcing import name_words
        from memconsole.runs.record.directory import RunError
        from memconsole.start import devices_then, start

        lookup = self.book.lookup if self.book else None
        try:
            run = start(plan, name, devices_then(self.devices, after), lookup, after)
        except (PlanError, RunError, OSError) as error:
            self.post_message(ActionFailed(f"not launched: {error}"))
            return
        how = "launched" if after is None else "waits"
        self.post_message(Launched(run.id, name_words(run, name) or how))

    @work(thread=True, exclusive=True, group="launch", exit_on_error=False)
    def resume(self, run_id: str) -> None:
        """Start the next attempt of a run."""
        from memconsole.runs.act.launch import resume
        from memconsole.runs.record.directory import RunError
        from memconsole.runs.record.run_store import find_run

        try:
            run = find_run(run_id)
            number = resume(run)
        except (PlanError, RunError, OSError) as error:
            self.post_message(ActionFailed(f"not resumed: {error}"))
            return
        how = "submitted" if run.job() else "started"
        self.post_message(Launched(run_id, f"attempt {number} {how}"))

    @work(thread=True, group="control", exit_on_error=False)
    def request(self, run_id: str, what: Order) -> None:
        """Send a run an order; see `control.request`."""
        from memconsole.runs.act import control
        from memconsole.runs.record.directory import RunError
        from memconsole.runs.record.run_store import find_run

        try:
            control.request(find_run(run_id), what, "console")
        except (RunError, OSError) as error:
            self.post_message(ActionFailed(f"not asked to {what}: {error}"))

    @on(Launched)
    async def _launched(self, message: Launched) -> None:
        """Show the run, unless the user has opened a dialog since: it stays, with what is typed in it."""
        if self.screen_stack and isinstance(self.screen, ConsoleModal):
            self._follow_instead(message.run_id)
            self.set_run_view(self.run_view)
            shows = self.keys.shown("plan", "training")
            for screen in self.screen_stack:
                if isinstance(screen, ConsoleScreen):
                    screen.notice(f"{message.words}; {shows} shows the run", "good")
            return
        # Otherwise the old screen would still show "launching …" when the user comes back.
        self.notice("")
        await self.watch_run(message.run_id)
        self.notice(message.words, "good")

    @on(ActionFailed)
    def _action_failed(self, message: ActionFailed) -> None:
        self.notice(message.reason, "bad")

    def ensure_following(self) -> None:
        """Start the follower, if the run was offered but never opened."""
        if not any(w.group == "follow" and not w.is_finished for w in self.workers):
            self._stop_following = threading.Event()
            self._follow(self.run_id, self._stop_following)
