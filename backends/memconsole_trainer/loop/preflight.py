"""Before the first step, rehearses everything that a run does later, so that failures occur at once.

First a checkpoint of the initial state is written. Then one batch is evaluated and one step is
trained. Finally the state is restored from that checkpoint, bit for bit, so the run is not
affected. If no batch can be longer than the run's first batch, the first step itself is the rehearsed step.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from memconsole.plan.plan import Plan
from memconsole.plan.tasks import task_of
from memconsole.runs.act.trainer.attempt import Attempt
from memconsole.runs.record.failures.failure import cause_of
from memconsole.runs.record.failures.shortfall import lacked_words
from memconsole.runs.record.log import events
from memconsole.units import format_bytes
from memconsole_trainer.data.stream import BatchShape
from memconsole_trainer.engine import Batch
from memconsole_trainer.host import heap
from memconsole_trainer.loop.announcing import StopRequestedError
from memconsole_trainer.loop.saving import Saver
from memconsole_trainer.loop.setup import Job
from memconsole_trainer.loop.watch import Watch
from memconsole_trainer.weights.checkpoint import Checkpoints, FencedError
from memconsole_trainer.weights.loaded_checkpoint import LoadedCheckpoint

PHASE = "preflight"
FOLDER = "preflight"
DISK_WAIT_SECONDS = 60.0
"""How long to wait for room on a full disk before training has begun."""
CHECKPOINT, EVALUATION, STEP = "checkpoint", "evaluation", "training step"
_ROOM = "free some room in the folder of temporary files (TMPDIR) and in that of caches"
_REMEDIES = {
    (CHECKPOINT, "disk"): "free some room there",
    (CHECKPOINT, "out_of_memory"): "free host memory: tensors pass through it when saved",
    (EVALUATION, "disk"): _ROOM,
    (STEP, "disk"): _ROOM,
    (EVALUATION, "out_of_memory"): "lower train.evaluation_batch_size",
    (STEP, "out_of_memory"): (
        "memconsole report lists the settings that need less memory; train.on_out_of_memory = halve halves the "
        "micro-batch by itself"
    ),
}
"""Advice by part and class of failure."""
_DEFAULT_REMEDIES = {
    CHECKPOINT: "a run needs a folder it can write to; see the traceback in the log",
    EVALUATION: "see the traceback in the log; train.preflight = false starts without this check",
    STEP: "see the traceback in the log; train.preflight = false starts without this check",
}


class PreflightError(RuntimeError):
    """One part of the rehearsal failed. The message says which, where, and what helps; `__cause__` is the
    failure.

    If memory ran out, the first line says which memory and how much was requested; the framework's message
    comes last.
    """

    def __init__(self, part: str, where: str, error: Exception) -> None:
        self.part = part
        self.cause = cause_of(error)
        first, *rest = (str(error).strip() or type(error).__name__).splitlines()
        remedy = _REMEDIES.get((part, self.cause), _DEFAULT_REMEDIES[part])
        lines = [f"preflight: {part} ({where}): {first}; {remedy}", *rest]
        if self.cause == "out_of_memory":
            lines = [f"the {part} ({where}) {lacked_words(str(error))}", remedy, first, *rest]
        super().__init__("\n".join(lines))


def preflight(attempt: Attempt, job: Job, watch: Watch, saver: Saver) -> bool:
    """Rehearse a run that has not begun, unless the plan turns this off. Returns whether the first step is the
    rehearsed step, and so must run inside `first_step`.

    Raises `PreflightError`, `StopRequestedError` and `FencedError`.
    """
    if not job.plan.train.preflight or job.progress.step or job.last_saved is not None:
        return False
    folder = attempt.run.path / FOLDER
    first = job.stream.peek(watch.check_stop).batch
    try:
        with watch.outside_training(PHASE):
            stored = _checkpoint(attempt, job, watch, saver, folder)
            if job.data.validation_rows:
                shape = job.evaluation_shape
                with _part(watch, EVALUATION, _size(job.plan, shape)):
                    job.engine.evaluate([job.data.longest(first, shape)])
                if job.engine.device.kind == "cpu":
                    heap.trim()  # as a run does after each evaluation
            longest = job.data.longest(first, job.shape)
            # Other steps than a plain one come with `hybrid`. What compiles should not be timed as a step.
            plain = not job.plan.hybrid.on and not job.plan.optimize.compile
            first_is_longest = plain and first is not None and _are_equal(first, longest)
            if not first_is_longest:
                with _part(watch, STEP, _size(job.plan, job.shape)):
                    job.engine.train_step(longest)
                    job.engine.take_metrics()
            with _part(watch, CHECKPOINT, str(folder)):
                job.engine.load_state(stored)
            job.engine.process_group.all_reduce_max(0)  # every process has read the checkpoint
    finally:
        if not attempt.rank:
            shutil.rmtree(folder, ignore_errors=True)
    return first_is_longest


@contextmanager
def first_step(job: Job, watch: Watch) -> Iterator[None]:
    """A context for the first step of a run, if no step was rehearsed. Failures are reported as in a rehearsal."""
    with _failures_of(watch, STEP, _size(job.plan, job.shape)):
        yield
        job.engine.synchronize()


def _are_equal(one: Batch, other: Batch) -> bool:
    """Whether two batches have the same content."""
    names = one.arrays.keys()
    return names == other.arrays.keys() and all(np.array_equal(one[n], other[n]) for n in names)


def _checkpoint(
    attempt: Attempt, job: Job, watch: Watch, saver: Saver, folder: Path
) -> LoadedCheckpoint:
    """Write the initial state as a checkpoint and read it back. Warns if the disk has no room for
    the next ones."""
    keep = job.plan.train.keep_checkpoints
    with _part(watch, CHECKPOINT, str(folder)):
        if not attempt.rank:
            shutil.rmtree(folder, ignore_errors=True)
        checkpoints = Checkpoints(folder, 1)
        saved = saver.write(checkpoints, 0, DISK_WAIT_SECONDS)
        watch.enter(PHASE, CHECKPOINT)
        stored = checkpoints.newest(watch.warn, watch.check_stop)
        if stored is None:
            raise OSError("what was written is not what was read back")
    # Checkpoints on disk at most: the newest `keep`, the best, and the one being written.
    wanted = (keep + 2) * saved.size_bytes
    free = shutil.disk_usage(folder).free + saved.size_bytes
    if free < wanted:
        watch.warn(
            f"{attempt.run.checkpoints_path}: {format_bytes(free)} free, but the checkpoints of this run will take "
            f"{format_bytes(wanted)}; free some room, or lower train.keep_checkpoints"
        )
    attempt.emit(
        events.Phase(phase=PHASE, detail=f"{CHECKPOINT}: {format_bytes(saved.size_bytes)} written")
    )
    return stored


@contextmanager
def _part(watch: Watch, part: str, where: str) -> Iterator[None]:
    """Announce a part, and wrap its failure in a `PreflightError`."""
    watch.enter(PHASE, part)
    watch.check_stop()
    with _failures_of(watch, part, where):
        yield


@contextmanager
def _failures_of(watch: Watch, part: str, where: str) -> Iterator[None]:
    """Wrap the failure of a part in a `PreflightError`."""
    try:
        yield
    except (StopRequestedError, FencedError, PreflightError):
        raise
    except Exception as error:
        watch.enter(PHASE, part)
        raise PreflightError(part, where, error) from error


def _size(plan: Plan, shape: BatchShape) -> str:
    """The size of a batch in words, such as ``4 x 16 rows of 128 tokens``."""
    times = f"{shape.micro_batches} x " if shape.micro_batches > 1 else ""
    task = task_of(plan)
    of = f" of {shape.sequence_length:,} {task.positions}" if task.units_per_row(plan) > 1 else ""
    return f"{times}{shape.micro_batch} {'rows' if of else task.units}{of}"
