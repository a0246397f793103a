"""The thread that sends plans to the tracers, one at a time: first the current plan, then its neighbours when idle.

It sleeps while there is nothing to do. Everything except `start`, `take`, `rest` and `close` runs on this thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from memconsole.memory.exact.timeline import AffineTimeline, Exact, TracerAnswer, TracerQuestion
from memconsole.memory.tracers.question import TracedPlan, traced_plan
from memconsole.memory.tracers.store import ExactStore, StoredAnswer, fingerprint
from memconsole.memory.tracers.tracer import Tracer, TracerEnded
from memconsole.plan import plan_file
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan, PlanError
from memconsole.user_folders import NoHomeError, cache_folder

TRIES = 2
"""How often a question is asked in all if the tracer dies of it."""


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits in seconds."""

    superseded: float = 1.0
    """A tracer that is still busy with an outdated question after this time is killed."""
    starting: float = 8.0
    """A tracer that has not answered yet is not killed before this age, because importing a framework takes seconds."""
    idle: float = 60.0
    """A tracer that was idle for this long is stopped."""
    longest: float = 900.0
    """A question that takes longer than this is abandoned."""
    neighbours: float = 120.0
    """Neighbours of a plan are traced for at most this long after its request."""


class ExactRequest(msgspec.Struct, frozen=True):
    """A request for exact numbers of the plan on screen and of its neighbours."""

    traced: TracedPlan
    budget: Budget
    neighbours: Iterable[Plan]
    trace: bool
    """If False, only the store is read."""
    since: float


class Answers(Protocol):
    """The cache that answers are read from and written to (`exact_book.ExactCache`)."""

    problems: dict[str, str]

    def keep(
        self, traced: TracedPlan, exact: Exact | None, timeline: AffineTimeline | None
    ) -> None: ...

    def settled(self, traced: TracedPlan, *, loosely: bool = False) -> bool: ...


class _Asked(msgspec.Struct):
    """A question that was sent to a tracer and is not answered yet."""

    traced: TracedPlan
    tracer: Tracer
    at: float
    superseded_at: float | None = None
    doubtful: bool = False
    """True once a newer question superseded this one: the tracer may then skip it."""


class _Stop:
    """Message that ends the thread."""


class _Rest:
    """Message that stops all tracers until the next request."""


class TracerThread:
    """Manages one tracer process per backend, and the store."""

    def __init__(
        self,
        answers: Answers,
        tell: Callable[[], None],
        *,
        folder: Path | None,
        tracers: Callable[[], Mapping[str, str]],
        environment: Mapping[str, str] | None,
        patience: Patience,
    ) -> None:
        """`tell` is called after each new result. `tracers` returns the tracer modules by backend."""
        self._answers = answers
        self._tell = tell
        self._folder = folder
        self._find_tracers = tracers
        self._environment = environment
        self._patience = patience
        self._inbox: queue.SimpleQueue[
            ExactRequest | _Stop | _Rest | tuple[Tracer, TracerAnswer | TracerEnded]
        ]
        self._inbox = queue.SimpleQueue()
        self._modules: Mapping[str, str] | None = None
        self._stores: dict[str, ExactStore] = {}
        self._tracers: dict[str, Tracer] = {}
        self._request: ExactRequest | None = None
        self._recalled: ExactRequest | None = None
        self._neighbours: tuple[TracedPlan, ...] = ()
        self._asked: dict[int, _Asked] = {}
        self._tries: dict[str, int] = {}
        self._read: set[str] = set()
        self._busy_at = time.monotonic()
        self._last_id = 0
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._work, name="exact", daemon=True)
        self._thread.start()

    def take(self, request: ExactRequest) -> None:
        """Replace the current request by this one."""
        self._inbox.put(request)

    def rest(self) -> None:
        """Drop the current request and stop the tracers."""
        self._inbox.put(_Rest())

    def close(self) -> None:
        """Kill the tracers and end the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._inbox.put(_Stop())
            thread.join(5.0)

    def _work(self) -> None:
        try:
            while self._attend():
                self._step(time.monotonic())
        finally:
            for tracer in self._tracers.values():
                tracer.kill()
            for tracer in self._tracers.values():
                tracer.join(1.0)
            self._tracers.clear()
            self._asked.clear()

    def _attend(self) -> bool:
        """Handle all messages in the inbox; wait for one, but not longer than `_seconds_to_wait` says. False ends the thread."""
        try:
            items = [self._inbox.get(timeout=self._seconds_to_wait(time.monotonic()))]
        except queue.Empty:
            return True
        while not self._inbox.empty():
            items.append(self._inbox.get())
        for item in items:
            if isinstance(item, _Stop):
                return False
            if isinstance(item, _Rest):
                self._request = None
                for tracer in list(self._tracers.values()):
                    self._kill(tracer)
            elif isinstance(item, ExactRequest):
                self._request = item
            else:
                self._hear(*item)
        if self._request is not None and self._request is not self._recalled:
            self._recalled = self._request
            self._recall(self._request)
        return True

    def _seconds_to_wait(self, now: float) -> float | None:
        """Seconds until the next time limit expires; None if no limit is running."""
        moments = [asked.at + self._patience.longest for asked in self._asked.values()]
        moments += [self._too_long(a) for a in self._asked.values() if a.superseded_at is not None]
        if not self._asked and self._tracers:
            moments.append(self._busy_at + self._patience.idle)
        return max(0.01, min(moments) - now) if moments else None

    def _too_long(self, asked: _Asked) -> float:
        """The time at which the tracer of a superseded question is to be killed."""
        end = (asked.superseded_at or 0.0) + self._patience.superseded
        if not asked.tracer.answered:
            end = max(end, asked.tracer.started_at + self._patience.starting)
        return end

    def _recall(self, request: ExactRequest) -> None:
        """Build the request's neighbours, and read all stored answers for them and for the plan."""
        around = []
        for neighbour in request.neighbours:
            try:
                around.append(traced_plan(neighbour, request.budget))
            except PlanError:
                continue
        self._neighbours = tuple(around)
        store, found = self._store(request.traced.plan.backend), False
        for traced in (request.traced, *around):
            if store is None or traced.key in self._read or self._answers.settled(traced):
                continue
            self._read.add(traced.key)
            for stored in (store.read(traced.structure), store.read(traced.key)):
                if stored is not None:
                    found = True
                    self._answers.keep(traced, stored.exact, stored.timeline)
        if found:
            self._tell()

    def _hear(self, tracer: Tracer, heard: TracerAnswer | TracerEnded) -> None:
        """Handle an answer or the end of a tracer process."""
        self._busy_at = time.monotonic()
        if isinstance(heard, TracerEnded):
            self._bury(tracer, heard.reason)
            return
        asked = self._asked.pop(heard.id, None)
        if asked is None:
            return
        traced = asked.traced
        self._tries.pop(traced.key, None)
        if heard.exact is not None or heard.timeline is not None:
            self._answers.keep(traced, heard.exact, heard.timeline)
            self._write(traced, heard)
        elif not asked.doubtful:
            self._answers.problems[traced.key] = heard.problem or "the tracer returned no result"
        self._tell()

    def _write(self, traced: TracedPlan, answer: TracerAnswer) -> None:
        store = self._store(traced.plan.backend)
        if store is None:
            return
        if answer.exact is not None:
            store.write(StoredAnswer(key=traced.key, exact=answer.exact))
        if answer.timeline is not None and answer.timeline.only is None:
            store.write(StoredAnswer(key=traced.structure, timeline=answer.timeline))

    def _bury(self, tracer: Tracer, reason: str) -> None:
        """Handle a tracer that ended by itself. Its questions are asked again until `TRIES` is reached."""
        if self._tracers.get(tracer.backend) is tracer:
            del self._tracers[tracer.backend]
        for asked in self._forget(tracer):
            key = asked.traced.key
            if asked.superseded_at is not None:
                continue
            self._tries[key] = self._tries.get(key, 0) + 1
            if self._tries[key] >= TRIES:
                del self._tries[key]
                self._answers.problems[key] = reason
                self._tell()

    def _step(self, now: float) -> None:
        """Abandon questions that take too long, and send the next one."""
        for asked in list(self._asked.values()):
            if now - asked.at >= self._patience.longest:
                self._kill(asked.tracer)
                minutes = self._patience.longest / 60
                self._answers.problems[asked.traced.key] = f"no answer in {minutes:.0f} minutes"
                self._tell()
        if self._request is not None and self._request.trace:
            self._pursue(self._request, now)
        if not self._asked and now - self._busy_at >= self._patience.idle:
            for tracer in list(self._tracers.values()):
                self._kill(tracer)

    def _pursue(self, request: ExactRequest, now: float) -> None:
        urgent = not self._answers.settled(request.traced)
        wanted = request.traced if urgent else self._next_neighbour(request, now)
        if wanted is None:
            return
        if urgent:
            self._make_way(wanted, now)
        # If the wanted plan is already being traced as a neighbour, that trace continues.
        present = any(asked.traced.key == wanted.key for asked in self._asked.values())
        if not present and (urgent or not self._asked):
            self._send(wanted, urgent, now)

    def _make_way(self, wanted: TracedPlan, now: float) -> None:
        """Mark the questions that block an urgent one as superseded, and kill tracers that overran their limit."""
        for asked in list(self._asked.values()):
            if asked.traced.key == wanted.key:
                asked.superseded_at = None
            elif asked.superseded_at is None:
                asked.superseded_at, asked.doubtful = now, True
            elif now >= self._too_long(asked):
                self._kill(asked.tracer)

    def _next_neighbour(self, request: ExactRequest, now: float) -> TracedPlan | None:
        if now - request.since > self._patience.neighbours:
            return None
        for loosely in (True, False):  # First plans with no answer, then those without a replay.
            for traced in self._neighbours:
                if not self._answers.settled(traced, loosely=loosely):
                    return traced
        return None

    def _send(self, traced: TracedPlan, urgent: bool, now: float) -> None:
        backend = traced.plan.backend
        tracer = self._tracers.get(backend) or self._start(traced)
        if tracer is None:
            self._tell()
            return
        self._last_id += 1
        self._asked[self._last_id] = _Asked(traced, tracer, now)
        self._busy_at = now
        tracer.ask(
            TracerQuestion(
                id=self._last_id,
                plan=plan_file.dumps(traced.plan),
                kind=traced.kind,
                target=traced.target,
                urgent=urgent,
            )
        )

    def _start(self, traced: TracedPlan) -> Tracer | None:
        """Start the tracer of the plan's backend. If that fails, record the problem and return None."""
        backend = traced.plan.backend
        module = self._module(backend)
        problem = f"no tracer is installed for the {backend} backend"
        if module is not None:
            try:
                self._tracers[backend] = Tracer(backend, module, self._heard, self._environment)
                return self._tracers[backend]
            except OSError as error:
                problem = f"the {backend} tracer did not start: {error}"
        self._answers.problems[traced.key] = problem
        return None

    def _heard(self, tracer: Tracer, heard: TracerAnswer | TracerEnded) -> None:
        self._inbox.put((tracer, heard))

    def _kill(self, tracer: Tracer) -> None:
        """Kill a tracer and forget the questions it was asked."""
        tracer.kill()
        if self._tracers.get(tracer.backend) is tracer:
            del self._tracers[tracer.backend]
        self._forget(tracer)

    def _forget(self, tracer: Tracer) -> list[_Asked]:
        """Remove and return the unanswered questions of a tracer."""
        numbers = [number for number, asked in self._asked.items() if asked.tracer is tracer]
        return [self._asked.pop(number) for number in numbers]

    def _module(self, backend: str) -> str | None:
        if self._modules is None:
            self._modules = self._find_tracers()
        return self._modules.get(backend)

    def _store(self, backend: str) -> ExactStore | None:
        """The backend's part of the store; None without a tracer for the backend or a folder for the cache."""
        module = self._module(backend)
        if module is not None and backend not in self._stores:
            try:
                root = self._folder or cache_folder() / "exact"
            except NoHomeError:
                return None
            self._stores[backend] = ExactStore(root, fingerprint(module))
        return self._stores.get(backend)
