"""Draws runs as the rows of a list, and one run in more detail. Pure functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.cells import cell_len

from memconsole.plan.tasks import TASKS
from memconsole.runs.read.shown.missing import MARK
from memconsole.runs.read.shown.status import RunStatus
from memconsole.runs.read.shown.words import ended_why, state_word
from memconsole.runs.record.states import LIVE
from memconsole.tui.draw.lines import Line, Span, fit, fit_end, left, right, width_of, wrap
from memconsole.tui.draw.words import age_word, measure_word, rate_word, state_mark
from memconsole.units import format_bytes, format_duration

_STATE = 12
_MARKED = 2
_LONGEST_NAME = 36
_MODEL = 10
_NAME_END = 6
"""Characters kept of the end of a name that is too long."""


@dataclass(frozen=True)
class Column:
    """One column: its head, its cells, from which width of a row it is shown, and its text."""

    head: str
    cells: int
    from_width: int
    text: Callable[[RunStatus, float], str]
    role: str = ""
    align: Callable[[str, int], str] = right


COLUMNS = (
    Column("model", _MODEL, 0, lambda run, now: _model(run.model), align=left),
    Column("engine", 6, 128, lambda run, now: run.backend, "dim", left),
    Column("step", 13, 112, lambda run, now: _steps(run)),
    Column("loss", 8, 128, lambda run, now: _figure(run.loss, run), "train"),
    Column("duration", 11, 0, lambda run, now: format_duration(run.duration_seconds)),
    Column("valid.", 8, 0, lambda run, now: _figure(run.best, run), "validation"),
    Column("peak", 8, 0, lambda run, now: _peak(run)),
    Column(
        "started", 11, 98, lambda run, now: age_word(max(0.0, now - run.created_wall)), "dim", left
    ),
)


def filtered(runs: tuple[RunStatus, ...], text: str) -> tuple[RunStatus, ...]:
    """The runs that contain every word of `text`."""
    words = text.lower().split()
    return tuple(run for run in runs if all(word in _searched(run) for word in words))


def _searched(run: RunStatus) -> str:
    tags = " ".join(run.tags)
    words = f"{run.id} {run.name} {state_word(run)} {run.model} {run.backend} {tags} {run.note}"
    return words.lower()


def head_line(width: int) -> Line:
    """The heads of the columns that a row of `width` cells has."""
    name, shown, tags = _layout(width)
    text = " " * 4 + left("state", _STATE) + " " * _MARKED + left("name", name)
    text += "".join(" " + column.align(column.head, column.cells) for column in shown)
    return [Span(fit(text + (" tags" if tags else ""), width + 2), "dim")]


def run_line(run: RunStatus, width: int, now: float, marked: bool = False) -> Line:
    """One run as a row."""
    mark, role = state_mark(run)
    name, shown, tags = _layout(width)
    line: Line = [
        Span(f"{mark} {left(_state(run), _STATE)}", role),
        Span(left("◆" if marked else "", _MARKED), "accent"),
        Span(left(_shortened(run.name, name), name), "strong"),
    ]
    line += [
        Span(" " + column.align(column.text(run, now), column.cells), column.role)
        for column in shown
    ]
    if tags:
        line.append(Span(" " + left(" ".join(run.tags), tags), "accent"))
    return line


def detail_lines(run: RunStatus, width: int) -> list[Line]:
    """What the row has no room for: id, steps, speed; why it ended; tags and note."""
    speed = run.units_per_second
    units = next((t.units for t in TASKS.values() if t.unit == run.unit), run.unit)
    parts = [run.id, run.backend, f"step {_steps(run)}"]
    parts += [f"{rate_word(speed)} {units}/s"] if speed is not None else []
    parts += [f"loss {_figure(run.loss, run)}"] if run.loss is not None else []
    lines: list[Line] = [[Span(fit(" " + " · ".join(parts), width), "dim")]]
    why = run.unsaved or run.damaged or run.refused
    if not why and run.state not in (*LIVE, "finished"):
        why = ended_why(run.ended_by, run.evidence)
    why = why or run.other_version
    role = state_mark(run)[1] if why else "validation"
    if not why and run.best is not None and run.best_step is not None:
        why = f"best {run.best_by} {_figure(run.best, run)} at step {run.best_step:,}"
    tags = " ".join(f"#{tag}" for tag in run.tags)
    words = " ".join(run.note.split())
    rows = 1 if tags or words else 2
    lines += [[Span(f" {text}", role)] for text in wrap(why, width - 1, rows)] or [[]]
    if len(lines) > 2:
        return lines
    head = Span(
        f" {fit(tags, max(width // 2, width - 2 - cell_len(words)))} " if tags else " ", "accent"
    )
    lines.append([head, Span(fit(words, width - width_of([head])))])
    return lines


def _layout(width: int) -> tuple[int, tuple[Column, ...], int]:
    """Cells for the name, the columns shown, and cells for the tags."""
    shown = tuple(column for column in COLUMNS if width >= column.from_width)
    room = width - 2 - _STATE - _MARKED - sum(column.cells + 1 for column in shown)
    name = max(10, min(room, _LONGEST_NAME))
    tags = room - name - 1
    return name, shown, tags if tags >= 6 else 0


def _shortened(name: str, cells: int) -> str:
    """A long name without its middle: the ends tell runs apart."""
    if width_of([Span(name)]) <= cells:
        return name
    return f"{fit(name, cells - _NAME_END).rstrip('…')}…{name[-_NAME_END:]}"


def _model(name: str) -> str:
    """A model's name. Of a path that is too long the end is kept: the ends tell models apart."""
    return fit_end(name, _MODEL) if "/" in name else name


def _state(run: RunStatus) -> str:
    word = state_word(run)
    if word == "running" and run.total_steps:
        return f"{word} {min(100, 100 * run.step // run.total_steps)}%"
    return word


def _steps(run: RunStatus) -> str:
    return f"{run.step:,}" + (f"/{run.total_steps:,}" if run.total_steps else "")


def _figure(value: float | None, run: RunStatus) -> str:
    return ("—" if value is None else measure_word(value)) + _mark(run)


def _peak(run: RunStatus) -> str:
    return "—" if run.peak_bytes is None else format_bytes(run.peak_bytes) + _mark(run)


def _mark(run: RunStatus) -> str:
    return MARK if run.missing_records else ""
