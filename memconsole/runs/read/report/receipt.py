"""Writes the receipt of a run: estimate, measurement, and what could explain a difference."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from memconsole.runs.read.life.ladder import Rung
from memconsole.runs.read.life.verdict import verdict
from memconsole.runs.read.report.comparison import Comparison, MeasuredLine
from memconsole.runs.read.report.ranks import RankLine
from memconsole.runs.read.report.report import (
    UNENDED,
    StoredEstimate,
    VerdictLine,
    read_events,
    report_of,
    stored_estimate,
    verdict_line,
)
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.failures.shortfall import Shortfall
from memconsole.sanitize import clean_line


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `receipt.json`."""

    version: int = 2
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
    resized_at: int = 0
    """The step after which the run has had its present sizes."""
    attempts: int
    estimate: StoredEstimate | None
    measured: MeasuredLine
    by_phase: dict[str, int]
    ranks: tuple[RankLine, ...] = ()
    """Each rank of a run that has several. `measured` and `by_phase` are those of the fullest one."""
    comparison: tuple[Comparison, ...] = ()
    shortfall: Shortfall | None = None
    """The least memory that a run that ran out of memory would have needed."""
    ladder: tuple[Rung, ...] = ()
    """Steps down the out-of-memory ladder. `plan` and `measured` belong to the last one.

    The last step has no estimate.
    """
    tokens_per_second: float | None
    """The median of the recorded speeds with the present sizes. Padding does not count."""
    step_seconds: float | None = None
    """The median of the recorded seconds of a step with the present sizes. A slow first step, which compiles, does not change it."""
    average_epoch_minutes: float | None
    written_wall: float
    """When the receipt was written, in seconds since 1970. Recorded for people who read the file."""
    missing_records: int = 0
    """Records of the event log that could not be read. The measured peaks may be too low then."""


def write_receipt(run: RunDirectory) -> Receipt:
    """Write `receipt.json` of a run that has ended. Its supervisor calls this. Raises `OSError`.

    It checks no lock: the supervisor would lose its own lock by opening and closing the lock file.
    """
    run_events, attempt = read_events(run), run.newest_attempt()
    ended = verdict_line(verdict(run, attempt)) if attempt is not None else UNENDED
    report, state = report_of(run, run_events, ended), run_events.state
    started = state.started
    kind = started.device_kind if started else ""
    measured = [step for step in run_events.steps if step.step > run_events.resized_at]
    receipt = Receipt(
        run=report.run,
        backend=report.backend,
        device_id=started.device_id if started else "",
        device_name=report.device,
        device_kind=kind,
        device_total_bytes=state.memory.device_total_bytes if state.memory else None,
        driver=driver_version(kind),
        versions=started.versions if started else {},
        plan=report.plan,
        parameters=state.parameters,
        trainable_parameters=state.trainable_parameters,
        verdict=report.verdict,
        steps=state.step,
        resized_at=run_events.resized_at,
        attempts=report.attempts,
        estimate=stored_estimate(run),
        measured=report.memory.measured,
        by_phase=report.memory.by_phase,
        ranks=report.memory.ranks,
        comparison=report.memory.comparison,
        shortfall=report.memory.shortfall,
        ladder=report.ladder,
        tokens_per_second=_median(step.tokens_per_second for step in measured),
        step_seconds=_median(step.step_seconds for step in measured),
        average_epoch_minutes=report.average_epoch_minutes,
        written_wall=time.time(),
        missing_records=report.missing_records,
    )
    files.write_struct(run.receipt_path, receipt)
    return receipt


def driver_version(kind: str, root: Path = Path("/")) -> str | None:
    """The GPU driver's version, from its kernel module; None if there is none."""
    module = {"gpu": "nvidia", "rocm": "amdgpu"}.get(kind)
    if module is None:
        return None
    content = files.read_regular(root / "sys/module" / module / "version", 4096)
    return clean_line(content.decode("utf-8", "replace").strip(), 80) or None if content else None


def _median(values: Iterable[float]) -> float | None:
    """The upper median; None without values."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else None
