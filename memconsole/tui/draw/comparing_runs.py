"""Pure functions that draw runs side by side: their loss curves, and a table of their figures."""

from __future__ import annotations

from collections.abc import Sequence

from memconsole.plan.tasks import task_of
from memconsole.runs.read.shown.jumps import counts_word
from memconsole.runs.read.shown.missing import marked
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.read.shown.words import ended_words
from memconsole.runs.read.state.figures import best_evaluation, loss_units
from memconsole.tui.draw.axes import Axes
from memconsole.tui.draw.chart import Series, choose_axes, finite, plot
from memconsole.tui.draw.comparison_rows import NAME_CELLS, compared_row, difference_rows
from memconsole.tui.draw.lines import Line, Span, rule
from memconsole.tui.draw.words import (
    loss_word,
    measure_word,
    minutes_word,
    rate_word,
)
from memconsole.units import format_bytes

MOST_RUNS = 4
ROLES = ("train", "validation", "part-b", "part-d")
"""One role per curve. The curve also carries its number, because there may be no colour."""
_NUMBERS_ON_A_CURVE = 4


def curves(
    runs: Sequence[RunSnapshot], *, validation: bool
) -> tuple[tuple[Series, ...], tuple[Series, ...]]:
    """The runs' loss curves, and markers with their numbers at different places along them."""
    lines, numbers = [], []
    for n, run in enumerate(runs[:MOST_RUNS]):
        points = finite((run.validation if validation else run.train).points)
        lines.append(Series(tuple(points), ROLES[n]))
        if points:
            parts = _NUMBERS_ON_A_CURVE * MOST_RUNS
            places = {
                min(len(points) - 1, len(points) * (n + 1 + part * MOST_RUNS) // parts)
                for part in range(_NUMBERS_ON_A_CURVE)
            }
            chosen = tuple(points[place] for place in sorted(places))
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
    cells = max(10, (width - NAME_CELLS - 2) // max(1, len(shown)))
    heads = [f"{n + 1} {run.name or run.id}" for n, run in enumerate(shown)]
    roles = ROLES[: len(shown)]
    lines = [compared_row("", heads, cells, roles)]
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
    lines += [compared_row(name, texts, cells) for name, texts in figures]
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
    best_ones = [best_evaluation(task_of(run.plan), run.evaluations) for run in runs]
    if not any(
        best and best.measure.key != task_of(run.plan).loss.key
        for best, run in zip(best_ones, runs, strict=True)
    ):
        return []
    words = ["—" if b is None else f"{measure_word(b.value)} {b.measure.name}" for b in best_ones]
    return [("best evaluation", words)]


def _best(run: RunSnapshot, unit: str) -> str:
    return marked(_loss(run.best_validation_loss, unit), "best_validation_loss", run.uncertain)


def _peak(run: RunSnapshot) -> str:
    return marked(_bytes(run.facts.peak_bytes), "memory.measured", run.uncertain)


def _rate(run: RunSnapshot, units: str) -> str:
    """A run's speed, if its unit is `units`."""
    return rate_word(run.units_per_second) if task_of(run.plan).units == units else "—"


def _loss(value: float | None, unit: str) -> str:
    return "—" if value is None else f"{loss_word(value)} {unit}".rstrip()


def _bytes(value: int | None) -> str:
    return "—" if value is None else format_bytes(value)
