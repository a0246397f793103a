"""Says that a run waits for room on its disk, and what would be lost."""

from __future__ import annotations

from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.heartbeat import Heartbeat
from memconsole.runs.record.manifest import step_of
from memconsole.runs.record.states import WAIT_DISK


def waiting_words(run: RunDirectory, beat: Heartbeat | None) -> str:
    """What a run that cannot write its checkpoint keeps in memory; empty if it does not wait."""
    if beat is None or beat.phase != WAIT_DISK:
        return ""
    saved = run.committed_checkpoints()
    first = (step_of(saved[-1]) if saved else 0) + 1
    what = (
        f"steps {first:,} to {beat.step:,} are" if first < beat.step else f"step {beat.step:,} is"
    )
    return f"waits for room on the disk of {run.checkpoints_path}; {what} in memory only"
