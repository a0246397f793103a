"""The small JSON records of a run, typed."""

from __future__ import annotations

import msgspec

from memconsole.runs.record.states import Verdict


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """A process that cannot be mistaken for another one with the same number."""

    pid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat: when it started, in clock ticks since boot; 0 where unknown."""
    boot_id: str
    host: str
    pid_namespace: str = ""


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`run.json`: how the run came to be. Never rewritten."""

    version: int = 1
    id: str
    name: str
    created_wall: float
    host: str
    directory: str
    """Where relative paths of the plan start."""
    python: str
    memconsole: str
    environment: dict[str, str] = {}
    """Settings that change what is computed; secrets are left out."""


class OomCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Kills by the kernel's out-of-memory killer so far; None where it is not counted."""

    host: int | None = None
    cgroup: int | None = None


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`attempt.json`: who runs this attempt, written by the supervisor."""

    attempt: int
    supervisor: Identity
    trainer: Identity | None = None
    started_wall: float
    started_boot: float
    argv: tuple[str, ...] = ()
    oom_kills: OomCounts = OomCounts()
    """When the trainer was about to start."""


class FinalRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`final.json`: the trainer's last word."""

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
    """The supervisor was not the trainer's parent and could not learn its exit code."""
    continues: bool = False
    """The supervisor starts another attempt by itself, see `ladder`."""


class StartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a supervisor tells whoever started it, once, through a pipe: which attempt runs, or why none does."""

    attempt: int = 0
    error: str = ""
