"""What a list of runs shows of one run."""

from __future__ import annotations

import msgspec

from memconsole.runs.record.states import State


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a list of runs."""

    id: str
    name: str
    state: State
    phase: str
    ended_by: str = ""
    """The reason of the verdict; empty while the run lives."""
    step: int
    total_steps: int | None
    loss: float | None
    backend: str
    model: str
    created_wall: float
    duration_seconds: float = 0.0
    """Wall time of all attempts, their starts included."""
    units_per_second: float | None = None
    """The speed: of the newest steps while the run lives, of all its steps once it has ended."""
    unit: str = "token"
    """What the speed counts."""
    best: float | None = None
    """The best validation figure so far, by the task's measure or by the loss."""
    best_by: str = ""
    """The name of that measure."""
    best_step: int | None = None
    peak_bytes: int | None = None
    """The measured peak of live tensor bytes."""
    tags: tuple[str, ...] = ()
    note: str = ""
    unsaved: str = ""
    """What it cannot save and keeps in memory, because its disk is full or fails; usually empty."""
    begun_from: str = ""
    """The id of the run whose weights it started from."""
    evidence: str = ""
    """One sentence that supports `ended_by`."""
    refused: str = ""
    """Why the trainer refused the plan, if nothing was trained."""
    resumable: bool = False
    """Whether it has ended and can be resumed."""
    missing_records: int = 0
    """Records of the event log that could not be read or are not there."""
    job: str = ""
    """Its Slurm job and where it runs or why it waits, while it lives; "" for a run of this machine."""
    waits: str = ""
    """Which run of this machine it starts after, in words; "" if it waits for none."""
    damaged: str = ""
    """Which of the run's files cannot be read, and why; the other figures may be wrong then."""
    other_version: str = ""
    """Why its plan cannot be read, if another version of memconsole wrote it."""

    @property
    def current_phase(self) -> str:
        return self.phase
