"""Pure functions that draw two plans side by side: what differs, memory and time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memconsole.memory.table import COMPONENTS, SNAPSHOTS, Estimate, MemoryTable
from memconsole.memory.verdict import Verdict
from memconsole.plan.plan import Plan
from memconsole.plan.tasks import task_of
from memconsole.tui.draw.comparison_rows import NAME_CELLS, compared_row, difference_rows
from memconsole.tui.draw.lines import Line, Span, fit, rule, wrap
from memconsole.tui.draw.words import (
    VERDICTS,
    minutes_word,
    rate_word,
    step_word,
    verdict_mark,
)
from memconsole.units import format_bytes


@dataclass(frozen=True)
class PricedPlan:
    """A plan with a name, and its estimate or the reason there is none."""

    name: str
    plan: Plan
    estimate: Estimate | None
    problem: str = ""


def plan_rows(this: PricedPlan, other: PricedPlan, width: int) -> list[Line]:
    """Two plans: what differs, their memory by component at their peaks, totals and time."""
    cells = max(10, (width - NAME_CELLS - 2) // 3)
    lines = [
        compared_row("", [this.name, other.name, "saved by"], cells, ("strong", "accent", "dim"))
    ]
    if words := better_words(this, other):
        lines += [[Span(f" {text}", "good")] for text in wrap(words, width - 2, 3)]
    lines += difference_rows([this.plan, other.plan], cells, width)
    for one in (this, other):
        if one.estimate is None:
            words = f" {one.name}: not priced — {one.problem}"
            lines.append([Span(fit(words, width), "bad")])
    if this.estimate is None or other.estimate is None:
        return lines
    mine, theirs = this.estimate.table, other.estimate.table
    lines.append(rule("memory at the peak", width, f"{mine.tier} | {theirs.tier}"))
    for name in (*COMPONENTS, SNAPSHOTS):
        pair = _at_peak(mine, name), _at_peak(theirs, name)
        if any(pair):
            lines.append(_bytes_row(name, *pair, cells))
    lines.append(compared_row("phase of the peak", [mine.peak_phase, theirs.peak_phase, ""], cells))
    for name, a, b in (
        ("allocated", mine.peak_bytes, theirs.peak_bytes),
        ("reserved", mine.reserved_bytes, theirs.reserved_bytes),
        ("device", mine.device_bytes, theirs.device_bytes),
        ("host RAM", mine.host_bytes, theirs.host_bytes),
    ):
        lines.append(_bytes_row(name, a, b, cells))
    fits = [_fit_words(table) for table in (mine, theirs)]
    roles = [VERDICTS[table.verdict][1] for table in (mine, theirs)]
    lines.append(compared_row("verdict", [*fits, ""], cells, roles))
    return [
        *lines,
        rule("time", width),
        *_time_rows(this.plan, this.estimate, other.estimate, cells),
    ]


def better_words(this: PricedPlan, other: PricedPlan) -> str:
    """Which plan takes less time and which less memory: ``faster: b, ×1.52 · leaner: a, by 120 MiB``. Empty if one is not
    priced."""
    if this.estimate is None or other.estimate is None:
        return ""
    names = this.name, other.name
    units = task_of(this.plan).unit, task_of(other.plan).unit
    if units[0] != units[1]:
        speed = f"their speeds count {units[0]}s and {units[1]}s"
    else:
        rates = this.estimate.tokens_per_second, other.estimate.tokens_per_second
        speed = _faster_words(names, rates)
    sizes = this.estimate.table.device_bytes, other.estimate.table.device_bytes
    return f"{speed} · {_leaner_words(names, sizes)}"


def _faster_words(names: tuple[str, str], rates: tuple[float, float]) -> str:
    factor = f"{max(rates) / min(rates):.2f}"
    if factor == "1.00":
        return "equally fast"
    return f"faster: {names[0] if rates[0] > rates[1] else names[1]}, ×{factor}"


def _leaner_words(names: tuple[str, str], sizes: tuple[int, int]) -> str:
    if sizes[0] == sizes[1]:
        return "the same memory"
    saved = format_bytes(abs(sizes[0] - sizes[1]))
    return f"leaner: {names[0] if sizes[0] < sizes[1] else names[1]}, by {saved}"


def _time_rows(mine: Plan, this: Estimate, other: Estimate, cells: int) -> list[Line]:
    rows: tuple[tuple[str, Callable[[Any], str], float | None, float | None], ...] = (
        ("step", step_word, this.step_seconds, other.step_seconds),
        (f"{task_of(mine).units}/s", rate_word, this.tokens_per_second, other.tokens_per_second),
        ("epoch minutes", minutes_word, this.epoch_minutes, other.epoch_minutes),
    )
    return [
        compared_row(name, [word(a), word(b), f"x{b / a:.2f}" if a and b else ""], cells)
        for name, word, a, b in rows
    ]


def _at_peak(table: MemoryTable, name: str) -> int:
    return sum(c.at(table.peak_phase) for c in table.components if c.name == name)


def _fit_words(table: MemoryTable) -> str:
    free, mark = table.free_bytes, VERDICTS[table.verdict][0]
    if table.verdict is Verdict.TIGHT:
        return f"{mark} tight, {format_bytes(free)}"
    if table.fits:
        return f"{mark} {format_bytes(free)} free"
    return f"{mark} {format_bytes(-free)} over" if free < 0 else verdict_mark(table.verdict)


def _bytes_row(name: str, a: int, b: int, cells: int) -> Line:
    """Both amounts; the smaller one is green, and the last column says what it saves, with an arrow towards its plan."""
    if a == b:
        return compared_row(
            name, [format_bytes(a), format_bytes(b), "same"], cells, ("", "", "dim")
        )
    less = "good" if a < b else "", "good" if b < a else ""
    saved = f"{'←' if a < b else '→'} saves {format_bytes(abs(b - a))}"
    return compared_row(name, [format_bytes(a), format_bytes(b), saved], cells, (*less, "good"))
