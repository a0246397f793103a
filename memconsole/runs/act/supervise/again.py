"""Whether a run on several devices begins again by itself after one of its processes was killed."""

from __future__ import annotations

import msgspec

from memconsole.plan.plan import PlanError
from memconsole.plan.processes import processes
from memconsole.runs.record import files
from memconsole.runs.record.checkpoints.manifest import step_of
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.states import Verdict

FILE = "again.json"
TRIES = 3
"""Attempts in a row that may begin from the same checkpoint."""


class Again(msgspec.Struct, frozen=True, kw_only=True):
    """How often the run has begun again from one checkpoint."""

    step: int
    """The step of the checkpoint; 0 without one."""
    times: int


def is_several(run: RunDirectory) -> bool:
    """Whether the run trains in several processes."""
    try:
        return processes(run.read_plan()) > 1
    except (OSError, PlanError):
        return False


def begins_again(run: RunDirectory, verdict: Verdict) -> bool:
    """Record and return whether the next attempt begins by itself.

    It does if a signal ended a process of a run on several devices, which in JAX may be its only one, unless
    that has happened `TRIES` times without a new checkpoint. A process that ended with an error of its own is
    not tried again, because it would fail again. Raises `OSError` and `PlanError`.
    """
    if verdict.reason not in ("killed", "crashed") or verdict.signal is None:
        return False
    if run.read_plan().device.count == 1:
        return False
    saved = run.committed_checkpoints()
    step = step_of(saved[-1]) if saved else 0
    before = files.read_struct(run.path / FILE, Again)
    times = before.times + 1 if before is not None and before.step == step else 1
    if times > TRIES:
        return False
    files.write_struct(run.path / FILE, Again(step=step, times=times))
    return True
