"""The states of a run, and the verdict of why it ended."""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal[
    "queued",
    "starting",
    "running",
    "unsupervised",
    "suspended",
    "stopping",
    "finished",
    "stopped",
    "failed",
    "orphaned",
    "lost",
]
"""What the less obvious states mean.

- queued: its job waits in the queue of a cluster, or it starts after another run.
- starting: there is no trainer yet.
- unsupervised: the trainer lives but its supervisor does not, or is suspended.
- suspended: SIGSTOP or Ctrl-Z holds the trainer; SIGCONT, or a request to stop, lets it go on.
- orphaned: the trainer is dead but children of it still hold memory.
- lost: the run died with its supervisor or in a reboot.
"""

LIVE: frozenset[str] = frozenset(
    {"queued", "starting", "running", "unsupervised", "suspended", "stopping"}
)


WAIT_DISK = "wait_disk"
"""The phase of a trainer that cannot write its checkpoint and waits until it can."""

OUT_OF_MEMORY = ("out_of_memory", "host_out_of_memory")
"""Verdict reasons that a plan with less memory could fix."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Why a run ended."""

    reason: str
    """One of finished, stopped, out_of_memory, host_out_of_memory, killed, bad_data, bad_plan, nan,
    disk_full, crashed, fenced, rebooted, unknown.
    """
    evidence: str
    """One sentence that supports the reason."""
    exit_code: int | None = None
    signal: str | None = None
    resumable: bool = False
    """Whether a checkpoint was there to go on from; `may_resume` says whether the run is taken up again."""


def may_resume(state: State, refused: str) -> bool:
    """Whether `launch.resume` takes a run up again: it has ended before its last step, none of its processes is left,
    and its plan was not `refused`. A run that saved nothing begins anew."""
    return state not in LIVE and state not in ("orphaned", "finished") and not refused
