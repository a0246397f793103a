"""Decides the state of a run from its locks and last records, and for a job that these do not show, from Slurm."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from memconsole.runs.read.life import slurm
from memconsole.runs.read.life.job_verdict import before_it_began, without_record
from memconsole.runs.read.life.verdict import verdict
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.failures import failed_process
from memconsole.runs.record.processes import identity, locks
from memconsole.runs.record.records import EXIT, FINAL, Identity, JobRecord, WaitRecord
from memconsole.runs.record.states import LIVE, State, Verdict

SUBMITTED_SECONDS = 15.0
"""How long an answer of Slurm may be older than the newest job."""
RECORD_SECONDS = 1.5
"""How long a living supervisor may take to record the end of a trainer that has died."""


@dataclass(frozen=True)
class Liveness:
    """A run's state at one moment."""

    state: State
    attempt: int | None
    supervisor_pid: int | None = None
    """0: the lock is held in a process namespace that is not visible from here."""
    gang_held: bool = False
    verdict: Verdict | None = None
    """Why the newest attempt ended; None while it is alive."""
    elsewhere: bool = False
    """Whether it is alive on another machine, so that its processes and clock cannot be seen here."""
    job: str = ""
    """The state of its Slurm job in words, while it lives; "" for a run of this machine."""
    waits: str = ""
    """Which run of this machine it starts after, in words; "" if it waits for none."""

    @property
    def live(self) -> bool:
        return self.state in LIVE


def liveness(run: RunDirectory) -> Liveness:
    """The current state of a run. Never raises. A finished run takes some tens of microseconds.

    If the trainer has just died, waits up to `RECORD_SECONDS` for its supervisor to record it. Asks
    Slurm only about a job whose end or life the run's own files do not show.
    """
    # What it waits for is read before its attempts, so that an attempt that begins meanwhile is seen.
    job, wait = run.job(), run.waiting()
    here = _here(run)
    if job is not None:
        return _of_job(run, job, here)
    begun = wait is None or (here.attempt or 0) > wait.attempts_before
    return here if wait is None or begun else _of_wait(wait, here)


def _of_wait(wait: WaitRecord, here: Liveness) -> Liveness:
    """The state of a run that starts, or was to start, after another run. `here` is what files and locks show."""
    attempt, supervisor = here.attempt, here.supervisor_pid
    if wait.cancelled_by and attempt is not None:
        return here  # how its last attempt ended
    if wait.cancelled_by:
        words = f"cancelled by {wait.cancelled_by} before it began"
        why = Verdict(reason="stopped", evidence=words, resumable=True)
    elif wait.trouble:
        why = Verdict(reason="crashed", evidence=wait.trouble, resumable=True)
    elif supervisor is None:
        words = f"nothing waits any more until run {wait.after} ({wait.name}) has ended"
        why = Verdict(reason="unknown", evidence=words, resumable=True)
    else:
        suspended = supervisor and identity.is_suspended(supervisor)
        waits = f"{wait.words}; its supervisor is suspended" if suspended else wait.words
        return Liveness("queued", attempt, supervisor_pid=supervisor, waits=waits)
    return replace(_ended(attempt, why), supervisor_pid=supervisor)


def _of_job(run: RunDirectory, job: JobRecord, here: Liveness) -> Liveness:
    """The state of a run that a Slurm job trains. `here` is what files and locks show."""
    attempt, number = here.attempt, here.attempt or 0
    begun = number > job.attempts_before
    record = run.attempt_record(number) if begun else None
    place = record.job if record else None
    on = f"{job.words} on {place.nodes}" if place and place.nodes else job.words
    if begun and here.live:
        away = record is not None and not identity.is_visible(record.supervisor)
        return replace(here, elsewhere=away, job=on)
    end = run.exit_record(number) if begun else None
    if begun and (here.state in ("finished", "orphaned") or (end and job.cancelled_by)):
        return here
    if job.cancelled_by and not begun:
        return _ended(attempt, before_it_began(run, job, None))
    jobs = slurm.QUEUE.jobs()
    found = jobs.job(job.id)
    if found is None:
        unknown = f"{on}: {jobs.trouble}"
        if not begun or (end and end.requeues):
            return Liveness("queued", attempt, supervisor_pid=0, job=unknown)
        return here if end else _away(run, number, unknown)
    if found.waits:
        return Liveness(
            "queued", attempt, supervisor_pid=0, job=f"{job.words} {slurm.waiting_words(found)}"
        )
    if found.active and (not begun or found.restarts > (place.restarts if place else 0)):
        words = f"{job.words} begins on {found.nodes}"
        return Liveness("starting", attempt, supervisor_pid=0, job=words)
    if found.active and not end:
        return _away(run, number, on)
    if found.active and end and end.requeues:
        return Liveness(
            "queued", attempt, supervisor_pid=0, job=f"{job.words} goes back to the queue"
        )
    if end:
        return here
    if begun:
        return _ended(attempt, without_record(run, number, job, found))
    if found is slurm.GONE and time.time() - job.submitted_wall < SUBMITTED_SECONDS:
        return Liveness("queued", attempt, supervisor_pid=0, job=f"{job.words} was submitted")
    return _ended(attempt, before_it_began(run, job, found))


def _ended(attempt: int | None, why: Verdict) -> Liveness:
    return Liveness(ended_state(why), attempt, verdict=why)


def _away(run: RunDirectory, attempt: int, words: str) -> Liveness:
    """A run that trains on another machine, whose processes cannot be seen from here."""
    unseen = locks.Holders(supervisor=0, trainer=0, gang=True)
    state = _running_state(run, attempt, unseen)
    return Liveness(state, attempt, supervisor_pid=0, gang_held=True, elsewhere=True, job=words)


def _here(run: RunDirectory) -> Liveness:
    """What locks and records show on this machine."""
    attempt = run.newest_attempt()
    recorded = None if attempt is None else run.exit_record(attempt)
    if recorded is not None:
        gang, supervisor = locks.gang_held(run.gang_lock), locks.holder(run.supervisor_lock)
        if recorded.continues and supervisor is not None:
            return Liveness("starting", attempt, supervisor_pid=supervisor, gang_held=gang)
        state = "orphaned" if gang else ended_state(recorded.verdict)
        return Liveness(
            state, attempt, supervisor_pid=supervisor, gang_held=gang, verdict=recorded.verdict
        )
    held = locks.held(run.path)
    if attempt is None:
        state = "starting" if held.supervisor is not None else "lost"
        return Liveness(state, None, supervisor_pid=held.supervisor, gang_held=held.gang)
    if held.trainer is not None:
        state = _running_state(run, attempt, held)
        return Liveness(state, attempt, supervisor_pid=held.supervisor, gang_held=held.gang)
    record = run.attempt_record(attempt)
    process = record.trainer if record else None
    alive = process is not None and identity.is_alive(process)
    if held.supervisor is not None:
        # Without a trainer lock the trainer is importing, is about to end, or has died.
        begun = files.exists(run.attempt_path(attempt) / "heartbeat")
        unseen = process is not None and not identity.is_visible(process)
        if alive or unseen or (process is None and not begun):
            state = _running_state(run, attempt, held, process) if begun else "starting"
            return Liveness(state, attempt, supervisor_pid=held.supervisor, gang_held=held.gang)
        return _unrecorded(run, attempt, held)
    if alive and process is not None:
        state = _running_state(run, attempt, held, process)
        return Liveness(state, attempt, gang_held=held.gang)
    why = verdict(run, attempt)
    if held.gang:
        return Liveness("orphaned", attempt, gang_held=True, verdict=why)
    # The supervisor may have written exit.json and exited since it was read above.
    path = run.attempt_path(attempt)
    known = any(files.exists(path / name) for name in (EXIT, FINAL))
    known = known or failed_process.kept(path / "processes") is not None
    return _ended(attempt, why) if known else Liveness("lost", attempt, verdict=why)


def _unrecorded(run: RunDirectory, attempt: int, held: locks.Holders) -> Liveness:
    """The state of a run whose trainer is dead while its supervisor is alive and has not recorded the end.

    A supervisor records an end within milliseconds, unless it is suspended or its disk is full.
    """
    path, supervisor = run.attempt_path(attempt), held.supervisor
    deadline = time.monotonic() + RECORD_SECONDS
    while (
        supervisor
        and not files.exists(path / EXIT)
        and not identity.is_suspended(supervisor)
        and locks.holder(run.supervisor_lock) == supervisor
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    recorded = run.exit_record(attempt)
    if recorded is not None and recorded.continues:
        return Liveness("starting", attempt, supervisor_pid=supervisor, gang_held=held.gang)
    why = verdict(run, attempt, supervisor or None)
    gang = locks.gang_held(run.gang_lock)
    state = "orphaned" if gang else ended_state(why)
    return Liveness(state, attempt, supervisor_pid=supervisor, gang_held=gang, verdict=why)


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


def _running_state(
    run: RunDirectory, attempt: int, held: locks.Holders, process: Identity | None = None
) -> State:
    from memconsole.runs.record.requests import stop_requests

    trainer = held.trainer or (process.pid if process else None)
    if trainer and any(map(identity.is_suspended, _training(run, attempt, trainer))):
        return "suspended"
    if held.supervisor is None or (held.supervisor and identity.is_suspended(held.supervisor)):
        return "unsupervised"
    return "stopping" if stop_requests(run, attempt) else "running"


def _training(run: RunDirectory, attempt: int, trainer: int) -> list[int]:
    """The processes that train: `trainer`, and the others if another process started it together with them."""
    record = run.attempt_record(attempt)
    launcher = record.trainer if record else None
    if launcher is None or launcher.pid == trainer or not identity.is_alive(launcher):
        return [trainer]
    return [trainer, *identity.children(launcher.pid)]


def refusal(run: RunDirectory, verdict: Verdict | None) -> str:
    """Why a run trained nothing: the reason its plan was refused. Empty if it was not refused."""
    if verdict is None or verdict.reason != "bad_plan" or run.committed_checkpoints():
        return ""
    return verdict.evidence
