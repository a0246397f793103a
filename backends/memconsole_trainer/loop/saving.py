"""Saves a run's state, and waits for room if the disk is full."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import msgspec

from memconsole.runs.act.trainer.attempt import Attempt
from memconsole.runs.record import consent
from memconsole.runs.record.log import events
from memconsole.runs.record.spares import FULL
from memconsole.runs.record.states import WAIT_DISK
from memconsole.units import format_duration
from memconsole_trainer.loop.progress import Progress
from memconsole_trainer.loop.setup import Job
from memconsole_trainer.loop.watch import Watch
from memconsole_trainer.process_group import OtherProcessError
from memconsole_trainer.weights import checkpoint

RETRY_SECONDS = 2.0
"""Pause before a checkpoint that could not be written is tried again."""
_GATHER, _SAVED, _FAILED = "gather", "saved", "failed"
"""Messages that the first of several processes sends to the others while it saves."""
_TEMPORARY = FULL | {errno.EIO, errno.EROFS}
"""Disk errors that the user may fix while the run waits with its state in memory."""


class Saver:
    """Commits checkpoints of one job."""

    def __init__(self, attempt: Attempt, job: Job, watch: Watch) -> None:
        self._attempt = attempt
        self._job = job
        self._watch = watch
        self.last: Path | None = job.last_saved
        """The newest checkpoint."""
        self._saved = _position(job.progress) if job.last_saved else None
        self._warned_of_changed_data = False
        self._last_time = time.monotonic()
        """When the last checkpoint was committed, or this attempt began."""

    def due(self, minutes: float) -> bool:
        """Whether a crash would lose more than `minutes`; 0: never."""
        return 0 < 60 * minutes <= time.monotonic() - self._last_time

    def save(self) -> None:
        """Commit a checkpoint, unless the last one has this state already or no step was taken.

        If the disk is full or fails, waits until it can be written; a stop request does not end the
        wait. Raises other OSErrors, `FencedError`, and `NotFiniteError` if a tensor holds NaN or
        infinity.
        """
        p, job = self._job.progress, self._job
        if p.step == 0 or self._saved == _position(p):
            return
        with self._watch.outside_training("checkpoint"):
            self._watch.clock.count()
            saved = self.write(job.checkpoints, p.step)
            self.last, self._saved, self._last_time = saved.path, _position(p), time.monotonic()
            if job.engine.process_group.rank:
                return
            job.checkpoints.retain()
            consent.end(self._attempt.run)
            self._warn_of_changed_data()
            self._attempt.keep_reserve()
        self._attempt.emit(
            events.Checkpoint(
                step=p.step,
                path=str(saved.path),
                size_bytes=saved.size_bytes,
                seconds=saved.seconds,
            ),
            durable=True,
        )

    def _warn_of_changed_data(self) -> None:
        """Warn once if data that was read a second time was not the same."""
        if self._job.data.hashes.changed and not self._warned_of_changed_data:
            self._warned_of_changed_data = True
            self._watch.warn(
                "the data has changed on disk during this run: reading it again gave other content "
                "than before"
            )

    def write(
        self, checkpoints: checkpoint.Checkpoints, step: int, patience_seconds: float | None = None
    ) -> checkpoint.Saved:
        """Commit the current state to `checkpoints`. Raises what `save` raises.

        With `patience_seconds`, waits no longer than that for room on a full disk, raises its OSError
        then, and raises `StopRequestedError` on a stop request.

        Of several processes, the first one writes. The others gather the tensors with it, and raise
        `OtherProcessError` if it fails.
        """
        process_group = self._job.engine.process_group
        if process_group.rank:
            return self._gather(checkpoints, step)
        try:
            saved = self._write(checkpoints, step, patience_seconds)
        except BaseException:
            process_group.broadcast(_FAILED)
            raise
        process_group.broadcast(_SAVED)
        return saved

    def _gather(self, checkpoints: checkpoint.Checkpoints, step: int) -> checkpoint.Saved:
        """Gather the tensors that the first process writes."""
        process_group = self._job.engine.process_group
        while (message := process_group.broadcast()) == _GATHER:
            for _ in self._job.engine.state():
                pass
        if message == _FAILED:
            raise OtherProcessError("the process that writes checkpoints has failed")
        return checkpoint.Saved(checkpoints.path_of(step), 0, 0.0)

    def _write(
        self, checkpoints: checkpoint.Checkpoints, step: int, patience_seconds: float | None
    ) -> checkpoint.Saved:
        began, waited = time.monotonic(), False
        while True:
            try:
                saved = self._commit(checkpoints, step)
            except OSError as error:
                if error.errno not in (_TEMPORARY if patience_seconds is None else FULL):
                    raise
                if patience_seconds is not None:
                    if time.monotonic() >= began + patience_seconds:
                        raise
                    self._watch.check_stop()
                self._announce_wait(error, waited, patience_seconds)
                waited = True
                self._sleep()
                continue
            if waited:
                seconds = time.monotonic() - began
                self._watch.clock.skip()
                self._watch.warn(
                    f"the checkpoint of step {step:,} is written, after {seconds:.0f} s"
                )
            return saved

    def _commit(self, checkpoints: checkpoint.Checkpoints, step: int) -> checkpoint.Saved:
        p, job = self._job.progress, self._job
        state = {
            "progress": msgspec.to_builtins(p),
            "validation_loss": p.validation_loss if p.validation_step == p.step else None,
            "scores": msgspec.to_builtins(p.scores if p.validation_step == p.step else ()),
            "fingerprints": job.fingerprints,
            "settings": job.settings,
            "read": job.data.hashes.state(),
            "control": job.control.state(),
            "architecture": msgspec.to_builtins(job.model),
            "versions": {n: str(v) for n, v in job.engine.versions.items()},
        }
        job.engine.process_group.broadcast(_GATHER)
        tensors = job.engine.state()
        try:
            return checkpoints.save(
                step,
                tensors,
                state,
                self._attempt.is_newest,
                lambda written: self._attempt.progress(self._watch.phase, step, written),
                expected_bytes=4 * job.engine.trainable_parameters,
            )
        finally:
            if job.engine.process_group.size > 1:
                for _ in tensors:  # the other processes gather the rest, whatever has failed here
                    pass

    def _announce_wait(self, error: OSError, waited: bool, patience_seconds: float | None) -> None:
        """Say once why a checkpoint cannot be written, and what follows."""
        if not waited:
            self._watch.enter(WAIT_DISK, str(error.strerror))
            follows = "the run waits and keeps its state in memory"
            if patience_seconds is not None:
                follows = f"the run ends if it cannot be written within {format_duration(patience_seconds)}"
            self._watch.warn(f"a checkpoint cannot be written ({error.strerror}); {follows}")

    def _sleep(self) -> None:
        end = time.monotonic() + RETRY_SECONDS
        while time.monotonic() < end:
            self._watch.heartbeat()
            time.sleep(0.2)


def _position(progress: Progress) -> tuple[int, int, int]:
    """What differs between two states that are saved."""
    return progress.step, progress.epoch, progress.validation_step
