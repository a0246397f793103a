"""Everything before the first step: engine, checkpoint, data, tokenizer, model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from memconsole.plan import catalog
from memconsole.plan.catalog.folders import folder
from memconsole.plan.check import check, check_start
from memconsole.plan.data.left_out import left_out
from memconsole.plan.jobs.on_node import on_node
from memconsole.plan.machine.processor import slower_than_fp32
from memconsole.plan.models.files import TOKENIZER_JSON
from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan, PlanError, printable
from memconsole.plan.training import recipe
from memconsole.plan.training.origin import FINE_TUNES, frozen_at_random, origin, shortly
from memconsole.plan.training.resuming import without_lost_source
from memconsole.runs.act.trainer.attempt import Attempt
from memconsole.runs.read.life.ladder import present_plan, rungs
from memconsole.runs.record import consent as consents
from memconsole.runs.record.checkpoints import base
from memconsole.runs.record.checkpoints.manifest import step_of
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log import events
from memconsole_trainer.backends import engine_factory
from memconsole_trainer.control.controller import Controller, controller_of
from memconsole_trainer.data.stream import BatchShape, BatchStream
from memconsole_trainer.engine import Engine, WeightSource
from memconsole_trainer.host.host_memory import highest_resident
from memconsole_trainer.host.memory_limit import limit_build, limit_steps
from memconsole_trainer.loop import progress, summary
from memconsole_trainer.loop.announcing import Announcer
from memconsole_trainer.loop.fingerprint import counted_settings, fingerprint
from memconsole_trainer.loop.progress import Progress
from memconsole_trainer.loop.ranks import rank_count
from memconsole_trainer.loop.resuming import (
    check_unchanged,
    newest_checkpoint,
    older_fingerprints,
    resumed,
)
from memconsole_trainer.loop.trained_rows import TrainedRows, evaluation_shape, trained_rows
from memconsole_trainer.loop.watch import Watch
from memconsole_trainer.tasks.opening import open_data
from memconsole_trainer.tasks.task import Start, TaskData
from memconsole_trainer.weights.checkpoint import Checkpoints
from memconsole_trainer.weights.huggingface import HuggingFaceWeights
from memconsole_trainer.weights.loaded_checkpoint import LoadedCheckpoint
from memconsole_trainer.weights.trained import starting_weights


@dataclass
class Job:
    """Everything the training loop works with."""

    plan: Plan
    model: Model
    engine: Engine
    data: TaskData
    shape: BatchShape
    """The shape of a training batch."""
    stream: BatchStream
    checkpoints: Checkpoints
    control: Controller
    progress: Progress
    fingerprints: dict[str, str]
    """Hashes of the plan and of what the data must not change in, by name (see `TaskData.fingerprints`)."""
    settings: dict[str, Any]
    """The settings that the plan's fingerprint counts."""
    last_saved: Path | None
    """The checkpoint that the attempt continues from; None for a new run."""
    train_rows: TrainedRows | None = None
    """Training rows whose loss is measured at each evaluation."""

    @property
    def evaluation_shape(self) -> BatchShape:
        """The shape of one evaluation batch."""
        return evaluation_shape(self.plan, self.shape)


class _Plans(NamedTuple):
    """The plan of a run, as it is stored and as an attempt uses it."""

    stored: Plan
    """As the run's directory holds it."""
    by_recipe: frozenset[str]
    """The settings in it that the recipe chose."""
    source: Plan
    """That of this attempt: with its batch sizes, on this machine. It names the source of the weights."""
    plan: Plan
    """The same, with the files that the run has kept in place of sources that are gone."""


def set_up(attempt: Attempt) -> Job:
    """Prepare the attempt and report each phase. Raises `StopRequestedError`, `PlanError`,
    `DataError`, `NoCheckpointError`, `WeightsError` and `MemoryError`."""
    say = Announcer(attempt)
    committed = attempt.run.committed_checkpoints()
    _set_position(attempt, committed[-1] if committed else None)
    say.phase("import")
    plans = _read_plans(attempt.run, has_checkpoint=bool(committed))
    plan = plans.plan
    model = catalog.model(plan)
    engine = engine_factory(plan.backend)(plan, attempt.run.path)
    checkpoints = Checkpoints(attempt.run.checkpoints_path, plan.train.keep_checkpoints)
    stored = newest_checkpoint(attempt, checkpoints, engine.process_group, say)
    _set_position(attempt, stored.path if stored else None)
    _report_start(attempt, plan, engine, stored)
    for warning in _warnings(attempt.run, plans, engine):
        say.warning(warning)

    engine.prepare(plan, model)
    data = _open_data(attempt, plans, model, engine, stored, say)
    shape = BatchShape(
        plan.optimize.accumulation_steps,
        plan.train.batch_size * plan.device.count,
        plan.data.sequence_length,
    )
    fingerprints = {"plan": fingerprint(plans.stored, model), **data.fingerprints}
    settings = counted_settings(plans.stored)
    if stored is None:
        state = _first_progress(plan, data.steps_per_epoch(shape), say)
    else:
        older = older_fingerprints(attempt.run, plans.stored, model)
        state = resumed(stored, fingerprints, older, settings)
        progress.stretch(state, plan)
        check_unchanged(attempt.run, stored, data, say)
    control = controller_of(plan, state.total_steps)
    if stored is not None:
        control.load_state(stored.part("control", dict[str, Any] | None) or {})
    train_rows = trained_rows(plan, data, shape, say.tick)
    job = Job(
        plan=plan,
        model=model,
        engine=engine,
        data=data,
        shape=shape,
        stream=BatchStream(data.rows(), shape, state.data or None),
        checkpoints=checkpoints,
        control=control,
        progress=state,
        fingerprints=fingerprints,
        settings=settings,
        last_saved=stored.path if stored else None,
        train_rows=train_rows,
    )
    try:
        # Fill before the model is built, so that memory of the data is not counted as the model's.
        job.stream.fill(say.tick)
        _build(attempt, job, plans.source, stored, say)
    except BaseException:
        job.stream.close()
        raise
    return job


def _read_plans(run: RunDirectory, *, has_checkpoint: bool) -> _Plans:
    """Read the plan of a run and check it. Raises `PlanError`."""
    stored, by_recipe = run.read_settled_plan()
    source = on_node(present_plan(run))
    plan = base.present(run, source, trained=has_checkpoint)
    if has_checkpoint:
        plan = without_lost_source(plan, run.path / TOKENIZER_JSON)
    check(plan)
    check_start(plan)
    return _Plans(stored, by_recipe, source, plan)


def _open_data(
    attempt: Attempt,
    plans: _Plans,
    model: Model,
    engine: Engine,
    stored: LoadedCheckpoint | None,
    say: Announcer,
) -> TaskData:
    """Open the data, and print what they are and what the recipe chose. Of several processes the leader prepares the
    data; the others wait for it and then find them ready."""
    plan, process_group = plans.plan, engine.process_group
    if process_group.rank:
        process_group.broadcast()
    known = stored.fingerprints if stored else {}
    data = open_data(plan, model, attempt.run.path, say, known)
    if not process_group.rank:
        process_group.broadcast()
    lines = data.description, *left_out(plan, folder), recipe.words(plan, plans.by_recipe)
    print("\n".join(f"  {line}" for line in lines), flush=True)
    return data


def _build(
    attempt: Attempt, job: Job, source: Plan, stored: LoadedCheckpoint | None, say: Announcer
) -> None:
    """Build the model of a job and load its weights, or the state of the checkpoint `stored`. `source` is the plan that
    names the source of the weights."""
    plan, engine, total_steps = job.plan, job.engine, job.progress.total_steps
    say.phase(
        "build",
        f"from {stored.path.name}" if stored is not None else shortly(source),
        total_steps=total_steps,
        steps_per_epoch=job.progress.steps_per_epoch,
    )
    attempt.read_memory = lambda: _memory_in_use(engine)
    weights = starting_weights(plan, job.model)
    limit_build(plan, engine)
    engine.build(plan, job.data.fitted(job.model), total_steps, weights)
    say.phase(
        "build",
        parameters=engine.parameters,
        trainable_parameters=engine.trainable_parameters,
        weights=_weights_origin(source, weights),
    )
    start = Start(
        engine,
        job.evaluation_shape,
        rows=total_steps * job.shape.rows,
        trained=job.train_rows.batches() if job.train_rows is not None else (),
        genuine=plan.model == source.model,
        changed=consents.agreed(attempt.run) is not None,
    )
    say.report_memory = partial(_report_memory, Watch(attempt, engine, job.progress))
    job.data.measure_start(start, say)
    say.report_memory = None
    if stored is not None:
        engine.load_state(stored)
    limit_steps(plan, engine)
    print(f"  Model initialized with {engine.parameters:,} parameters", flush=True)


def _report_memory(watch: Watch, phase: str) -> None:
    """Report the memory of a phase that may take minutes: that in which the reference scores answers."""
    if phase == "reference":
        watch.phase = phase
        watch.report_memory(rate_limited=True)


def _warnings(run: RunDirectory, plans: _Plans, engine: Engine) -> Iterator[str]:
    """Warnings about the plan: smaller micro-batches after memory ran out, random frozen weights, a slow precision."""
    for rung in rungs(run)[-1:]:
        yield rung.words
    if frozen := frozen_at_random(plans.source):
        yield frozen
    precision, backend = plans.plan.optimize.precision, plans.plan.backend
    if engine.device.kind == "cpu" and (slow := slower_than_fp32(precision, backend)):
        yield f"optimize.precision = {precision}: {slow}"


def _first_progress(plan: Plan, steps_per_epoch: int, say: Announcer) -> Progress:
    """The progress of a run at step 0. Warns if its warm-up is longer than half of its steps."""
    state = progress.start(plan, steps_per_epoch)
    warmup = recipe.warmup_steps(plan, state.total_steps)
    if plan.train.warmup_steps not in (None, warmup):
        say.warning(
            f"train.warmup_steps = {plan.train.warmup_steps:,} is more than half of the "
            f"{state.total_steps:,} steps of this run: the warm-up takes {warmup:,}"
        )
    return state


def _weights_origin(plan: Plan, weights: WeightSource) -> str:
    """Where the weights come from, and how many were read. The folder of the model that a resumed run was fine-tuned from
    may be gone."""
    try:
        words = origin(plan).words
    except PlanError:
        return f"{FINE_TUNES} {printable(plan.model.name)}, which is gone"
    return f"{words}: {weights.read}" if isinstance(weights, HuggingFaceWeights) else words


def _memory_in_use(engine: Engine) -> tuple[int | None, int | None, int]:
    """Three numbers of bytes: live tensors once queued work is done, their peak, and the highest resident memory of this
    process."""
    with contextlib.suppress(Exception):  # the queued work may be what failed
        engine.synchronize()
    reading = engine.memory()
    return reading.allocated_bytes, reading.peak_bytes, highest_resident()


def _set_position(attempt: Attempt, checkpoint: Path | None) -> None:
    """Set the attempt's step and checkpoint, so that they are right if it ends during set-up."""
    attempt.step = step_of(checkpoint) if checkpoint else 0
    attempt.checkpoint = str(checkpoint) if checkpoint else None


def _report_start(
    attempt: Attempt, plan: Plan, engine: Engine, stored: LoadedCheckpoint | None
) -> None:
    """Report that the attempt has started: its device, the versions of the libraries, and the step it continues from."""
    lines = engine.platform_lines()
    device = engine.device
    attempt.emit(
        events.Started(
            attempt=attempt.number,
            backend=plan.backend,
            versions={name: str(version) for name, version in engine.versions.items()},
            device_id=device.id,
            device_name=device.name,
            device_kind=device.kind,
            memory_label=device.memory_label,
            platform_lines=tuple(lines),
            resumed_step=stored.step if stored else 0,
            ranks=rank_count(engine),
        ),
        durable=True,
    )
    if stored:
        lines = [*lines, f"Resuming from {stored.path.name}"]
    print(summary.platform(lines), flush=True)
