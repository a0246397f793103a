"""What `memconsole fit` prints, as text and as JSON."""

from __future__ import annotations

from typing import Any

from memconsole.cli.plans.device import device_document, device_words
from memconsole.cli.plans.fit_options import ALLOW
from memconsole.cli.plans.fit_report import FitReport
from memconsole.cli.tables import columns
from memconsole.memory.answers.advice import Largest
from memconsole.memory.answers.results import results_changed
from memconsole.memory.answers.solve import Faster, Fit
from memconsole.memory.estimate import model_of
from memconsole.memory.reasons import phase_words
from memconsole.memory.run_time import run_seconds, start_seconds
from memconsole.memory.table import MemoryTable
from memconsole.memory.verdict import Verdict
from memconsole.plan import plan_file
from memconsole.plan.plan import Plan
from memconsole.plan.tasks import task_of
from memconsole.units import format_bytes, format_duration, value_word


def hopeless(fit: Fit) -> str:
    """Why nothing fits: the least memory needed, and its largest component."""
    phase, component, size = fit.floor
    needed, usable = fit.after.device_bytes, fit.after.budget.usable_bytes
    return (
        f"no settings fit {format_bytes(usable)}: at least {format_bytes(needed)} are needed, "
        f"{format_bytes(size)} of it {component} in {phase_words(phase)}"
    )


def text(report: FitReport) -> list[str]:
    """The report as text, about 100 columns wide."""
    fit, device = report.fit, report.fit.after.budget
    plan = report.given
    lines = [
        f"{plan.model.name}   {plan.backend} on {device_words(device)}",
        "as given: " + fit.before.words,
        ("fitted:   " + fit.after.words) if fit.fits else hopeless(fit),
        "",
    ]
    if fit.changes:
        lines.append("what to change" if fit.fits else "what needs least")
        rows = [
            [f"  {c.label}", f"{value_word(c.before)} -> {value_word(c.after)}", c.key]
            for c in fit.changes
        ]
        lines += columns(rows, left=(0, 1, 2))
        altered = ", ".join(fit.result_changes)
        lines.append(f"  result: changed by {altered}" if altered else "  result: not changed")
        lines.append(f"  time:   {_time(report)}")
    else:
        lines.append("nothing to change: no other settings that fit are estimated to be faster")
    if report.faster is not None:
        lines.append("  " + faster_words(report.faster, report.given))
    if report.kept:
        lines.append("  kept:   " + ", ".join(sorted(report.kept)))
    lines += columns([["  note: ", note] for note in report.notes], left=(0, 1))
    lines += ["", *columns(_memory_rows(fit.before, fit.after))]
    lines += ["", *columns(_size_rows(report), left=(0, 1, 2))]
    return lines


def _time(report: FitReport) -> str:
    """The time per token against the given plan, and of the whole run if its length is known."""
    fit, plan = report.fit, report.given
    words = f"{fit.time_factor:.2f}x per {task_of(plan).unit} (estimated)"
    whole, start = _whole_run(report)
    if whole is None:
        return words
    return f"{words}; about {format_duration(whole)} for this run, {format_duration(start)} of it to start"


def _whole_run(report: FitReport) -> tuple[float | None, float]:
    """Seconds of the run with the fitted plan, None if its length is not known, and of its start."""
    plan, budget = report.fit.plan, report.fit.after.budget
    start = start_seconds(plan, model_of(plan), budget)
    whole = run_seconds(plan, model_of(plan), budget)
    return None if whole is None else start + (whole - start) * report.pace, start


def faster_words(faster: Faster, given: Plan) -> str:
    """``faster with --allow 16-bit --allow 8-bit-state: x3.1``."""
    changed = results_changed(given, faster.plan)
    options = " ".join(f"--allow {word}" for word, result in ALLOW.items() if result in changed)
    return f"faster with {options}: x{faster.speedup:.1f}"


def _memory_rows(before: MemoryTable, after: MemoryTable) -> list[list[str]]:
    """Each component at the peak, and the totals, before and after."""
    rows = [["", "as given", "fitted"]]
    for old, new in zip(before.components, after.components, strict=True):
        sizes = old.at(before.peak_phase), new.at(after.peak_phase)
        tiers = old.tier_at(before.peak_phase), new.tier_at(after.peak_phase)
        if any(sizes):
            cells = (
                f"{t} {format_bytes(n):>8}" if n else "-" for t, n in zip(tiers, sizes, strict=True)
            )
            rows.append([old.name, *cells])
    both = before, after
    rows.append(["peak in", *(table.peak_phase for table in both)])
    for label, field, tier in (
        ("allocated", "peak_bytes", "tier"),
        ("reserved", "reserved_bytes", "reserved_tier"),
        ("device", "device_bytes", "device_tier"),
        ("host", "host_bytes", "host_tier"),
    ):
        cells = (f"{getattr(t, tier)} {format_bytes(getattr(t, field)):>8}" for t in both)
        rows.append([label, *cells])
    return rows


def _size_rows(report: FitReport) -> list[list[str]]:
    """The largest sizes and the smallest devices, as given and fitted."""

    def shown(value: Largest | str | None) -> str:
        if isinstance(value, Largest):
            tight = f" ({value.verdict})" if value.verdict is Verdict.TIGHT else ""
            return f"{value.size:,}{tight}"
        return "none" if value is None else value

    plan = report.given
    how = "by the same kinds of change" if report.fit.allowed else "without changing the result"
    positions = task_of(plan).positions
    by_positions = [n for n in report.largest_sequence_length if n and n.all_positions]
    if by_positions:
        positions += f"; {by_positions[0].size:,}: the model's positions"
    return [
        ["", "as given", "fitted"],
        ["largest micro-batch", *map(shown, report.largest_micro_batch),
         f"rows of {plan.data.sequence_length:,} {task_of(plan).positions}"],
        ["largest sequence length", *map(shown, report.largest_sequence_length), positions],
        ["smallest device", shown(report.smallest_device), shown(report.smallest_device_fitted),
         f"of the catalog; fitted {how}"],
    ]  # fmt: skip


def document(report: FitReport) -> dict[str, Any]:
    """The report as ``fit --json`` prints it. Every byte count is an integer."""
    fit, device = report.fit, report.fit.after.budget
    phase, component, size = fit.floor
    given = plan_file.to_document(report.given, full=True)
    return {
        "backend": report.given.backend,
        "device": device_document(device),
        "fits": fit.fits,
        "verdict": str(fit.after.verdict),
        "changes": [
            {"key": c.key, "label": c.label, "before": c.before, "after": c.after}
            for c in fit.changes
        ],
        "result_changes": list(fit.result_changes),
        "time_factor": round(fit.time_factor, 4),
        "run_seconds": _whole_run(report)[0],
        "start_seconds": _whole_run(report)[1],
        "faster": None
        if report.faster is None
        else {
            "results": [result.value for result in report.faster.results],
            "speedup": round(report.faster.speedup, 3),
            "plan": plan_file.to_document(report.faster.plan, full=True),
        },
        "kept": sorted(report.kept),
        "notes": list(report.notes),
        "given": given,
        "plan": plan_file.to_document(fit.plan, full=True),
        "before": _bytes(fit.before),
        "after": _bytes(fit.after),
        "floor": None if fit.fits else {"phase": phase, "component": component, "bytes": size},
        "largest_micro_batch": _both(_sizes_of(report.largest_micro_batch)),
        "largest_sequence_length": _both(_sizes_of(report.largest_sequence_length)),
        "smallest_device": _both((report.smallest_device, report.smallest_device_fitted)),
    }


def _sizes_of(pair: tuple[Largest | None, Largest | None]) -> tuple[int | None, int | None]:
    given, fitted = (None if largest is None else largest.size for largest in pair)
    return given, fitted


def _both(pair: tuple[Any, Any]) -> dict[str, Any]:
    return {"given": pair[0], "fitted": pair[1]}


def _bytes(table: MemoryTable) -> dict[str, Any]:
    return {
        "tier": str(table.tier),
        "components": {c.name: c.at(table.peak_phase) for c in table.components},
        "phases": table.phases,
        "peak_phase": table.peak_phase,
        "peak_bytes": table.peak_bytes,
        "reserved_bytes": table.reserved_bytes,
        "device_bytes": table.device_bytes,
        "host_bytes": table.host_bytes,
        "band_bytes": list(table.band_bytes),
        "fits": table.fits,
        "verdict": str(table.verdict),
    }
