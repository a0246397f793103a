"""Everything before the first step: engine, checkpoint, data, tokenizer, model."""

from __future__ import annotations

import binascii
import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memconsole.plan import catalog
from memconsole.plan.catalog.folders import folder
from memconsole.plan.check import check, check_start
from memconsole.plan.data.left_out import left_out
from memconsole.plan.jobs.on_node import on_node
from memconsole.plan.machine.processor import slower_than_fp32
from memconsole.plan.models.files import TOKENIZER_JSON
from memconsole.plan.models.model import Model
from memconsole.plan.plan import Plan, PlanError, get, printable, replace
from memconsole.plan.training import recipe
from memconsole.plan.training.origin import FINE_TUNES, frozen_at_random, origin, shortly
from memconsole.plan.training.resuming import CHANGEABLE, ELSEWHERE, LATER, without_lost_source
from memconsole.runs.act.trainer.attempt import Attempt
from memconsole.runs.read.life.ladder import present_plan, rungs
from memconsole.runs.record import consent as consents
from memconsole.runs.record.checkpoints import base, verified
from memconsole.runs.record.checkpoints.manifest import damaged, step_of
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log import events
from memconsole_trainer.backends import engine_factory
from memconsole_trainer.control.controller import Controller, controller_of
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.stream import BatchShape, BatchStream
from memconsole_trainer.engine import Engine, WeightSource
from memconsole_trainer.gang import Gang
from memconsole_trainer.host.host_memory import highest_resident
from memconsole_trainer.host.memory_limit import limit_build, limit_steps
from memconsole_trainer.loop import progress, summary
from memconsole_trainer.loop.announcing import Announcer
from memconsole_trainer.loop.progress import Progress
from memconsole_trainer.loop.ranks import rank_count
from memconsole_trainer.loop.trained_rows import TrainedRows, evaluation_shape, trained_rows
from memconsole_trainer.tasks.opening import open_data
from memconsole_trainer.tasks.task import Start, TaskData, Teller
from memconsole_trainer.weights.checkpoint import Checkpoints, LoadedCheckpoint
from memconsole_trainer.weights.huggingface import HuggingFaceWeights
from memconsole_trainer.weights.trained import starting_weights


class NoCheckpointError(Exception):
    """The run has checkpoints, and none of them can be used."""

    cause = "bad_data"


@dataclass
class Job:
    """Everything the training loop works with."""

    plan: Plan
    model: Model
    engine: Engine
    data: TaskData
    shape: BatchShape
    stream: BatchStream
    checkpoints: Checkpoints
    control: Controller
    progress: Progress
    fingerprints: dict[str, str]
    settings: dict[str, Any]
    """Those that the fingerprint of the plan counts."""
    last_saved: Path | None
    trained: TrainedRows | None = None
    """Training rows that are measured at each evaluation."""

    @property
    def evaluation_shape(self) -> BatchShape:
        """The shape of one evaluation batch."""
        return evaluation_shape(self.plan, self.shape)


def set_up(attempt: Attempt) -> Job:
    """Prepare the attempt and report each phase. Raises `StopRequestedError`, `PlanError`,
    `DataError`, `NoCheckpointError`, `WeightsError` and `MemoryError`."""
    say = Announcer(attempt)
    committed = attempt.run.committed_checkpoints()
    _at(attempt, committed[-1] if committed else None)
    say.phase("import")
    picked, by_recipe = attempt.run.read_settled_plan()
    plan = on_node(present_plan(attempt.run))
    begun = plan
    plan = base.present(attempt.run, plan, trained=bool(committed))
    if committed:
        plan = without_lost_source(plan, attempt.run.path / TOKENIZER_JSON)
    check(plan)
    check_start(plan)
    model = catalog.model(plan)
    engine = engine_factory(plan.backend)(plan, attempt.run.path)
    checkpoints = Checkpoints(attempt.run.checkpoints_path, plan.train.keep_checkpoints)
    gang = engine.gang
    stored = _stored(attempt, checkpoints, gang, say)
    _at(attempt, stored.path if stored else None)
    _started(attempt, plan, engine, stored)
    for words in _doubts(attempt.run, begun, plan, engine):
        say.warning(words)

    known = stored.fingerprints if stored else {}
    if gang.rank:
        gang.tell()  # the leader has prepared the data; the others wait here and then find it ready
    engine.prepare(plan, model)
    data = open_data(plan, model, attempt.run.path, say, known)
    if not gang.rank:
        gang.tell()
    training = recipe.words(plan, by_recipe)
    files = left_out(plan, folder)
    print("\n".join(f"  {words}" for words in (data.description, *files, training)), flush=True)
    fingerprints = {"plan": progress.fingerprint(picked, model), **data.fingerprints}
    settings = progress.counted_settings(picked)
    shape = BatchShape(
        plan.optimize.accumulation_steps,
        plan.train.batch_size * plan.device.count,
        plan.data.sequence_length,
    )
    if stored is None:
        state = _beginning(plan, data.steps_per_epoch(shape), say)
    else:
        older = _older_fingerprints(attempt.run, picked, model)
        state = resumed(stored, fingerprints, older, settings)
        progress.stretch(state, plan)
        check_unchanged(attempt.run, stored, data, say)
    control = controller_of(plan, state.total_steps)
    if stored is not None:
        control.load_state(stored.part("control", dict[str, Any] | None) or {})
    trained = trained_rows(plan, data, shape, say.tick)
    stream = BatchStream(data.rows(), shape, state.data or None)
    try:
        # Fill before the model is built, so that memory of the data is not counted as the model's.
        stream.fill(say.tick)
        say.phase(
            "build",
            f"from {stored.path.name}" if stored is not None else shortly(begun),
            total_steps=state.total_steps,
            steps_per_epoch=state.steps_per_epoch,
        )
        attempt.read_memory = lambda: _held(engine)
        weights = starting_weights(plan, model)
        limit_build(plan, engine)
        engine.build(plan, data.fitted(model), state.total_steps, weights)
        say.phase(
            "build",
            parameters=engine.parameters,
            trainable_parameters=engine.trainable_parameters,
            weights=_origin(begun, weights),
        )
        rows = state.total_steps * shape.rows
        own = trained.batches() if trained is not None else ()
        genuine = plan.model == begun.model
        changed = consents.agreed(attempt.run) is not None
        start = Start(engine, evaluation_shape(plan, shape), rows, own, genuine, changed)
        data.measure_start(start, say)
        if stored is not None:
            engine.load_state(stored)
        limit_steps(plan, engine)
        print(f"  Model initialized with {engine.parameters:,} parameters", flush=True)
    except BaseException:
        stream.close()
        raise
    return Job(
        plan=plan,
        model=model,
        engine=engine,
        data=data,
        shape=shape,
        stream=stream,
        checkpoints=checkpoints,
        control=control,
        progress=state,
        fingerprints=fingerprints,
        settings=settings,
        last_saved=stored.path if stored else None,
        trained=trained,
    )


def _stored(
    attempt: Attempt, checkpoints: Checkpoints, gang: Gang, say: Announcer
) -> LoadedCheckpoint | None:
    """The newest intact checkpoint, which the leader finds; None if the run has none at all."""
    if gang.rank:
        name = gang.tell()
        return LoadedCheckpoint(attempt.run.checkpoints_path / name) if name else None
    checkpoints.sweep()
    stored = _newest(attempt, checkpoints, say)
    gang.tell(stored.path.name if stored else "")
    return stored


def _doubts(run: RunDirectory, begun: Plan, plan: Plan, engine: Engine) -> Iterator[str]:
    """Warnings about the plan. `begun` still names the source of the weights, which `plan` may have replaced by kept
    files."""
    for rung in rungs(run)[-1:]:
        yield rung.words
    if frozen := frozen_at_random(begun):
        yield frozen
    precision = plan.optimize.precision
    if engine.device.kind == "cpu" and (slow := slower_than_fp32(precision, plan.backend)):
        yield f"optimize.precision = {precision}: {slow}"


def _beginning(plan: Plan, steps_per_epoch: int, say: Announcer) -> Progress:
    """The progress of a run at step 0."""
    state = progress.start(plan, steps_per_epoch)
    warmup = recipe.warmup_steps(plan, state.total_steps)
    if plan.train.warmup_steps not in (None, warmup):
        say.warning(
            f"train.warmup_steps = {plan.train.warmup_steps:,} is more than half of the "
            f"{state.total_steps:,} steps of this run: the warm-up takes {warmup:,}"
        )
    return state


def _older_fingerprints(run: RunDirectory, picked: Plan, model: Model) -> set[str]:
    """The plan's fingerprints as older checkpoints hold them."""
    first = run.read_first_plan()
    before = replace(picked, {key: get(first, key) for key in LATER})
    return {
        progress.fingerprint(before, model, CHANGEABLE - LATER),
        progress.fingerprint(before, model, CHANGEABLE - LATER, as_it_is=True),
        progress.fingerprint(first, model, ELSEWHERE - LATER, as_it_is=True),
    }


def _origin(plan: Plan, weights: WeightSource) -> str:
    """The origin of the weights, and how many were read. The folder of the model that a resumed run was fine-tuned from may
    be gone."""
    try:
        words = origin(plan).words
    except PlanError:
        return f"{FINE_TUNES} {printable(plan.model.name)}, which is gone"
    return f"{words}: {weights.read}" if isinstance(weights, HuggingFaceWeights) else words


def _newest(attempt: Attempt, checkpoints: Checkpoints, say: Announcer) -> LoadedCheckpoint | None:
    """The newest intact checkpoint; None if the run has none at all.

    Raises `NoCheckpointError` if it has some, and all are damaged or cannot be read.
    """
    problems: list[str] = []

    def problem(message: str) -> None:
        problems.append(message)
        say.warning(message)

    stored = checkpoints.newest(problem, say.tick, verified=verified.take(attempt.run))
    problems += [f"{path.name} was damaged" for path in damaged(attempt.run.checkpoints_path)]
    if stored is None and problems:
        raise NoCheckpointError(
            f"no intact checkpoint is left: {problems[0].partition(';')[0]}; put an intact copy of it back, or "
            f"begin again at step 0: memconsole resume {attempt.run.id} --from-scratch"
        )
    return stored


def _held(engine: Engine) -> tuple[int | None, int | None, int]:
    """Bytes of live tensors, now, after waiting for queued work, and at their peak; and the highest resident bytes of this
    process."""
    with contextlib.suppress(Exception):  # the queued work may be what failed
        engine.synchronize()
    reading = engine.memory()
    return reading.allocated_bytes, reading.peak_bytes, highest_resident()


def resumed(
    stored: LoadedCheckpoint,
    fingerprints: dict[str, str],
    older: Collection[str] = (),
    settings: dict[str, Any] | None = None,
) -> Progress:
    """Read the progress from a checkpoint. `older` are the plan's fingerprints as older checkpoints
    hold them, and `settings` those of the plan that its fingerprint counts. Raises `PlanError` or
    `DataError` if plan or tokenizer have changed, and `DataError` if the checkpoint does not hold it."""
    before = stored.fingerprints
    if before.get("plan") not in {fingerprints["plan"], *older}:
        then = stored.part("settings", dict[str, Any] | None)  # older checkpoints have none
        words = progress.difference_words(then, settings or {}) if then else ""
        raise PlanError(
            f"{stored.path.name} was made with other settings than the run's plan.toml has now"
            f"{words and f' ({words})'}; put plan.toml back as it was, or start a new run"
        )
    for what in fingerprints.keys() - {"plan", "data"}:
        if before.get(what) != fingerprints[what]:
            raise DataError(
                f"the {what} has changed since {stored.path.name}: the run cannot be continued "
                "exactly; start a new run"
            )
    kept: Progress = stored.part("progress", Progress)
    if kept.step != stored.step:
        raise DataError(
            f"{stored.path.name}/state.json: progress: step = {kept.step}, expected {stored.step}; "
            "this checkpoint cannot be used"
        )
    return kept


def check_unchanged(
    run: RunDirectory, stored: LoadedCheckpoint, data: TaskData, say: Teller
) -> None:
    """Raise `DataError` if the data is not that of the checkpoint, unless the user agreed."""
    problem = ""
    if stored.fingerprints.get("data") != data.fingerprints["data"]:
        problem = "its files have other names, lengths or beginnings"
    elif "read" in stored.state:  # older checkpoints have only the fingerprint
        try:
            problem = data.hashes.difference(stored.part("read", dict[str, Any]), say.tick)
        except (LookupError, TypeError, binascii.Error):
            problem = f"{stored.path.name} does not record which of it had been read"
    if not problem:
        return
    changed = f"the data has changed since {stored.path.name}: {problem}"
    consent = consents.agreed(run)
    if consent is None:
        raise DataError(
            f"{changed}; the run cannot be continued exactly. Start a new run, or continue with the "
            f"data as it is: memconsole resume {run.id} --changed-data"
        )
    say.warning(f"{changed}; continuing with it, as {consent.who} agreed")


def _at(attempt: Attempt, checkpoint: Path | None) -> None:
    """Set the attempt's step and checkpoint, so that they are right if it ends during set-up."""
    attempt.step = step_of(checkpoint) if checkpoint else 0
    attempt.checkpoint = str(checkpoint) if checkpoint else None


def _started(attempt: Attempt, plan: Plan, engine: Engine, stored: LoadedCheckpoint | None) -> None:
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
