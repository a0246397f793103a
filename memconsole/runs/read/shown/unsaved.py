"""Says that a run cannot save its state because its disk is full or fails."""

from __future__ import annotations

from memconsole.runs.record.checkpoints.manifest import step_of
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.processes.heartbeat import Heartbeat
from memconsole.runs.record.states import WAIT_DISK


def unsaved_words(run: RunDirectory, beat: Heartbeat | None) -> str:
    """What a run cannot save, and why; empty if it does not wait for its disk."""
    if beat is None or beat.phase != WAIT_DISK:
        return ""
    saved = run.committed_checkpoints()
    first = (step_of(saved[-1]) if saved else 0) + 1
    if beat.step < first:
        return f"cannot record what happens: the disk of {run.path} is full or fails"
    what = f"steps {first:,} to {beat.step:,}" if first < beat.step else f"step {beat.step:,}"
    where = f"the disk of {run.checkpoints_path} is full or fails"
    return f"cannot save {what}: {where}; until it can, they are in memory only"
