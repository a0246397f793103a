"""Formats a run's memory, estimated next to measured, and the remedies if it ran out."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from memconsole.cli.tables import columns
from memconsole.devices.reading import Devices
from memconsole.memory.answers.advice import Remedy
from memconsole.memory.verdict import Verdict
from memconsole.plan import plan as plans
from memconsole.plan.plan import PlanError
from memconsole.remedies import remedies_of
from memconsole.runs.read.life.ladder import present_plan
from memconsole.runs.read.report.comparison import Comparison
from memconsole.runs.read.report.report import MemoryReport, Report
from memconsole.runs.read.shown.missing import marked
from memconsole.runs.read.state.stages import during
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.states import OUT_OF_MEMORY
from memconsole.units import format_bytes, format_step

_ENOUGH = {Verdict.FITS: "fits", Verdict.TIGHT: "tight", Verdict.DOES_NOT_FIT: "not enough"}


def document(run: RunDirectory, made: Report, devices: Devices | None) -> dict[str, Any]:
    """The report as `--json` prints it, with remedies if the run ran out of memory."""
    found: dict[str, Any] = msgspec.to_builtins(made)
    if made.verdict.reason in OUT_OF_MEMORY:
        found["remedies"] = msgspec.to_builtins(remedies_after(run, made, devices))
    return found


def remedies_after(run: RunDirectory, made: Report, devices: Devices | None) -> tuple[Remedy, ...]:
    """Remedies in the order to try.

    Empty if the run did not run out of memory, or its plan or device is gone.
    """
    if made.verdict.reason not in OUT_OF_MEMORY:
        return ()
    try:
        return remedies_of(present_plan(run), made.memory.shortfall, devices)
    except PlanError:
        return ()


def memory_lines(memory: MemoryReport, uncertain: Collection[str] = ()) -> list[str]:
    """One row per figure, then the host memory by kind and the source of the band. Measurements that
    may be wrong are marked. One line if nothing was measured."""
    lines = _comparison_lines(memory, uncertain)
    lines += rank_lines(memory)
    measured = memory.measured
    if measured.host_anonymous_bytes is not None:
        lines.append(
            f"host memory: {format_bytes(measured.host_anonymous_bytes)} anonymous, "
            f"{_bytes(measured.host_shared_bytes)} shared"
        )
    lines += [f"{c.name}: {c.note}" for c in memory.comparison if c.note]
    banded = next((c.band_bytes for c in memory.comparison if c.band_bytes), None)
    if banded is not None:
        source = f" ({memory.band_from})" if memory.band_from else ""
        lines.append(f"band: {format_bytes(banded[0])} to {format_bytes(banded[1])}{source}")
    lacked = memory.shortfall
    if lacked is not None:
        known = (("held", lacked.held_bytes), ("asked for", lacked.requested_bytes))
        told = ", ".join(f"{word} {format_bytes(size)}" for word, size in known if size)
        lines.append(
            f"ran out of memory {during(lacked.phase)}: {told}{'; ' if told else ''}needed at least "
            f"{format_bytes(lacked.needed_bytes)}"
        )
    return lines


def _comparison_lines(memory: MemoryReport, uncertain: Collection[str]) -> list[str]:
    if all(c.measured_bytes is None for c in memory.comparison):
        total = next((c for c in memory.comparison if c.estimated_bytes is not None), None)
        known = (
            "" if total is None else f", estimated at {total.tier} {_bytes(total.estimated_bytes)}"
        )
        return [f"memory: nothing was measured{known}"]
    rows = [["memory", "estimated", "measured", "error", "in band"]]
    rows += [_row(c, uncertain) for c in memory.comparison]
    return columns(rows)


def rank_lines(memory: MemoryReport) -> list[str]:
    """A row for each rank of a run that has several: its peak beside the estimate, and its time."""
    if not memory.ranks:
        return []
    guess = memory.estimated.peak_bytes
    rows = [["rank", "peak", "error", "host", "step", "in exchanges"]]
    for one in memory.ranks:
        off = (
            "" if not (guess and one.peak_bytes) else f"{100 * (guess / one.peak_bytes - 1):+.1f} %"
        )
        rows.append(
            [
                str(one.rank),
                _bytes(one.peak_bytes),
                off or "n/a",
                _bytes(one.host_bytes),
                _seconds(one.step_seconds),
                _seconds(one.exchange_seconds),
            ]
        )
    return ["", *columns(rows), ""]


def _seconds(seconds: float | None) -> str:
    return "n/a" if seconds is None else format_step(seconds)


def remedy_lines(found: tuple[Remedy, ...]) -> list[str]:
    """One row per remedy, in the order to try; bytes are relative to what the run needed."""
    if not found:
        return []
    rows = [["what would have helped", "saves", "time", "", "changes", "as settings"]]
    rows += [
        [
            remedy.label,
            "~" + format_bytes(remedy.saves_bytes),
            f"x{remedy.time_factor:.2f}",
            _ENOUGH[remedy.verdict],
            remedy.result or "time alone",
            " ".join(
                f"--set {key}={plans.written(value)}" for key, value in remedy.changes.items()
            ),
        ]
        for remedy in found
    ]
    return columns(rows, left=(0, 3, 4, 5))


def _row(c: Comparison, uncertain: Collection[str]) -> list[str]:
    guess = "n/a" if c.estimated_bytes is None else f"{c.tier} {format_bytes(c.estimated_bytes)}"
    seen = ("≥ " if c.at_least else "") + _bytes(c.measured_bytes)
    seen = marked(seen, "memory.measured", uncertain)
    error = "n/a"
    if c.error_percent is not None and (not c.at_least or c.error_percent < 0):
        error = f"{c.error_percent:+.1f} %"
    band = {True: "yes", False: "no", None: "n/a"}[c.inside_band]
    return [c.name, guess, seen, error, band]


def _bytes(count: int | None) -> str:
    return "n/a" if count is None else format_bytes(count)
