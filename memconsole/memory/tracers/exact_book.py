"""The exact tier: returns known exact numbers of a plan at once, and asks the backend's tracer for missing ones.

Nothing is traced in this process. A `TracerThread` manages the tracer processes and the store on disk.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from memconsole.memory.exact import affine
from memconsole.memory.exact.sharpen import KnownExact
from memconsole.memory.exact.timeline import AffineTimeline, Exact
from memconsole.memory.tracers.question import TracedPlan, traced_plan
from memconsole.memory.tracers.thread import ExactRequest, TimeLimits, TracerThread
from memconsole.memory.tracers.tracer import tracer_modules
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan, PlanError


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Whether exact numbers of one plan are being computed, and for how long."""

    pending: bool = False
    seconds: float = 0.0
    """Time since the request."""
    problem: str = ""
    """Why there will be no exact numbers, in one sentence."""


class ExactCache:
    """Answers kept in memory. Any thread reads them; only the tracer thread writes them."""

    def __init__(self) -> None:
        self._points: dict[str, Exact] = {}
        self._timelines: dict[tuple[str, tuple[int, int] | None], AffineTimeline] = {}
        self._evaluated: dict[str, KnownExact] = {}
        self.problems: dict[str, str] = {}
        """By `TracedPlan.key`."""

    def keep(
        self, traced: TracedPlan, exact: Exact | None, timeline: AffineTimeline | None
    ) -> None:
        """Add a tracer's answer, or one read from the store."""
        if timeline is not None:
            self._timelines[traced.structure, timeline.only] = timeline
            self._evaluated = {}
        if exact is not None:
            self._points[traced.key] = exact

    def known(self, traced: TracedPlan) -> KnownExact | None:
        """The plan's own answer, else one evaluated from a timeline of its structure."""
        exact = self._points.get(traced.key)
        if exact is not None:
            return KnownExact(exact=exact)
        evaluated = self._evaluated
        known = evaluated.get(traced.key)
        if known is not None:
            return known
        batch, length = traced.plan.train.batch_size, traced.plan.data.sequence_length
        for only in (None, (batch, length)):
            timeline = self._timelines.get((traced.structure, only))
            if timeline is not None and affine.covers(
                timeline, traced.plan, traced.model, traced.kind
            ):
                exact = affine.evaluate(timeline, batch, length, traced.plan.evaluation_batch)
                known = KnownExact(exact=exact, replayed=exact.reserved_bytes is None)
                evaluated[traced.key] = known
                return known
        return None

    def settled(self, traced: TracedPlan, *, loosely: bool = False) -> bool:
        """Whether nothing is left to compute. With `loosely`, the allocator's share may still be missing."""
        if traced.key in self._points or traced.key in self.problems:
            return True
        known = self.known(traced)
        return known is not None and (known.replayed or loosely)


class ExactBook:
    """Looks up exact numbers of plans, and requests the missing ones.

    `lookup` and `progress` return at once. `on_news` is called on the tracer thread whenever their result may have
    changed.
    """

    def __init__(
        self,
        *,
        on_news: Callable[[], None] | None = None,
        folder: Path | None = None,
        tracers: Callable[[], Mapping[str, str]] = tracer_modules,
        environment: Mapping[str, str] | None = None,
        limits: TimeLimits | None = None,
    ) -> None:
        """`folder` holds the store; None means the user's cache folder. `environment` is for the tracer processes."""
        self._on_news = on_news
        self._cache = ExactCache()
        self._tracing = TracerThread(
            self._cache,
            self._notify,
            folder=folder,
            tracers=tracers,
            environment=environment,
            limits=limits or TimeLimits(),
        )
        self._request: ExactRequest | None = None
        self._changed = threading.Condition()
        self._news = 0

    def lookup(self, plan: Plan, budget: Budget) -> KnownExact | None:
        """The known exact numbers of `plan` on the device of `budget`, or None."""
        try:
            return self._cache.known(traced_plan(plan, budget))
        except PlanError:
            return None

    def ask(
        self, plan: Plan, budget: Budget, neighbours: Iterable[Plan] = (), *, trace: bool = True
    ) -> None:
        """Request exact numbers for `plan`, then for `neighbours` in order. This replaces older requests.

        The tracer thread iterates over `neighbours`. Without `trace` only the store is read, and running
        tracers continue.
        """
        try:
            traced = traced_plan(plan, budget)
        except PlanError:
            return
        old = self._request
        same = old is not None and old.trace and old.traced.key == traced.key
        since = old.since if old is not None and same else time.monotonic()
        self._request = ExactRequest(traced, budget, neighbours, trace, since)
        if not self._tracing.running:
            self._tracing.start()
            atexit.register(self.close)
        self._tracing.replace_request(self._request)

    def progress(self, plan: Plan, budget: Budget) -> Progress:
        """The progress of `plan`, if it was the last plan requested."""
        try:
            traced = traced_plan(plan, budget)
        except PlanError:
            return Progress()
        problem = self._cache.problems.get(traced.key, "")
        request = self._request
        if problem or request is None or not request.trace or request.traced.key != traced.key:
            return Progress(problem=problem)
        if self._cache.settled(traced):
            return Progress()
        return Progress(pending=True, seconds=time.monotonic() - request.since)

    def forget_problems(self) -> None:
        """Allow failed plans to be requested again."""
        self._cache.problems.clear()

    def rest(self) -> None:
        """Stop the tracers until the next `ask`."""
        self._request = None
        if self._tracing.running:
            self._tracing.rest()

    def wait(self, timeout_seconds: float) -> None:
        """Block until there is news since the last wait, or until the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._news > 0, timeout_seconds)
            self._news = 0

    def close(self) -> None:
        """Kill the tracers and end the thread."""
        atexit.unregister(self.close)
        self._tracing.close()

    def _notify(self) -> None:
        with self._changed:
            self._news += 1
            self._changed.notify_all()
        if self._on_news is not None:
            self._on_news()
