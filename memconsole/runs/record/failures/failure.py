"""Classifies the failure that an exception reports."""

from __future__ import annotations

import enum
import errno
import re
from typing import NamedTuple

from memconsole.plan.plan import PlanError
from memconsole.runs.record.spares import FULL


class ExitCode(enum.IntEnum):
    """The exit codes by which a trainer says why it ended."""

    DONE = 0
    FAILED = 1
    STOPPED = 75
    """Stopped on request; resumable."""
    FENCED = 76
    """A newer attempt owns the run."""
    BAD_DATA = 77
    BAD_PLAN = 78
    DISK_FULL = 79
    NOT_FINITE = 80


class Failure(NamedTuple):
    """One class of failure in the words of each record."""

    cause: str
    """As in `events.Error.cause`."""
    reason: str
    """As in `Verdict.reason`."""
    code: ExitCode
    words: str = ""
    """What an exit code of its own says if no error was recorded."""


_FAILURES = (
    Failure("bad_data", "bad_data", ExitCode.BAD_DATA, "the data cannot be read"),
    Failure("bad_plan", "bad_plan", ExitCode.BAD_PLAN, "the plan cannot be trained"),
    Failure("disk", "disk_full", ExitCode.DISK_FULL, "the disk stayed full"),
    Failure("nan", "nan", ExitCode.NOT_FINITE, "the loss or a gradient was not finite"),
    Failure("fenced", "fenced", ExitCode.FENCED, "a newer attempt or another trainer owns the run"),
    Failure("out_of_memory", "out_of_memory", ExitCode.FAILED),
)
_CRASHED = Failure("crashed", "crashed", ExitCode.FAILED)
_OF_CAUSE = {one.cause: one for one in _FAILURES}
_OF_CODE = {int(one.code): one for one in _FAILURES if one.code is not ExitCode.FAILED}


_OUT_OF_MEMORY = (
    "out of memory",
    "resource_exhausted",
    "defaultcpuallocator: can't allocate",
    "cannot allocate memory",
    "unable to allocate",
    "cublas_status_alloc_failed",
    "ynnpack operation failed",  # XLA on a CPU, when it cannot allocate its buffers
)
_DIED_OF_MEMORY = re.compile(
    "|".join(
        (
            *map(re.escape, _OUT_OF_MEMORY),
            r"std::bad_alloc",
            r"memory allocation of \d+ bytes failed",  # Rust: tokenizers, safetensors
        )
    ),
    re.IGNORECASE,
)
"""What libraries print before they end the process themselves."""
_DISK_FULL = ("no space left on device", "disk quota exceeded", "not enough disk space")
"""What a library, a compiler or another program reports of a full disk, in an error without the number of one."""
_DEVICE_LOST = (
    "gpu is lost",
    "device lost",
    "fallen off the bus",
    "uncorrectable ecc",
    "nvml_error",
)


def cause_of(exception: BaseException) -> str:
    """The class of failure, as in `events.Error.cause`; looks through the chain of causes.

    One of out_of_memory, bad_data, bad_plan, nan, disk, device_lost, crashed. An exception may name
    its own in an attribute `cause`.
    """
    seen: set[int] = set()
    error: BaseException | None = exception
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        cause = _cause_of_one(error)
        if cause is not None:
            return cause
        error = error.__cause__ or error.__context__
    return "crashed"


def _cause_of_one(error: BaseException) -> str | None:
    named = getattr(error, "cause", None)
    if isinstance(named, str) and named:
        return named
    if isinstance(error, PlanError):
        return "bad_plan"
    message = str(error).lower()
    if isinstance(error, OSError) and error.errno in FULL:
        return "disk"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out_of_memory"
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "out_of_memory"
    if any(sign in message for sign in _OUT_OF_MEMORY):
        return "out_of_memory"
    if any(sign in message for sign in _DISK_FULL):
        return "disk"
    if any(sign in message for sign in _DEVICE_LOST):
        return "device_lost"
    return None


def words_of(exception: BaseException) -> str:
    """What an exception says. Of a file for which the disk has no room: which file it is, and what to do."""
    if isinstance(exception, OSError) and exception.errno in FULL and exception.filename:
        return f"{exception.filename} cannot be written: {exception.strerror}; free some room there"
    return str(exception)


def words_of_memory(output: str) -> str:
    """The last line of a trainer's output that reports a lack of memory; empty if there is none."""
    for line in reversed(output.splitlines()):
        if _DIED_OF_MEMORY.search(line):
            return line.strip()
    return ""


def failure_of(cause: str) -> Failure:
    """The failure with this cause; a crash for any other."""
    return _OF_CAUSE.get(cause, _CRASHED)


def failure_of_code(code: int) -> Failure | None:
    """The failure that alone has this exit code; None if none has."""
    return _OF_CODE.get(code)
