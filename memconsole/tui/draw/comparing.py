"""Pure functions that draw runs side by side, and plans side by side, as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from memconsole.memory.table import COMPONENTS, SNAPSHOTS, Estimate, MemoryTable
from memconsole.memory.verdict import Verdict
from memconsole.plan.differences import differing
from memconsole.plan.plan import Plan
from memconsole.plan.tasks import task_of
from memconsole.runs.read.shown.jumps import counts_word
from memconsole.runs.read.shown.missing import marked
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.read.shown.words import ended_words
from memconsole.runs.read.state.figures import best_evaluation, loss_units
from memconsole.tui.draw.axes import Axes
from memconsole.tui.draw.chart import Series, choose_axes, finite, plot
from memconsole.tui.draw.ink import Line, Span, fit, fit_end, left, right, rule, wrap
from memconsole.tui.draw.words import (
    VERDICTS,
    loss_word,
    measure_word,
    minutes_word,
    rate_word,
    step_word,
    verdict_mark,
)
from memconsole.units import format_bytes, value_word

MOST_RUNS = 4
ROLES = ("train", "validation", "part-b", "part-d")
"""One role per curve. The curve also carries its number, because there may be no colour."""
_NUMBERS_ON_A_CURVE = 4
_NAME_CELLS = 24


def curves(
    runs: Sequence[RunSnapshot], *, validation: bool
) -> tuple[tuple[Series, ...], tuple[Series, ...]]:
    """The runs' loss curves, and markers with their numbers at different places along them."""
    lines, numbers = [], []
    for n, run in enumerate(runs[:MOST_RUNS]):
        found = finite((run.validation if validation else run.train).points)
        lines.append(Series(tuple(found), ROLES[n]))
        if found:
            parts = _NUMBERS_ON_A_CURVE * MOST_RUNS
            places = {
                min(len(found) - 1, len(found) * (n + 1 + part * MOST_RUNS) // parts)
                for part in range(_NUMBERS_ON_A_CURVE)
            }
            chosen = tuple(found[place] for place in sorted(places))
            numbers.append(Series(chosen, ROLES[n], marker=str(n + 1)))
    return tuple(lines), tuple(numbers)


def chart_lines(
    runs: Sequence[RunSnapshot],
    width: int,
    height: int,
    *,
    validation: bool = False,
    logarithmic: bool = False,
    glyphs: str = "braille",
    other_key: str = "o",
    previous: Axes | None = None,
) -> tuple[list[Line], Axes]:
    """The overlaid curves under a title row, and their axes."""
    lines, numbers = curves(runs, validation=validation)
    total = max((run.facts.total_steps or 0 for run in runs), default=0) or None
    axes = choose_axes(lines, total=total, logarithmic=logarithmic, previous=previous)
    what = "validation" if validation else "train"
    head = rule(
        f"{what} loss" + ("  log" if logarithmic else ""), width, f"{other_key}: the other loss"
    )
    if not any(line.points for line in lines):
        return [head, [Span(f" no {what} loss in these runs", "dim")]], axes
    drawn = plot((*lines, *numbers), axes, width, max(1, height - 1), glyphs=glyphs)
    return [head, *drawn], axes


def run_rows(runs: Sequence[RunSnapshot], width: int) -> list[Line]:
    """One column per run: its figures, then the settings that differ between the runs."""
    shown = runs[:MOST_RUNS]
    cells = max(10, (width - _NAME_CELLS - 2) // max(1, len(shown)))
    heads = [f"{n + 1} {run.name or run.id}" for n, run in enumerate(shown)]
    roles = ROLES[: len(shown)]
    lines = [_row("", heads, cells, roles)]
    units = loss_units([task_of(run.plan) for run in shown])
    figures: list[tuple[str, list[str]]] = [
        ("state", [ended_words(run) for run in shown]),
        ("step", [f"{run.facts.step:,}" for run in shown]),
        (
            "train loss",
            [_loss(run.facts.loss, unit) for run, unit in zip(shown, units, strict=True)],
        ),
        ("best validation", [_best(run, unit) for run, unit in zip(shown, units, strict=True)]),
        *_judged_rows(shown),
        *(
            (f"{counted}/s", [_rate(run, counted) for run in shown])
            for counted in dict.fromkeys(task_of(run.plan).units for run in shown)
        ),
        ("minutes", [minutes_word(run.minutes) for run in shown]),
        ("memory peak", [_peak(run) for run in shown]),
        *_hybrid_rows(shown),
        *(
            [("records missing", [f"{run.missing_records:,}" for run in shown])]
            if any(run.missing_records for run in shown)
            else []
        ),
    ]
    lines += [_row(name, texts, cells) for name, texts in figures]
    lines += difference_rows([run.plan for run in shown], cells, width)
    return lines


def _hybrid_rows(runs: Sequence[RunSnapshot]) -> list[tuple[str, list[str]]]:
    """Jumps and memory of the predict phases; no rows without a hybrid run."""
    if not any(run.facts.jump for run in runs):
        return []
    jumps = [run.facts.jump for run in runs]
    return [
        ("jumps", ["—" if jump is None else counts_word(jump) for jump in jumps]),
        ("steps saved", ["—" if jump is None else f"{jump.steps_saved:,.0f}" for jump in jumps]),
        ("peak in predict", [_bytes(run.facts.peaks_by_phase.get("predict")) for run in runs]),
    ]


def _judged_rows(runs: Sequence[RunSnapshot]) -> list[tuple[str, list[str]]]:
    """The best evaluations; no rows if the loss judges all of them."""
    found = [best_evaluation(task_of(run.plan), run.evaluations) for run in runs]
    if not any(
        best and best.measure.key != task_of(run.plan).loss.key
        for best, run in zip(found, runs, strict=True)
    ):
        return []
    words = ["—" if b is None else f"{measure_word(b.value)} {b.measure.name}" for b in found]
    return [("best evaluation", words)]


def _best(run: RunSnapshot, unit: str) -> str:
    return marked(_loss(run.best_validation_loss, unit), "best_validation_loss", run.uncertain)


def _peak(run: RunSnapshot) -> str:
    return marked(_bytes(run.facts.peak_bytes), "memory.measured", run.uncertain)


def _rate(run: RunSnapshot, units: str) -> str:
    """A run's speed, if its unit is `units`."""
    return rate_word(run.units_per_second) if task_of(run.plan).units == units else "—"


def difference_rows(plans: Sequence[Plan], cells: int, width: int) -> list[Line]:
    """The settings that are not the same in all plans. Of a path that is too long, the end is shown."""
    found = differing(plans)
    lines = [rule("settings that differ", width, "" if found else "none")]
    for key, values in found.items():
        words = [value_word(value) for value in values]
        lines.append(_row(key, [fit_end(w, cells - 1) if "/" in w else w for w in words], cells))
    return lines


@dataclass(frozen=True)
class PricedPlan:
    """A plan with a name, and its estimate or the reason there is none."""

    name: str
    plan: Plan
    estimate: Estimate | None
    problem: str = ""


def plan_rows(this: PricedPlan, other: PricedPlan, width: int) -> list[Line]:
    """Two plans: what differs, their memory by component at their peaks, totals and time."""
    cells = max(10, (width - _NAME_CELLS - 2) // 3)
    lines = [_row("", [this.name, other.name, "saved by"], cells, ("strong", "accent", "dim"))]
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
    lines.append(_row("phase of the peak", [mine.peak_phase, theirs.peak_phase, ""], cells))
    for name, a, b in (
        ("allocated", mine.peak_bytes, theirs.peak_bytes),
        ("reserved", mine.reserved_bytes, theirs.reserved_bytes),
        ("device", mine.device_bytes, theirs.device_bytes),
        ("host RAM", mine.host_bytes, theirs.host_bytes),
    ):
        lines.append(_bytes_row(name, a, b, cells))
    fits = [_fit_words(table) for table in (mine, theirs)]
    roles = [VERDICTS[table.verdict][1] for table in (mine, theirs)]
    lines.append(_row("verdict", [*fits, ""], cells, roles))
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
    units = [task_of(one.plan).unit for one in (this, other)]
    fast, slow = sorted(
        ((one.estimate.tokens_per_second, one.name) for one in (other, this) if one.estimate),
        reverse=True,
    )
    lean, fat = sorted(
        (one.estimate.table.device_bytes, one.name) for one in (this, other) if one.estimate
    )
    faster = f"faster: {fast[1]}, ×{fast[0] / slow[0]:.2f}"
    if f"{fast[0] / slow[0]:.2f}" == "1.00":
        faster = "equally fast"
    if units[0] != units[1]:
        faster = f"their speeds count {units[0]}s and {units[1]}s"
    same = lean[0] == fat[0]
    leaner = f"leaner: {lean[1]}, by {format_bytes(fat[0] - lean[0])}"
    return f"{faster} · {'the same memory' if same else leaner}"


def _time_rows(mine: Plan, this: Estimate, other: Estimate, cells: int) -> list[Line]:
    rows: tuple[tuple[str, Callable[[Any], str], float | None, float | None], ...] = (
        ("step", step_word, this.step_seconds, other.step_seconds),
        (f"{task_of(mine).units}/s", rate_word, this.tokens_per_second, other.tokens_per_second),
        ("epoch minutes", minutes_word, this.epoch_minutes, other.epoch_minutes),
    )
    return [
        _row(name, [word(a), word(b), f"x{b / a:.2f}" if a and b else ""], cells)
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
        return _row(name, [format_bytes(a), format_bytes(b), "same"], cells, ("", "", "dim"))
    less = "good" if a < b else "", "good" if b < a else ""
    saved = f"{'←' if a < b else '→'} saves {format_bytes(abs(b - a))}"
    return _row(name, [format_bytes(a), format_bytes(b), saved], cells, (*less, "good"))


def _row(name: str, texts: Sequence[str], cells: int, roles: Sequence[str] = ()) -> Line:
    line: Line = [Span(" " + left(name.rpartition(".")[2], _NAME_CELLS), "dim")]
    for n, text in enumerate(texts):
        line.append(Span(right(text, cells - 1) + " ", roles[n] if n < len(roles) else ""))
    return line


def _loss(value: float | None, unit: str) -> str:
    return "—" if value is None else f"{loss_word(value)} {unit}".rstrip()


def _bytes(value: int | None) -> str:
    return "—" if value is None else format_bytes(value)
