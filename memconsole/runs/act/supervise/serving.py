"""Answers the requests to a run: decides, replies, and keeps the deadline of a stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from memconsole.runs.act.supervise.stop_deadline import SeenDurations, StopDeadline
from memconsole.runs.record import requests, spares
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.processes.heartbeat import Heartbeat
from memconsole.runs.record.processes.identity import boot_seconds
from memconsole.runs.record.states import WAIT_DISK

SAME_STOP_SECONDS = 3.0
"""If two people ask to stop within this time, the second request does not make the stop urgent."""

SLEPT_SECONDS = 10.0
"""The supervisor looks several times a second. After a longer gap the machine or the container has slept."""


class Serving:
    """Serves the requests to one attempt of one run."""

    def __init__(self, run: RunDirectory, say: Callable[[str], None]) -> None:
        """`say` is called with a line of text when something goes wrong."""
        self.run = run
        self.attempt = 0
        self.stops: list[tuple[str, float]] = []
        """Who asked to stop, and when (seconds since boot)."""
        self._say = say
        self._durations = SeenDurations()
        self._deadline: StopDeadline | None = None
        self._looked: float | None = None
        """When `overdue` was asked last."""
        self._unwritten: dict[str, requests.Reply] = {}
        """Replies that could not be written because the disk is full, by the names of their files."""

    def adopt(self, attempt: int, alive: bool) -> None:
        """Go on serving an attempt that another supervisor has served until now."""
        self.attempt = attempt
        accepted = [a for a in requests.replies(self.run) if a.attempt == attempt and a.accepted]
        now = boot_seconds()
        self.stops = [(answer.who, now) for answer in accepted if answer.command == "stop"]
        if self.stops and alive:
            self._deadline = StopDeadline(now, self._durations.patience_seconds())

    def serve(self, act: Callable[[requests.Request], None]) -> None:
        """Reply to each new request, and `act` on it if it was accepted."""
        for request, path in requests.pending(self.run):
            if request is not None and request.attempt > self.attempt:
                continue  # It is for the supervisor of a later attempt.
            reply = self._unwritten.get(path.name)
            if reply is not None:
                self._write_reply(path, reply)
                continue
            reply = self._decide(request, path)
            if request is None or not reply.accepted or reply.note:
                self._write_reply(path, reply)
            elif reply.command in ("stop", "kill"):
                # Reply before acting: the reply to a kill is evidence for the verdict.
                self._write_reply(path, reply)
                self._act(act, request)
            else:
                # Act before replying, so that a reply to a pause says that the run is paused.
                note = self._act(act, request)
                self._write_reply(
                    path, msgspec.structs.replace(reply, accepted=not note, note=note)
                )

    def _act(self, act: Callable[[requests.Request], None], request: requests.Request) -> str:
        """Do what a request asks. Returns why that failed, or an empty text."""
        try:
            act(request)
        except OSError as error:
            self._say(f"{request.command}: {error}")
            return error.strerror or str(error)
        return ""

    def overdue(self, beat: Heartbeat | None) -> bool:
        """Whether a requested stop takes too long. `beat` is the trainer's newest heartbeat."""
        now = boot_seconds()
        slept = self._looked is not None and now - self._looked > SLEPT_SECONDS
        self._looked = now
        moved = beat is not None and self._durations.see(beat, now)
        if self._deadline is None:
            return False
        if slept or (beat is not None and beat.phase == WAIT_DISK):
            # The trainer could do nothing meanwhile. What a full disk does not take is only in its memory, so that it must
            # not be killed.
            self._deadline.hold(now)
        elif moved:
            self._deadline.moved(now)
        return now >= self._deadline.at

    def record_kill(self) -> None:
        """Write a kill reply in the supervisor's name, because a stop took too long."""
        requested = requests.stop_requests(self.run, self.attempt)
        who = requested[0].who if requested else "someone"
        name = requests.new_id()
        reply = self._new_reply(
            name, "kill", "the supervisor", note=f"the stop asked by {who} took too long"
        )
        path = self.run.control_path / "ack" / f"{name}.json"
        try:
            spares.write_struct(self.run.spares_path, path, reply)
        except OSError as error:
            self._say(f"{path.name}: {error}")

    def _write_reply(self, path: Path, reply: requests.Reply) -> None:
        """Write a reply; on a full disk keep it for later, so that nothing is served twice."""
        try:
            requests.settle(self.run, path, reply)
            self._unwritten.pop(path.name, None)
        except OSError as error:
            self._unwritten[path.name] = reply
            self._say(f"{path.name}: {error}")

    def _decide(self, request: requests.Request | None, path: Path) -> requests.Reply:
        if request is None:
            return self._new_reply(path.stem, "?", "?", accepted=False, note="not a valid request")
        command, who = request.command, request.who
        if request.attempt != self.attempt:
            note = f"meant for attempt {request.attempt}"
            return self._new_reply(path.stem, command, who, accepted=False, note=note)
        note = self._count_stop(who) if command == "stop" else ""
        return self._new_reply(path.stem, command, who, note=note)

    def _count_stop(self, who: str) -> str:
        """Record a stop request. Returns a note if it only repeats another user's recent
        request.
        """
        now = boot_seconds()
        others = [name for name, when in self.stops if now - when < SAME_STOP_SECONDS]
        if others and who not in others:
            return f"already asked by {others[0]}"
        self.stops.append((who, now))
        if self._deadline is None:
            self._deadline = StopDeadline(now, self._durations.patience_seconds())
        else:
            self._deadline.hurry(now, self._durations.patience_seconds(urgent=True))
        return ""

    def _new_reply(
        self, request_id: str, command: str, who: str, accepted: bool = True, note: str = ""
    ) -> requests.Reply:
        return requests.Reply(
            id=request_id,
            command=command,
            who=who,
            attempt=self.attempt,
            accepted=accepted,
            note=note,
            time_wall=time.time(),
            deadline_boot=self._deadline.at if self._deadline is not None else None,
        )
