"""Watches one attempt of a run: serves requests and records how the attempt ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from memconsole.plan.plan import PlanError
from memconsole.runs.act import daemon, family, spawn
from memconsole.runs.act.spawn import TrainerCommand, trainer_command
from memconsole.runs.act.stop_deadline import SeenDurations, StopDeadline
from memconsole.runs.read import ladder
from memconsole.runs.read.verdict import classify, gather
from memconsole.runs.record import files, identity, locks, requests, spares
from memconsole.runs.record.directory import RunDirectory, RunError
from memconsole.runs.record.heartbeat import read_heartbeat
from memconsole.runs.record.identity import ProcessHandle, boot_seconds
from memconsole.runs.record.records import ExitRecord
from memconsole.runs.record.states import WAIT_DISK, Verdict

POLL_SECONDS = 0.25
SNAPSHOT_SECONDS = 1.0
EXIT_TRIES = 60
"""Tries, a second apart, to record an end that cannot be written although the disk has room."""
SAME_STOP_SECONDS = 3.0
"""If two people ask to stop within this time, the second request does not make the stop urgent."""
LOG_BYTES = 64 << 20
"""Disk space for an attempt's output. Beyond it only the end of the output is kept."""


class Supervisor:
    """Watches one attempt of one run. Holds `supervisor.lock` from construction to `close()`."""

    def __init__(
        self,
        run: RunDirectory,
        poll_seconds: float = POLL_SECONDS,
        lock: locks.Lock | None = None,
    ) -> None:
        """Takes the supervisor's lock, unless `lock` is given.

        Raises `locks.LockHeld` if the run has another supervisor.
        """
        self.run = run
        self.poll_seconds = poll_seconds
        self.lock = lock or locks.take(run.supervisor_lock)
        self.attempt = 0
        self.child: int | None = None
        """The trainer's process id, if it is a child of this process."""
        self.status: int | None = None
        """The trainer's wait status."""
        self.handle: ProcessHandle | None = None
        self.durations = SeenDurations()
        self.deadline: StopDeadline | None = None
        self.stops: list[tuple[str, float]] = []
        """Who asked to stop, and when (seconds since boot)."""
        self.killing = False
        self.continues = False
        """Whether the run ran out of memory and goes on with smaller micro-batches."""
        self._unwritten: dict[str, requests.Reply] = {}
        """Replies to requests that are served, by the names of their files; the disk is full."""
        self._save: Callable[[], object] | None = None
        self._next_snapshot = 0.0

    def successor(self) -> Supervisor:
        """A supervisor for the next attempt, with this one's lock. Call once this attempt has
        ended.
        """
        if self.handle is not None:
            self.handle.close()
        return Supervisor(self.run, self.poll_seconds, self.lock)

    def close(self) -> None:
        if self.handle is not None:
            self.handle.close()
        self.lock.release()

    def start(self, command: TrainerCommand = trainer_command) -> int:
        """Create the next attempt and start its trainer. Returns the attempt's number.

        Raises `RunError` if processes of an older attempt are alive or the trainer cannot be
        started.
        """
        held = locks.held(self.run.path)
        if held.trainer is not None:
            raise RunError(f"run {self.run.id}: its trainer still runs (process {held.trainer})")
        if held.gang:
            raise RunError(f"run {self.run.id}: children of its last attempt still hold memory")
        older = self.run.newest_attempt()
        if older is not None and not files.exists(self.run.attempt_path(older) / "exit.json"):
            self.attempt = older
            self._record_exit(None, None)
        self.attempt = self.run.new_attempt()
        try:
            self._spawn(command(self.run, self.attempt))
        except (OSError, ValueError) as error:
            self._record_exit(127, None)
            raise RunError(f"run {self.run.id}: the trainer cannot be started: {error}") from None
        return self.attempt

    def adopt(self) -> int:
        """Take over the living trainer of the newest attempt, or record how it ended.

        Raises `RunError` if there is no attempt.
        """
        attempt = self.run.newest_attempt()
        if attempt is None:
            raise RunError(f"run {self.run.id} was never started")
        self.attempt = attempt
        record = self.run.attempt_record(attempt)
        holder = locks.holder(self.run.trainer_lock)
        who = identity.identify(holder) if holder else record.trainer if record else None
        if who is not None:
            with contextlib.suppress(ProcessLookupError):
                self.handle = ProcessHandle(who)
        given = [a for a in requests.replies(self.run) if a.attempt == attempt and a.accepted]
        now = boot_seconds()
        self.stops = [(answer.who, now) for answer in given if answer.command == "stop"]
        if self.stops and self.handle is not None:
            self.deadline = StopDeadline(now, self.durations.patience_seconds())
        return attempt

    def watch(self) -> None:
        """Serve requests until the trainer and its children have ended and the end is recorded."""
        while not self._ended():
            self._tick()
        self._collect()
        if not files.exists(self.path / "exit.json"):
            self._record_exit(*self._exit_status())
        if self.killing:
            family.kill_members(self.run.id, os.getpid() if self.child else None)
        while locks.gang_held(self.run.gang_lock):
            self._serve_requests()
            if self.killing:
                family.kill_members(self.run.id, os.getpid() if self.child else None)
            self._collect()
            time.sleep(self.poll_seconds)
        with contextlib.suppress(OSError):
            self.run.reserve_path.unlink()
        self._snapshot(final=True)
        self._receipt()

    @property
    def path(self) -> Path:
        return self.run.attempt_path(self.attempt)

    def _spawn(self, argv: Sequence[str]) -> None:
        self.child, who = spawn.start_trainer(self.run, self.attempt, argv)
        if who is not None:
            with contextlib.suppress(ProcessLookupError):
                self.handle = ProcessHandle(who)

    def _ended(self) -> bool:
        """Wait up to one poll interval for the trainer to end."""
        if self.status is not None:
            return True
        if self.handle is not None:
            return self.handle.wait(self.poll_seconds)
        if locks.holder(self.run.trainer_lock) is None:
            return True
        # The lock shows that it is alive, but its process is not visible from here.
        time.sleep(self.poll_seconds)
        return False

    def _tick(self) -> None:
        self._collect()
        self._serve_requests()
        if self.stops and self.handle is not None:
            self.handle.go_on()
        now = boot_seconds()
        beat = read_heartbeat(self.path)
        if beat is not None and self.durations.see(beat, now) and self.deadline is not None:
            self.deadline.moved(now)
        if beat is not None and beat.phase == WAIT_DISK and self.deadline is not None:
            # What it could not save is in its memory only.
            self.deadline.hold(now)
        if self.deadline is not None and now >= self.deadline.at and not self.killing:
            self._give_up_waiting()
        self._snapshot()
        daemon.punch_head(self.path / "out.log", LOG_BYTES)

    def _collect(self) -> None:
        """Reap the trainer, and orphans that became children of this process."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child:
                self.status = status

    def _exit_status(self) -> tuple[int | None, signal.Signals | None]:
        if self.child is not None and self.status is None:
            with contextlib.suppress(ChildProcessError):
                self.status = os.waitpid(self.child, 0)[1]
        if self.status is None:
            return None, None
        code = os.waitstatus_to_exitcode(self.status)
        return (code, None) if code >= 0 else (None, signal.Signals(-code))

    def _record_exit(self, code: int | None, number: signal.Signals | None) -> None:
        """Write `exit.json`. On a full disk, free the reserve and wait for room."""
        verdict = classify(gather(self.run, self.attempt, code, number))
        self.continues = self._descends(verdict)
        record = ExitRecord(
            verdict=verdict,
            time_wall=time.time(),
            adopted=self.child is None,
            continues=self.continues,
        )
        tries = EXIT_TRIES
        while tries:
            try:
                spares.write_struct(self.run.spares_path, self.path / "exit.json", record)
                return
            except FileNotFoundError:
                return
            except OSError as error:
                say(f"exit.json: {error}")
                tries -= error.errno not in spares.FULL
                with contextlib.suppress(OSError):
                    self.run.reserve_path.unlink()
                    continue
                time.sleep(1.0)

    def _descends(self, verdict: Verdict) -> bool:
        """Take the next step of the out-of-memory ladder, if there is one and no stop was
        requested.
        """
        if self.stops or self.killing:
            return False
        beat = read_heartbeat(self.path)
        try:
            rung = ladder.descend(
                self.run, self.attempt, verdict, beat.phase if beat else "starting"
            )
        except (OSError, PlanError) as error:
            say(f"ladder: {error}")
            return False
        if rung is not None:
            say(rung.words)
        return rung is not None

    def _serve_requests(self) -> None:
        for request, path in requests.pending(self.run):
            given = self._unwritten.get(path.name)
            if given is not None:
                self._reply(path, given)
                continue
            given = self._decide(request, path)
            # Reply before acting: the reply to a kill is evidence for the verdict.
            self._reply(path, given)
            if request is not None and given.accepted:
                self._act(request, given)

    def _reply(self, path: Path, given: requests.Reply) -> None:
        """Write a reply; on a full disk keep it for later, so that nothing is served twice."""
        try:
            requests.settle(self.run, path, given)
            self._unwritten.pop(path.name, None)
        except OSError as error:
            self._unwritten[path.name] = given
            say(f"{path.name}: {error}")

    def _decide(self, request: requests.Request | None, path: Path) -> requests.Reply:
        if request is None:
            return self._answer(path.stem, "?", "?", accepted=False, note="not a valid request")
        command, who = request.command, request.who
        if request.attempt != self.attempt:
            note = f"meant for attempt {request.attempt}"
            return self._answer(path.stem, command, who, accepted=False, note=note)
        note = self._count_stop(who) if command == "stop" else ""
        return self._answer(path.stem, command, who, note=note)

    def _act(self, request: requests.Request, given: requests.Reply) -> None:
        try:
            if request.command == "kill":
                self._kill()
            elif request.command in ("pause", "continue"):
                self._hold(request.command == "pause")
            elif request.command == "profile":
                files.write_struct(self.path / requests.PROFILE, request)
            elif self.handle is not None and not given.note:
                self.handle.signal(signal.SIGTERM)
        except OSError as error:
            say(f"{request.command}: {error}")

    def _hold(self, on: bool) -> None:
        """Make the trainer wait between two steps, or go on. Raises `OSError`."""
        if on:
            (self.path / "paused").touch(mode=0o600)
        else:
            (self.path / "paused").unlink(missing_ok=True)

    def _count_stop(self, who: str) -> str:
        """Record a stop request. Returns a note if it only repeats another user's recent
        request.
        """
        now = boot_seconds()
        others = [name for name, when in self.stops if now - when < SAME_STOP_SECONDS]
        if others and who not in others:
            return f"already asked by {others[0]}"
        self.stops.append((who, now))
        if self.deadline is None:
            self.deadline = StopDeadline(now, self.durations.patience_seconds())
        else:
            self.deadline.hurry(now, self.durations.patience_seconds(urgent=True))
        return ""

    def _give_up_waiting(self) -> None:
        """The stop took too long: write a kill reply in the supervisor's name, then kill."""
        asked = requests.stop_requests(self.run, self.attempt)
        who = asked[0].who if asked else "someone"
        name = f"{time.time_ns():016x}-{'0' * 10}"
        note = f"the stop asked by {who} took too long"
        with contextlib.suppress(OSError):
            files.write_struct(
                self.run.control_path / "ack" / f"{name}.json",
                self._answer(name, "kill", "the supervisor", note=note),
            )
        self._kill()

    def _kill(self) -> None:
        self.killing = True
        if self.handle is not None:
            self.handle.signal(signal.SIGKILL)

    def _answer(
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
            deadline_boot=self.deadline.at if self.deadline is not None else None,
        )

    def _snapshot(self, final: bool = False) -> None:
        """Update `state.json`, at most once a second."""
        now = boot_seconds()
        if now < self._next_snapshot and not final:
            return
        self._next_snapshot = now + SNAPSHOT_SECONDS
        spares.keep(self.run.spares_path)
        try:
            if self._save is None:
                self._save = snapshot_writer(self.run)
            self._save()
        except Exception:  # noqa: BLE001 - an unreadable event must not end supervision
            say(traceback.format_exc())
            self._save = lambda: None

    def _receipt(self) -> None:
        """Write the estimate and the measurement side by side to `receipt.json`."""
        from memconsole.runs.read.receipt import write_receipt

        try:
            write_receipt(self.run)
        except Exception:  # noqa: BLE001 - an unreadable event must not end supervision
            say(traceback.format_exc())


def snapshot_writer(run: RunDirectory) -> Callable[[], object]:
    """A function that updates `state.json`."""
    from memconsole.runs.read.follow import Follower

    return Follower(run).save_state


def say(text: str) -> None:
    """Write a line to the supervisor's log. A full disk loses it."""
    with contextlib.suppress(OSError):
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
