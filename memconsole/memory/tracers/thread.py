"""The thread that sends plans to the tracers, one at a time: first the current plan, then its neighbours when idle.

It sleeps while there is nothing to do. Everything except `start`, `replace_request`, `rest` and `close` runs on this thread.
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
"""The most times that one question is sent to tracers, if each tracer ends without an answer."""


class TimeLimits(msgspec.Struct, frozen=True, kw_only=True):
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


class _PendingQuestion(msgspec.Struct):
    """A question that was sent to a tracer and is not answered yet."""

    traced: TracedPlan
    tracer: Tracer
    sent_at: float
    superseded_at: float | None = None
    may_be_skipped: bool = False
    """True once a newer question superseded this one. An answer without numbers is then no problem of the plan."""


class _Stop:
    """Message that ends the thread."""


class _Rest:
    """Message that stops all tracers until the next request."""


class TracerThread:
    """Manages one tracer process per backend, and the store."""

    def __init__(
        self,
        answers: Answers,
        notify: Callable[[], None],
        *,
        folder: Path | None,
        tracers: Callable[[], Mapping[str, str]],
        environment: Mapping[str, str] | None,
        limits: TimeLimits,
    ) -> None:
        """`notify` is called after each new result. `tracers` returns the tracer modules by backend."""
        self._answers = answers
        self._notify = notify
        self._folder = folder
        self._find_tracers = tracers
        self._environment = environment
        self._limits = limits
        self._inbox: queue.SimpleQueue[
            ExactRequest | _Stop | _Rest | tuple[Tracer, TracerAnswer | TracerEnded]
        ]
        self._inbox = queue.SimpleQueue()
        self._modules: Mapping[str, str] | None = None
        self._stores: dict[str, ExactStore] = {}
        self._tracers: dict[str, Tracer] = {}
        self._request: ExactRequest | None = None
        self._last_read: ExactRequest | None = None
        self._neighbours: tuple[TracedPlan, ...] = ()
        self._pending: dict[int, _PendingQuestion] = {}
        self._tries: dict[str, int] = {}
        self._keys_read: set[str] = set()
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

    def replace_request(self, request: ExactRequest) -> None:
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
            while self._handle_messages():
                self._advance(time.monotonic())
        finally:
            for tracer in self._tracers.values():
                tracer.kill()
            for tracer in self._tracers.values():
                tracer.join(1.0)
            self._tracers.clear()
            self._pending.clear()

    def _handle_messages(self) -> bool:
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
                self._handle_answer(*item)
        if self._request is not None and self._request is not self._last_read:
            self._last_read = self._request
            self._read_stored(self._request)
        return True

    def _seconds_to_wait(self, now: float) -> float | None:
        """Seconds until the next time limit expires; None if no limit is running."""
        moments = [question.sent_at + self._limits.longest for question in self._pending.values()]
        moments += [
            self._kill_time(q) for q in self._pending.values() if q.superseded_at is not None
        ]
        if not self._pending and self._tracers:
            moments.append(self._busy_at + self._limits.idle)
        return max(0.01, min(moments) - now) if moments else None

    def _kill_time(self, question: _PendingQuestion) -> float:
        """The time at which the tracer of a superseded question is to be killed."""
        end = (question.superseded_at or 0.0) + self._limits.superseded
        if not question.tracer.answered:
            end = max(end, question.tracer.started_at + self._limits.starting)
        return end

    def _read_stored(self, request: ExactRequest) -> None:
        """Build the request's neighbours, and read all stored answers for them and for the plan."""
        around = []
        for neighbour in request.neighbours:
            try:
                around.append(traced_plan(neighbour, request.budget))
            except PlanError:
                continue
        self._neighbours = tuple(around)
        store, has_new_answers = self._store(request.traced.plan.backend), False
        for traced in (request.traced, *around):
            if store is None or traced.key in self._keys_read or self._answers.settled(traced):
                continue
            self._keys_read.add(traced.key)
            for stored in (store.read(traced.structure), store.read(traced.key)):
                if stored is not None:
                    has_new_answers = True
                    self._answers.keep(traced, stored.exact, stored.timeline)
        if has_new_answers:
            self._notify()

    def _handle_answer(self, tracer: Tracer, message: TracerAnswer | TracerEnded) -> None:
        """Handle an answer or the end of a tracer process."""
        self._busy_at = time.monotonic()
        if isinstance(message, TracerEnded):
            self._handle_end(tracer, message.reason)
            return
        question = self._pending.pop(message.id, None)
        if question is None:
            return
        traced = question.traced
        self._tries.pop(traced.key, None)
        if message.exact is not None or message.timeline is not None:
            self._answers.keep(traced, message.exact, message.timeline)
            self._write(traced, message)
        elif not question.may_be_skipped:
            self._answers.problems[traced.key] = message.problem or "the tracer returned no result"
        self._notify()

    def _write(self, traced: TracedPlan, answer: TracerAnswer) -> None:
        store = self._store(traced.plan.backend)
        if store is None:
            return
        if answer.exact is not None:
            store.write(StoredAnswer(key=traced.key, exact=answer.exact))
        if answer.timeline is not None and answer.timeline.only is None:
            store.write(StoredAnswer(key=traced.structure, timeline=answer.timeline))

    def _handle_end(self, tracer: Tracer, reason: str) -> None:
        """Handle a tracer that ended by itself. Its questions are asked again until `TRIES` is reached."""
        if self._tracers.get(tracer.backend) is tracer:
            del self._tracers[tracer.backend]
        for question in self._forget(tracer):
            key = question.traced.key
            if question.superseded_at is not None:
                continue
            self._tries[key] = self._tries.get(key, 0) + 1
            if self._tries[key] >= TRIES:
                del self._tries[key]
                self._answers.problems[key] = reason
                self._notify()

    def _advance(self, now: float) -> None:
        """Abandon questions that take too long, and send the next one."""
        for question in list(self._pending.values()):
            if now - question.sent_at >= self._limits.longest:
                self._kill(question.tracer)
                minutes = self._limits.longest / 60
                self._answers.problems[question.traced.key] = f"no answer in {minutes:.0f} minutes"
                self._notify()
        if self._request is not None and self._request.trace:
            self._ask_next(self._request, now)
        if not self._pending and now - self._busy_at >= self._limits.idle:
            for tracer in list(self._tracers.values()):
                self._kill(tracer)

    def _ask_next(self, request: ExactRequest, now: float) -> None:
        """Send the requested plan to its tracer if its answer is missing, else the next neighbour if no tracer is busy."""
        urgent = not self._answers.settled(request.traced)
        wanted = request.traced if urgent else self._next_neighbour(request, now)
        if wanted is None:
            return
        if urgent:
            self._supersede_others(wanted, now)
        # If the wanted plan is already being traced as a neighbour, that trace continues.
        present = any(question.traced.key == wanted.key for question in self._pending.values())
        if not present and (urgent or not self._pending):
            self._send(wanted, urgent, now)

    def _supersede_others(self, wanted: TracedPlan, now: float) -> None:
        """Mark the questions that block an urgent one as superseded, and kill tracers that overran their limit."""
        for question in list(self._pending.values()):
            if question.traced.key == wanted.key:
                question.superseded_at = None
            elif question.superseded_at is None:
                question.superseded_at, question.may_be_skipped = now, True
            elif now >= self._kill_time(question):
                self._kill(question.tracer)

    def _next_neighbour(self, request: ExactRequest, now: float) -> TracedPlan | None:
        if now - request.since > self._limits.neighbours:
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
            self._notify()
            return
        self._last_id += 1
        self._pending[self._last_id] = _PendingQuestion(traced, tracer, now)
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
                self._tracers[backend] = Tracer(backend, module, self._post, self._environment)
                return self._tracers[backend]
            except OSError as error:
                problem = f"the {backend} tracer did not start: {error}"
        self._answers.problems[traced.key] = problem
        return None

    def _post(self, tracer: Tracer, message: TracerAnswer | TracerEnded) -> None:
        """Put a tracer's message into the inbox; called on the thread that reads from the tracer."""
        self._inbox.put((tracer, message))

    def _kill(self, tracer: Tracer) -> None:
        """Kill a tracer and forget the questions it was asked."""
        tracer.kill()
        if self._tracers.get(tracer.backend) is tracer:
            del self._tracers[tracer.backend]
        self._forget(tracer)

    def _forget(self, tracer: Tracer) -> list[_PendingQuestion]:
        """Remove and return the unanswered questions of a tracer."""
        numbers = [
            number for number, question in self._pending.items() if question.tracer is tracer
        ]
        return [self._pending.pop(number) for number in numbers]

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
