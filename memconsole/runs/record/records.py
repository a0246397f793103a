"""The small JSON records of a run, as types."""

from __future__ import annotations

import msgspec

from memconsole.runs.record.states import Verdict

EXIT, FINAL, ERROR = "exit.json", "final.json", "error.json"
"""Files of an attempt: how it ended, as its supervisor and as its trainer recorded it, and the trainer's error."""
OUTPUT = "out.log"
"""File of an attempt: what its trainer printed."""
PAUSED = "paused"
"""File of an attempt whose trainer is to wait between two steps."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies a process, even if its process id is reused."""

    pid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat: start time in clock ticks since boot; 0 if unknown."""
    boot_id: str
    host: str
    pid_namespace: str = ""


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`run.json`: how the run was created. Never rewritten."""

    version: int = 1
    id: str
    name: str
    created_wall: float
    host: str
    directory: str
    """The folder that relative paths of the plan start from."""
    python: str
    """The Python interpreter, for people who read the file."""
    memconsole: str
    environment: dict[str, str] = {}
    """Variables that change what is computed; secrets are left out."""


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`job.json`: the newest Slurm job of a run. Each resume replaces it by another one."""

    id: str
    """The job's number in Slurm, followed by a semicolon and the cluster's name if there are several clusters."""
    attempts_before: int
    """The newest attempt when it was submitted. The job's own attempts have higher numbers."""
    submitted_wall: float
    cancelled_by: str = ""
    """Who cancelled it before it began."""

    @property
    def words(self) -> str:
        return f"Slurm job {self.id}"


class WaitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`waiting.json`: a run that is to end before this one makes its next attempt."""

    after: str
    """Its id."""
    name: str
    attempts_before: int
    """The newest attempt when the wait began."""
    cancelled_by: str = ""
    """Who ended the wait before the run's turn came."""
    trouble: str = ""
    """Why no attempt could be started when its turn had come."""

    @property
    def words(self) -> str:
        return f"starts after run {self.after} ({self.name})"


class JobPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Part of `attempt.json`: the job that an attempt runs in."""

    id: str
    restarts: int = 0
    """How often Slurm had queued the job again when the attempt began."""
    nodes: str = ""


class OomCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Kills by the kernel's out-of-memory killer so far; None if they are not counted."""

    host: int | None = None
    cgroup: int | None = None


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`attempt.json`: the processes of this attempt. The supervisor writes it."""

    attempt: int
    supervisor: Identity
    trainer: Identity | None = None
    started_wall: float
    argv: tuple[str, ...] = ()
    oom_kills: OomCounts = OomCounts()
    """The counts just before the trainer started."""
    job: JobPlace | None = None
    """The job it runs in, if a scheduler started it."""


class FinalRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`final.json`: the trainer's last record."""

    exit_code: int
    step: int
    reason: str
    checkpoint: str | None = None
    time_wall: float = 0.0


class ErrorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`error.json`: the exception that ended an attempt. `cause` as in `events.Error`."""

    cause: str
    type: str
    message: str
    traceback: str = ""
    step: int = 0
    time_wall: float = 0.0


class ExitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`exit.json`: the supervisor's verdict."""

    verdict: Verdict
    time_wall: float
    adopted: bool = False
    """The supervisor was not the trainer's parent and could not learn its exit code. Recorded for
    people who read the file."""
    continues: bool = False
    """The supervisor starts another attempt by itself, see `ladder`."""
    requeues: bool = False
    """True if its job is queued again and will begin another attempt."""


class StartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The supervisor's one message to the process that started it, sent through a pipe.

    It names the attempt that runs, or says why none does.
    """

    attempt: int = 0
    error: str = ""
