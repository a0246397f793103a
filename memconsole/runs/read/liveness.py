"""Decides the state of a run from its locks and last records."""

from __future__ import annotations

import time
from dataclasses import dataclass

from memconsole.runs.read.verdict import verdict
from memconsole.runs.record import files, identity, locks
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.records import ExitRecord
from memconsole.runs.record.states import LIVE, State, Verdict


@dataclass(frozen=True)
class Liveness:
    """A run's state at one moment."""

    state: State
    attempt: int | None
    supervisor_pid: int | None = None
    trainer_pid: int | None = None
    """0: the lock is held in a process namespace that is not visible from here."""
    gang_held: bool = False
    verdict: Verdict | None = None
    """Why the newest attempt ended; None while it is alive."""

    @property
    def live(self) -> bool:
        return self.state in LIVE


def liveness(run: RunDirectory) -> Liveness:
    """The current state of a run. Never raises. A finished run takes some tens of microseconds."""
    attempt = run.newest_attempt()
    recorded = None
    if attempt is not None:
        recorded = files.read_struct(run.attempt_path(attempt) / "exit.json", ExitRecord)
    if recorded is not None and recorded.continues:
        supervisor = locks.holder(run.supervisor_lock)
        if supervisor is not None:
            return Liveness("starting", attempt, supervisor, None, locks.gang_held(run.gang_lock))
    if recorded is not None and attempt is not None:
        gang = locks.gang_held(run.gang_lock)
        state = "orphaned" if gang else ended_state(recorded.verdict)
        supervisor = locks.holder(run.supervisor_lock)
        return Liveness(state, attempt, supervisor, None, gang, recorded.verdict)
    held = locks.held(run.path)
    if attempt is None:
        state = "starting" if held.supervisor is not None else "lost"
        return Liveness(state, None, held.supervisor, held.trainer, held.gang)
    if held.trainer is not None:
        return Liveness(
            _running_state(run, attempt, held), attempt, held.supervisor, held.trainer, held.gang
        )
    record = run.attempt_record(attempt)
    process = record.trainer if record else None
    alive = process is not None and identity.is_alive(process)
    if held.supervisor is not None:
        # Without a trainer lock the trainer is importing or has just died. If it died, its
        # supervisor writes the verdict within milliseconds.
        begun = files.exists(run.attempt_path(attempt) / "heartbeat")
        state = _running_state(run, attempt, held) if begun else "starting"
        pid = process.pid if alive and process else None
        return Liveness(state, attempt, held.supervisor, pid, held.gang)
    if alive and process is not None:
        return Liveness("unsupervised", attempt, None, process.pid, held.gang)
    why = verdict(run, attempt)
    if held.gang:
        return Liveness("orphaned", attempt, None, None, True, why)
    if files.exists(run.attempt_path(attempt) / "exit.json"):
        # The supervisor wrote its verdict and exited between the two checks.
        return Liveness(ended_state(why), attempt, verdict=why)
    known = files.exists(run.attempt_path(attempt) / "final.json")
    return Liveness(ended_state(why) if known else "lost", attempt, verdict=why)


def settled(run: RunDirectory, seconds: float = 5.0) -> Liveness:
    """The state of a run. If the end is recorded, gives the supervisor a moment to exit."""
    deadline = time.monotonic() + seconds
    while True:
        now = liveness(run)
        leaving = not now.live and not now.gang_held and now.supervisor_pid is not None
        if not leaving or time.monotonic() >= deadline:
            return now
        time.sleep(0.02)


def ended_state(why: Verdict) -> State:
    """The state of a run whose newest attempt ended with this verdict."""
    if why.reason in ("finished", "stopped"):
        return why.reason  # type: ignore[return-value]
    return "lost" if why.reason in ("rebooted", "unknown") else "failed"


def _running_state(run: RunDirectory, attempt: int, held: locks.Held) -> State:
    from memconsole.runs.record.requests import stop_requests

    if held.supervisor is None:
        return "unsupervised"
    return "stopping" if stop_requests(run, attempt) else "running"


def refusal(run: RunDirectory, verdict: Verdict | None) -> str:
    """Why a run trained nothing: the reason its plan was refused. Empty if it was not refused."""
    if verdict is None or verdict.reason != "bad_plan" or run.committed_checkpoints():
        return ""
    return verdict.evidence
