"""Saves a run's state, and waits for room if the disk is full."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import msgspec

from memconsole.runs.act.attempt import Attempt
from memconsole.runs.record import consent, events
from memconsole_trainer.loop.progress import Progress
from memconsole_trainer.loop.setup import Job
from memconsole_trainer.loop.watch import Watch
from memconsole_trainer.weights import checkpoint

DISK_WAIT_SECONDS = 1800.0
"""How long to wait for room on a full disk while the state stays in memory."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Saver:
    """Commits checkpoints of one job."""

    def __init__(self, attempt: Attempt, job: Job, watch: Watch) -> None:
        self._attempt = attempt
        self._job = job
        self._watch = watch
        self.last: Path | None = job.last_saved
        self._saved = _place(job.progress) if job.last_saved else None
        self._told_changed = False

    def save(self) -> None:
        """Commit a checkpoint, unless the last one has this state already or no step was taken.

        Waits for room on a full disk. Raises OSError if there is none in time or a stop is
        requested, `FencedError`, and `NotFiniteError` if a tensor holds NaN or infinity.
        """
        p, job = self._job.progress, self._job
        if p.step == 0 or self._saved == _place(p):
            return
        with self._watch.aside("checkpoint"):
            self._watch.count()
            saved = self.write(job.checkpoints, p.step, DISK_WAIT_SECONDS)
            self.last, self._saved = saved.path, _place(p)
            job.checkpoints.retain()
            consent.end(self._attempt.run)
            self._tell_changed()
        self._attempt.emit(
            events.Checkpoint(
                step=p.step,
                path=str(saved.path),
                size_bytes=saved.size_bytes,
                seconds=saved.seconds,
            ),
            durable=True,
        )

    def _tell_changed(self) -> None:
        """Warn once if data that was read a second time was not the same."""
        if self._job.data.hashes.changed and not self._told_changed:
            self._told_changed = True
            self._watch.warn(
                "the data has changed on disk during this run: what was read again is not what was "
                "read before"
            )

    def write(
        self, checkpoints: checkpoint.Checkpoints, step: int, patience_seconds: float
    ) -> checkpoint.Saved:
        """Commit the current state to `checkpoints`, waiting for room if needed. Raises what `save`
        raises."""
        deadline = time.monotonic() + patience_seconds
        while True:
            try:
                return self._commit(checkpoints, step)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                self._wait_for_room(error, deadline)

    def _commit(self, checkpoints: checkpoint.Checkpoints, step: int) -> checkpoint.Saved:
        p, job = self._job.progress, self._job
        state = {
            "progress": msgspec.to_builtins(p),
            "validation_loss": p.validation_loss if p.validation_step == p.step else None,
            "fingerprints": job.fingerprints,
            "read": job.data.hashes.state(),
            "control": job.control.state(),
            "architecture": msgspec.to_builtins(job.model),
            "versions": {n: str(v) for n, v in job.engine.versions.items()},
        }
        return checkpoints.save(
            step,
            job.engine.state(),
            state,
            self._attempt.is_newest,
            lambda written: self._attempt.progress(self._watch.phase, step, written),
            expected_bytes=4 * job.engine.trainable_parameters,
        )

    def _wait_for_room(self, error: OSError, deadline: float) -> None:
        """Sleep for two seconds. Raises `error` at the deadline or on a stop request."""
        if self._watch.phase != "wait_disk":
            self._watch.enter("wait_disk", str(error.strerror))
            self._watch.warn(
                f"the disk is full ({error.strerror}); waiting for room to save a checkpoint"
            )
        for _ in range(10):
            if time.monotonic() >= deadline or self._attempt.stop_requested:
                raise error
            self._watch.beat()
            time.sleep(0.2)


def _place(progress: Progress) -> tuple[int, int, int]:
    return progress.step, progress.epoch, progress.validation_step
