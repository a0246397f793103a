"""Why a run's plan cannot be read: it is damaged, or another version of memconsole wrote it."""

from __future__ import annotations

from typing import NamedTuple

import memconsole
from memconsole.plan.plan import PlanError
from memconsole.runs.record.directory import RunDirectory
from memconsole.sanitize import clean_line


class Unread(NamedTuple):
    """A plan that cannot be read."""

    words: str
    other_version: bool
    """Whether another version of memconsole wrote it, with settings that this one does not have."""


def unread(run: RunDirectory, error: PlanError) -> Unread:
    """Why reading the plan of `run` raised `error`. A damaged file names no setting."""
    record = run.record()
    written = record.memconsole if record is not None else ""
    other = error.key is not None and written not in ("", memconsole.__version__)
    by = f"written by memconsole {written}; this is {memconsole.__version__}: " if other else ""
    return Unread(clean_line(f"the run's plan cannot be read: {by}{error}", 500), other)
