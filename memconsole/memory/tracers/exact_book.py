"""The exact tier: looks up what is known of a plan at once, and has the backend's tracer find out the rest.

Nothing is traced in this process: see `tracing.Desk`, whose thread minds the tracers and the store on disk.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from memconsole.memory.exact import affine
from memconsole.memory.exact.sharpen import Known
from memconsole.memory.exact.timeline import Exact, Timeline
from memconsole.memory.tracers.question import Matter, matter_of
from memconsole.memory.tracers.thread import Desk, Patience, Wish
from memconsole.memory.tracers.tracer import tracer_modules
from memconsole.plan.budget import Budget
from memconsole.plan.plan import Plan, PlanError


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the exact numbers of one plan are."""

    pending: bool = False
    seconds: float = 0.0
    """Since it was asked for."""
    problem: str = ""
    """Why there will be none, in one sentence."""


class Knowledge:
    """What was found out, in memory. Read from any thread, written by the desk's."""

    def __init__(self) -> None:
        self._points: dict[str, Exact] = {}
        self._timelines: dict[tuple[str, tuple[int, int] | None], Timeline] = {}
        self._evaluated: dict[str, Known] = {}
        self.problems: dict[str, str] = {}
        """By `Matter.key`."""

    def keep(self, matter: Matter, exact: Exact | None, timeline: Timeline | None) -> None:
        """Remember an answer, or what the store had of one."""
        if timeline is not None:
            self._timelines[matter.structure, timeline.only] = timeline
            self._evaluated = {}
        if exact is not None:
            self._points[matter.key] = exact

    def known(self, matter: Matter) -> Known | None:
        """Its own answer, else one of its structure's timeline."""
        exact = self._points.get(matter.key)
        if exact is not None:
            return Known(exact=exact)
        evaluated = self._evaluated
        known = evaluated.get(matter.key)
        if known is not None:
            return known
        batch, length = matter.plan.train.batch_size, matter.plan.data.sequence_length
        for only in (None, (batch, length)):
            timeline = self._timelines.get((matter.structure, only))
            if timeline is not None and affine.covers(
                timeline, matter.plan, matter.model, matter.kind
            ):
                exact = affine.evaluate(timeline, batch, length, matter.plan.evaluation_batch)
                known = Known(exact=exact, replayed=exact.reserved_bytes is None)
                evaluated[matter.key] = known
                return known
        return None

    def settled(self, matter: Matter, *, loosely: bool = False) -> bool:
        """Whether there is nothing more to find out; `loosely`: but for the allocator's share."""
        if matter.key in self._points or matter.key in self.problems:
            return True
        known = self.known(matter)
        return known is not None and (known.replayed or loosely)


class ExactBook:
    """Exact numbers of plans: those known, and the asking for those that are not.

    `lookup` and `progress` return at once. `on_news` is called, on a thread of this book, when either would
    answer differently.
    """

    def __init__(
        self,
        *,
        on_news: Callable[[], None] | None = None,
        folder: Path | None = None,
        tracers: Callable[[], Mapping[str, str]] = tracer_modules,
        environment: Mapping[str, str] | None = None,
        patience: Patience | None = None,
    ) -> None:
        """`folder` holds the store; None is the person's cache folder. `environment` is the tracers'."""
        self._on_news = on_news
        self._knowledge = Knowledge()
        self._desk = Desk(
            self._knowledge,
            self._tell,
            folder=folder,
            tracers=tracers,
            environment=environment,
            patience=patience or Patience(),
        )
        self._wish: Wish | None = None
        self._changed = threading.Condition()
        self._news = 0

    def lookup(self, plan: Plan, budget: Budget) -> Known | None:
        """What is known exactly of `plan` on the device of `budget`."""
        try:
            return self._knowledge.known(matter_of(plan, budget))
        except PlanError:
            return None

    def ask(
        self, plan: Plan, budget: Budget, neighbours: Iterable[Plan] = (), *, trace: bool = True
    ) -> None:
        """From now on find out about `plan`, then about `neighbours` in their order; older wishes end.

        `neighbours` are made on the book's thread. Without `trace` only the store is read, and what a tracer
        is at work on goes on.
        """
        try:
            matter = matter_of(plan, budget)
        except PlanError:
            return
        old = self._wish
        same = old is not None and old.trace and old.matter.key == matter.key
        since = old.since if old is not None and same else time.monotonic()
        self._wish = Wish(matter, budget, neighbours, trace, since)
        if not self._desk.running:
            self._desk.start()
            atexit.register(self.close)
        self._desk.take(self._wish)

    def progress(self, plan: Plan, budget: Budget) -> Progress:
        """How far `plan` is, of what was asked last."""
        try:
            matter = matter_of(plan, budget)
        except PlanError:
            return Progress()
        problem = self._knowledge.problems.get(matter.key, "")
        wish = self._wish
        if problem or wish is None or not wish.trace or wish.matter.key != matter.key:
            return Progress(problem=problem)
        if self._knowledge.settled(matter):
            return Progress()
        return Progress(pending=True, seconds=time.monotonic() - wish.since)

    def forget_problems(self) -> None:
        """Let what went wrong be asked again."""
        self._knowledge.problems.clear()

    def rest(self) -> None:
        """End the tracers until the next `ask`."""
        self._wish = None
        if self._desk.running:
            self._desk.rest()

    def wait(self, timeout_seconds: float) -> None:
        """Until there is news since the last wait, or for so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._news > 0, timeout_seconds)
            self._news = 0

    def close(self) -> None:
        """Kill the tracers and end the thread."""
        atexit.unregister(self.close)
        self._desk.close()

    def _tell(self) -> None:
        with self._changed:
            self._news += 1
            self._changed.notify_all()
        if self._on_news is not None:
            self._on_news()
