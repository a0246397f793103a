"""The exit codes of the commands, other than those of errors."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    NOT_EXACT = 1
    """`--exact` found no exact numbers."""
    BAD_PLAN = 2
    """The trainer refused the plan."""
    DOES_NOT_FIT = 3
    RESUMABLE = 75
    """The run was stopped, and can be resumed."""
