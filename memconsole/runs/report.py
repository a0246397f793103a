"""What a run did, from its records alone: the document of `report --json`, and the receipt."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from memconsole.plan import plan as plans
from memconsole.plan.plan import PlanError
from memconsole.runs import events, files
from memconsole.runs.directory import RunDirectory
from memconsole.runs.eventlog import EventReader
from memconsole.runs.follow import READ_BYTES, clean_texts
from memconsole.runs.liveness import liveness
from memconsole.runs.reduce import RunState, begin_attempt, reduce
from memconsole.runs.snapshot import Verdict
from memconsole.runs.verdict import verdict
from memconsole.sanitize import clean_line

_EVERYTHING = 1 << 60


class VerdictLine(msgspec.Struct, frozen=True, kw_only=True):
    """Why the run ended; of a run that lives, its state."""

    reason: str
    evidence: str


_UNENDED = VerdictLine(reason="starting", evidence="the run has not ended")


class StepLine(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    loss: float | None
    tokens_per_second: float


class EvaluationLine(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    loss: float | None
    bits_per_byte: float | None
    metrics: dict[str, float]


class EpochLine(msgspec.Struct, frozen=True, kw_only=True):
    epoch: int
    train_loss: float | None
    validation_loss: float | None
    minutes: float


class MemoryLine(msgspec.Struct, frozen=True, kw_only=True):
    """Peaks. None: not estimated, or the device does not tell."""

    peak_bytes: int | None = None
    """Live tensor bytes."""
    device_bytes: int | None = None
    """What the driver charges the process."""
    host_bytes: int | None = None
    """Resident memory of the trainer's process tree."""


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Estimated at launch, and measured by the trainer."""

    estimated: MemoryLine
    measured: MemoryLine
    by_phase: dict[str, int]
    """Measured peak of live tensor bytes in each phase."""


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
    """Mean over the last log window; `epochs` hold the means of whole epochs."""
    unigram_loss: float | None
    """Of the train tokens' unigram model on the validation tokens: what a model must beat."""
    total_minutes: float
    average_epoch_minutes: float | None
    attempts: int


class StoredEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `estimate.json` that are compared: the launcher writes a whole memory estimate."""

    class Table(msgspec.Struct, frozen=True, kw_only=True):
        tier: str
        peak_bytes: int
        device_bytes: int
        host_bytes: int
        band_bytes: tuple[int, int] | None = None
        phases: dict[str, int] = {}

    table: Table
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    epoch_minutes: float | None = None


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """`receipt.json`: estimate and measurement of one run, and all that could explain a difference."""

    version: int = 1
    run: str
    backend: str
    device_id: str
    device_name: str
    device_kind: str
    device_total_bytes: int | None
    driver: str | None
    versions: dict[str, str]
    plan: dict[str, Any]
    parameters: int | None
    trainable_parameters: int | None
    verdict: VerdictLine
    steps: int
    attempts: int
    estimate: StoredEstimate | None
    measured: MemoryLine
    by_phase: dict[str, int]
    tokens_per_second: float | None
    average_epoch_minutes: float | None
    written_wall: float


class _Story(msgspec.Struct):
    """A run's folded events with every step kept."""

    state: RunState
    steps: list[StepLine]


def report(run: RunDirectory) -> Report:
    """The report of a run, live or ended. Never raises for what its files hold or lack."""
    return _report(run, _read(run), _verdict(run))


def write_receipt(run: RunDirectory) -> Receipt:
    """Write `receipt.json` of a run that has ended; its supervisor calls this. Raises `OSError`.

    No lock is looked at: in the process that holds one, opening its file would give it up.
    """
    story, attempt = _read(run), run.newest_attempt()
    ended = _verdict_line(verdict(run, attempt)) if attempt is not None else _UNENDED
    made, state = _report(run, story, ended), story.state
    started = state.started
    kind = started.device_kind if started else ""
    receipt = Receipt(
        run=made.run,
        backend=made.backend,
        device_id=started.device_id if started else "",
        device_name=made.device,
        device_kind=kind,
        device_total_bytes=state.memory.device_total_bytes if state.memory else None,
        driver=driver_version(kind),
        versions=started.versions if started else {},
        plan=made.plan,
        parameters=state.parameters,
        trainable_parameters=state.trainable_parameters,
        verdict=made.verdict,
        steps=state.step,
        attempts=made.attempts,
        estimate=_estimate(run),
        measured=made.memory.measured,
        by_phase=made.memory.by_phase,
        tokens_per_second=_typical_speed(story.steps),
        average_epoch_minutes=made.average_epoch_minutes,
        written_wall=time.time(),
    )
    files.write_struct(run.receipt_path, receipt)
    return receipt


def driver_version(kind: str, root: Path = Path("/")) -> str | None:
    """The GPU driver's version as its kernel module tells; None where there is none."""
    module = {"gpu": "nvidia", "rocm": "amdgpu"}.get(kind)
    if module is None:
        return None
    content = files.read_regular(root / "sys/module" / module / "version", 4096)
    return clean_line(content.decode("utf-8", "replace").strip(), 80) or None if content else None


def _read(run: RunDirectory) -> _Story:
    """Fold every attempt's events; steps taken again after a resume replace the abandoned ones."""
    state = RunState(evaluation_limit=_EVERYTHING, epoch_limit=_EVERYTHING)
    steps: list[StepLine] = []
    for number in run.attempt_numbers():
        state = begin_attempt(state, number)
        reader, before = EventReader(run.attempt_path(number)), None
        while reader.position != before:
            before = reader.position
            for record in reader.read(READ_BYTES):
                odd = state.odd
                state = reduce(state, record)
                if isinstance(record, events.Started):
                    _truncate(steps, state.step)
                elif isinstance(record, events.Step) and state.odd == odd:
                    _truncate(steps, record.step - 1)
                    steps.append(
                        StepLine(
                            step=record.step,
                            loss=record.loss,
                            tokens_per_second=record.tokens_per_second,
                        )
                    )
    return _Story(state, steps)


def _truncate(steps: list[StepLine], last: int) -> None:
    while steps and steps[-1].step > last:
        steps.pop()


def _report(run: RunDirectory, story: _Story, why: VerdictLine) -> Report:
    state, started, ended = story.state, story.state.started, story.state.ended
    evaluations = tuple(
        EvaluationLine(step=e.step, loss=e.loss, bits_per_byte=e.bits_per_byte, metrics=e.metrics)
        for e in state.evaluations
    )
    epochs = tuple(
        EpochLine(
            epoch=e.epoch,
            train_loss=e.train_loss,
            validation_loss=e.validation_loss,
            minutes=e.minutes,
        )
        for e in (mark.event for mark in state.epochs)
    )
    on_cpu = started is not None and started.device_kind == "cpu"
    plan = _plan(run)
    elapsed = (state.earlier_seconds + state.attempt_seconds) / 60
    average = sum(e.minutes for e in epochs) / len(epochs) if epochs else None
    losses = [e.loss for e in evaluations if e.loss is not None]
    losses += [e.validation_loss for e in epochs if e.validation_loss is not None]
    stored = _estimate(run)
    return Report(
        run=clean_line(run.id, 80),
        name=run.name,
        backend=started.backend if started else str(plan.get("backend", "")),
        device=started.device_name if started else str(plan.get("device", {}).get("name", "")),
        verdict=why,
        plan=plan,
        steps=tuple(story.steps),
        evaluations=evaluations,
        epochs=epochs,
        memory=MemoryReport(
            estimated=MemoryLine(
                peak_bytes=stored.table.peak_bytes,
                device_bytes=stored.table.device_bytes,
                host_bytes=stored.table.host_bytes,
            )
            if stored
            else MemoryLine(),
            measured=MemoryLine(
                peak_bytes=state.peak_bytes,
                # On the processor nothing but the trainer's own allocations is charged to it.
                device_bytes=state.peak_bytes if on_cpu else state.peak_device_bytes,
                host_bytes=state.peak_host_bytes,
            ),
            by_phase=dict(state.peaks_by_phase),
        ),
        best_validation_loss=min(losses, default=None),
        final_train_loss=_final_train_loss(story),
        unigram_loss=next(
            (
                e.metrics["unigram_loss"]
                for e in reversed(evaluations)
                if "unigram_loss" in e.metrics
            ),
            None,
        ),
        total_minutes=ended.total_minutes if ended else elapsed,
        average_epoch_minutes=ended.average_epoch_minutes
        if ended and ended.average_epoch_minutes is not None
        else average,
        attempts=len(run.attempt_numbers()),
    )


def _final_train_loss(story: _Story) -> float | None:
    """Of the last log window, which the last step tells too."""
    ended = story.state.ended
    if ended is not None and ended.final_train_loss is not None:
        return ended.final_train_loss
    return next((step.loss for step in reversed(story.steps) if step.loss is not None), None)


def _verdict(run: RunDirectory) -> VerdictLine:
    now = liveness(run)
    if now.verdict is not None and not now.live:
        return _verdict_line(now.verdict)
    return VerdictLine(reason=now.state, evidence=_UNENDED.evidence)


def _verdict_line(why: Verdict) -> VerdictLine:
    return VerdictLine(reason=clean_line(why.reason, 80), evidence=clean_line(why.evidence, 500))


def _plan(run: RunDirectory) -> dict[str, Any]:
    try:
        document = plans.to_document(clean_texts(run.read_plan()), full=True)
    except PlanError:
        return {}
    return document


def _estimate(run: RunDirectory) -> StoredEstimate | None:
    stored = files.read_struct(run.path / "estimate.json", StoredEstimate)
    return None if stored is None else clean_texts(stored)


def _typical_speed(steps: list[StepLine]) -> float | None:
    """The median of the reported speeds, which the first, compiling step does not move."""
    speeds = sorted(step.tokens_per_second for step in steps)
    return speeds[len(speeds) // 2] if speeds else None
