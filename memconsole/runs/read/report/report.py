"""Builds the report of a run from its records: the document of `report --json`."""

from __future__ import annotations

from typing import Any

import msgspec

from memconsole.plan import plan_file
from memconsole.plan.plan import PlanError
from memconsole.plan.tasks import TASKS, Task, task_of
from memconsole.runs.read.history import History
from memconsole.runs.read.life.ladder import Rung, present_plan, resized_after, rungs
from memconsole.runs.read.life.liveness import liveness
from memconsole.runs.read.report.comparison import (
    Comparison,
    EstimatedTable,
    MeasuredLine,
    MemoryLine,
    compare,
)
from memconsole.runs.read.report.measured import is_lower_bound, measured_of, shortfall_of
from memconsole.runs.read.report.ranks import RankLine, SlowestLine, rank_lines, slowest_line
from memconsole.runs.read.shown.clean_records import clean_texts
from memconsole.runs.read.shown.missing import uncertain_figures
from memconsole.runs.read.shown.ranks import each_per_second
from memconsole.runs.read.shown.snapshot import Symptom
from memconsole.runs.read.shown.symptoms import symptoms_of
from memconsole.runs.read.shown.unread import unread
from memconsole.runs.read.shown.unsaved import unsaved_words
from memconsole.runs.read.shown.words import total_minutes
from memconsole.runs.read.state.figures import (
    average_epoch_minutes,
    best_evaluation,
    best_validation_loss,
    final_train_loss,
)
from memconsole.runs.read.state.reduce import RunState
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.failures.shortfall import Shortfall
from memconsole.runs.record.labels import read_labels
from memconsole.runs.record.log import events
from memconsole.runs.record.processes.heartbeat import read_heartbeat
from memconsole.runs.record.states import OUT_OF_MEMORY, Verdict
from memconsole.sanitize import clean_line

UNLIMITED = 1 << 60


class VerdictLine(msgspec.Struct, frozen=True, kw_only=True):
    """Why the run ended, or the state of a live run."""

    reason: str
    evidence: str


UNENDED = VerdictLine(reason="starting", evidence="the run has not ended")


class StepLine(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    loss: float | None
    tokens_per_second: float
    step_seconds: float


class EvaluationLine(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    loss: float | None
    bits_per_byte: float | None
    metrics: dict[str, float]
    train_loss: float | None = None
    """Loss of some training rows, measured in the same way."""


class EpochLine(msgspec.Struct, frozen=True, kw_only=True):
    epoch: int
    train_loss: float | None
    validation_loss: float | None
    minutes: float


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """The estimate made at launch and the trainer's measurement."""

    estimated: MemoryLine
    measured: MeasuredLine
    by_phase: dict[str, int]
    """Measured peak of live tensor bytes in each phase."""
    comparison: tuple[Comparison, ...] = ()
    band_from: str = ""
    """Where the estimate's band comes from, as one phrase."""
    shortfall: Shortfall | None = None
    """What was missing, if the run ran out of memory."""
    ranks: tuple[RankLine, ...] = ()
    """Each rank of a run that has several. `measured` and `by_phase` are those of the fullest one."""


class JumpsLine(msgspec.Struct, frozen=True, kw_only=True):
    """The jumps of a hybrid run: those of `tried` that moved the weights for good, those that were taken back later,
    and the gradient steps that they stand for."""

    tried: int
    kept: int
    undone: int
    steps_saved: float
    confidence: float


class BestLine(msgspec.Struct, frozen=True, kw_only=True):
    """The best evaluation. `sample` and `export` use its checkpoint."""

    measure: str
    """Its key in `evaluations`; `loss` if the task has no measure or it was not measured."""
    value: float
    step: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Encodes to the document of `memconsole report --json`."""

    run: str
    name: str
    backend: str
    device: str
    verdict: VerdictLine
    plan: dict[str, Any]
    steps: tuple[StepLine, ...]
    evaluations: tuple[EvaluationLine, ...]
    epochs: tuple[EpochLine, ...]
    memory: MemoryReport
    best_validation_loss: float | None
    final_train_loss: float | None
    """Mean over the last log window, None if nothing was learned in it; `epochs` hold the means of whole epochs."""
    unigram_loss: float | None
    """Loss on the validation tokens of a unigram model of the training tokens: a baseline."""
    total_minutes: float
    average_epoch_minutes: float | None
    attempts: int
    average_units_per_second: float | None = None
    """The speed of all steps together, without those that compiled; see `unit`."""
    best: BestLine | None = None
    tags: tuple[str, ...] = ()
    note: str = ""
    ladder: tuple[Rung, ...] = ()
    """Steps down the out-of-memory ladder. `plan` and the measurement belong to the last one."""
    task: str = "language"
    """What is learned: the name of a task in `plan.tasks`."""
    unit: str = "token"
    """What `tokens_per_second` counts."""
    weights: str = ""
    """Where the model's first weights came from, and how many were read."""
    symptoms: tuple[Symptom, ...] = ()
    """What went wrong, with the settings that act on it."""
    average_units_per_second_each: float | None = None
    """`average_units_per_second` divided by the number of devices; None for a run on one device."""
    slowest: SlowestLine | None = None
    """The slowest process, if the run has several that report how long they wait."""
    jumps: JumpsLine | None = None
    """None unless a hybrid run has tried a jump."""
    missing_records: int = 0
    """Records of the event log that could not be read or are not there."""
    uncertain: tuple[str, ...] = ()
    """The figures of this document that may be wrong because of missing records."""
    plan_problem: str = ""
    """Why `plan` is empty, if it cannot be read."""


class StoredEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """The compared fields of `estimate.json`; the launcher stores a whole memory estimate there."""

    table: EstimatedTable
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    epoch_minutes: float | None = None


class RunEvents(msgspec.Struct):
    """The state of a run after all its events, and all its step records."""

    state: RunState
    steps: list[StepLine]
    missing: int = 0
    """Records that could not be read or are not there."""
    resized_at: int = 0
    """The step after which the run has had its present sizes."""


def report(run: RunDirectory) -> Report:
    """The report of a live or ended run. Never raises, whatever its files contain."""
    return report_of(run, read_events(run), _verdict(run))


def read_events(run: RunDirectory) -> RunEvents:
    """Read every attempt's events. Steps repeated after a resume replace the earlier ones."""
    history = History(run, RunState(evaluation_limit=UNLIMITED, epoch_limit=UNLIMITED))
    state, steps, odd = history.state, list[StepLine](), 0
    for record in history.new():
        if isinstance(record, events.Started):
            _truncate(steps, state.step)
        elif isinstance(record, events.Step) and state.odd == odd:
            _truncate(steps, record.step - 1)
            steps.append(
                StepLine(
                    step=record.step,
                    loss=record.loss,
                    tokens_per_second=record.tokens_per_second,
                    step_seconds=record.step_seconds,
                )
            )
        odd = state.odd
    return RunEvents(state, steps, history.missing, history.resized_at)


def _truncate(steps: list[StepLine], last: int) -> None:
    while steps and steps[-1].step > last:
        steps.pop()


def report_of(run: RunDirectory, run_events: RunEvents, verdict: VerdictLine) -> Report:
    """The report of a run from its events and its verdict."""
    state, started = run_events.state, run_events.state.started
    evaluations, ended_epochs = _evaluation_lines(state), [mark.event for mark in state.epochs]
    (plan, plan_problem), task = _plan(run), _task(run)
    labels = read_labels(run.path)
    stored = stored_estimate(run)
    speed = state.average_units_per_second or state.tokens_per_second
    return Report(
        run=clean_line(run.id, 80),
        name=run.name,
        task=task.name,
        unit=task.unit,
        backend=started.backend if started else str(plan.get("backend", "")),
        device=started.device_name if started else str(plan.get("device", {}).get("name", "")),
        verdict=verdict,
        weights=state.weights,
        plan=plan,
        steps=tuple(run_events.steps),
        evaluations=evaluations,
        epochs=tuple(map(_epoch_line, ended_epochs)),
        memory=_memory(state, stored.table if stored else None, verdict),
        best_validation_loss=best_validation_loss(state, evaluations),
        final_train_loss=final_train_loss(state),
        unigram_loss=_unigram_loss(evaluations),
        total_minutes=total_minutes(state, state.elapsed_seconds),
        average_epoch_minutes=average_epoch_minutes(state, ended_epochs),
        attempts=len(run.attempt_numbers()),
        average_units_per_second=speed,
        average_units_per_second_each=_each(run, speed),
        slowest=slowest_line(state),
        best=_best(task, evaluations),
        tags=labels.tags,
        note=labels.note,
        ladder=rungs(run),
        symptoms=_symptoms(run, state),
        jumps=_jumps(state),
        missing_records=run_events.missing,
        uncertain=uncertain_figures(run_events.missing, state.ended is not None),
        plan_problem=plan_problem,
    )


def _evaluation_lines(state: RunState) -> tuple[EvaluationLine, ...]:
    return tuple(
        EvaluationLine(
            step=e.step,
            loss=e.loss,
            bits_per_byte=e.bits_per_byte,
            metrics=e.metrics,
            train_loss=e.train_loss,
        )
        for e in state.evaluations
    )


def _epoch_line(event: events.Epoch) -> EpochLine:
    return EpochLine(
        epoch=event.epoch,
        train_loss=event.train_loss,
        validation_loss=event.validation_loss,
        minutes=event.minutes,
    )


def _unigram_loss(evaluations: tuple[EvaluationLine, ...]) -> float | None:
    """The newest loss of the unigram model; None if it was not measured."""
    losses = (e.metrics.get("unigram_loss") for e in reversed(evaluations))
    return next((loss for loss in losses if loss is not None), None)


def _best(task: Task, evaluations: tuple[EvaluationLine, ...]) -> BestLine | None:
    best = best_evaluation(task, evaluations)
    if best is None:
        return None
    return BestLine(measure=best.measure.key, value=best.value, step=best.step)


def _memory(state: RunState, table: EstimatedTable | None, verdict: VerdictLine) -> MemoryReport:
    measured, ran_out = measured_of(state), verdict.reason in OUT_OF_MEMORY
    return MemoryReport(
        estimated=MemoryLine(
            peak_bytes=table.peak_bytes,
            device_bytes=table.device_bytes,
            host_bytes=table.host_bytes,
            reserved_bytes=table.reserved_bytes,
        )
        if table
        else MemoryLine(),
        measured=measured,
        by_phase=dict(state.peaks_by_phase),
        comparison=compare(
            table, measured, state.peaks_by_phase, is_lower_bound(state, ran_out=ran_out)
        ),
        band_from=table.band_from if table else "",
        shortfall=shortfall_of(state) if ran_out else None,
        ranks=rank_lines(state),
    )


def _each(run: RunDirectory, speed: float | None) -> float | None:
    try:
        return each_per_second(present_plan(run), speed)
    except PlanError:
        return None


def _jumps(state: RunState) -> JumpsLine | None:
    if state.jump is None:
        return None
    return JumpsLine(**{name: getattr(state.jump, name) for name in JumpsLine.__struct_fields__})


def _verdict(run: RunDirectory) -> VerdictLine:
    """Why an ended run ended. For a run that lives: its state, and what it cannot save."""
    now = liveness(run)
    if now.verdict is not None and not now.live:
        return verdict_line(now.verdict)
    beat = read_heartbeat(run.attempt_path(now.attempt)) if now.live and now.attempt else None
    unsaved = unsaved_words(run, beat)
    words = f"the run has not ended: it {unsaved}" if unsaved else UNENDED.evidence
    return VerdictLine(reason=now.state, evidence=clean_line(words, 500))


def verdict_line(verdict: Verdict) -> VerdictLine:
    return VerdictLine(
        reason=clean_line(verdict.reason, 80), evidence=clean_line(verdict.evidence, 500)
    )


def _plan(run: RunDirectory) -> tuple[dict[str, Any], str]:
    """The run's plan as a document, or an empty one and why the plan cannot be read."""
    try:
        return plan_file.to_document(clean_texts(present_plan(run)), full=True), ""
    except PlanError as error:
        return {}, unread(run, error).words


def _symptoms(run: RunDirectory, state: RunState) -> tuple[Symptom, ...]:
    try:
        return symptoms_of(present_plan(run), state)
    except PlanError:
        return ()


def _task(run: RunDirectory) -> Task:
    """The task of the run's plan; language if the plan cannot be read."""
    try:
        return task_of(run.read_plan())
    except PlanError:
        return TASKS["language"]


def stored_estimate(run: RunDirectory) -> StoredEstimate | None:
    """The launch estimate; None if the run went on with other sizes than estimated."""
    if resized_after(run):
        return None
    stored = files.read_struct(run.path / "estimate.json", StoredEstimate)
    return None if stored is None else clean_texts(stored)
