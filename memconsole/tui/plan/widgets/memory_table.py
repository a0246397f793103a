"""The memory table: components at the peak, each phase if there is room, and the totals."""

from __future__ import annotations

from dataclasses import dataclass

from memconsole.memory.exact.sharpen import alike
from memconsole.memory.table import COMPONENTS, MemoryTable, Tier
from memconsole.tui.draw.lines import Line, Span, cut, left, right, rule, wrap
from memconsole.tui.draw.words import signed_bytes
from memconsole.tui.views.plan_view import PlanView
from memconsole.tui.widgets.painted import Painted
from memconsole.units import format_bytes

SHORT_PHASES = {
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "optimizer step": "step",
    "evaluation": "evaluate",
    "checkpoint": "save",
}
"""Names of phases in narrow columns."""
CORRECTION = "correction by runs"
"""The row of a calibrated table that makes its components add up to the peak."""
_SHORT_NAMES = {
    "optimizer state": "optim. state",
    "logits and loss": "logits, loss",
    CORRECTION: "by runs",
}
NUMBER = 10
"""A tier's mark, a space and up to eight cells of bytes."""
CHANGE = 10
_TIERS = {Tier.FORMULA: "formula", Tier.EXACT: "exact", Tier.CALIBRATED: "calibrated"}


def components_of(table: MemoryTable) -> dict[str, int]:
    """Bytes of every component at the peak, in table order; unknown components come last."""
    others = {component.name: component.at(table.peak_phase) for component in table.components}
    ordered = {name: others.pop(name) for name in COMPONENTS if name in others}
    return ordered | others


def is_long(table: MemoryTable) -> bool:
    """Whether the table has more rows than usual: one of snapshots, or one of a correction by runs."""
    return len(components_of(table)) + bool(table.correction_bytes) > len(COMPONENTS)


def shown_phases(table: MemoryTable, width: int) -> tuple[str, ...]:
    """The phases that get a column of their own: none on narrow screens."""
    known = tuple(table.phases)
    room = (width - 18 - NUMBER - CHANGE) // (NUMBER + 1)
    if room < 3:
        return ()
    # If not all fit, the phases of a training step come first; the peak phase is always shown.
    kept = known[:room]
    if table.peak_phase in known and table.peak_phase not in kept:
        kept = (*kept[:-1], table.peak_phase)
    return kept


def amount_word(size: int, tier: Tier) -> str:
    """Bytes with the sign of their tier, in `NUMBER` cells; a dash for none."""
    return "—" if size == 0 else f"{tier} {format_bytes(size).rjust(NUMBER - 2)}"


def progress_words(view: PlanView, width: int) -> str:
    """The tier and the progress towards exact numbers, in `width` cells."""
    assert view.estimate is not None
    tier, exact = view.estimate.table.tier, view.exact
    words = f"{tier} {_TIERS[tier]}"
    if exact.seconds is not None:
        since = f"{exact.seconds} s"
        ways = (f"{tier} refining… {since}", f"{tier} exact… {since}", f"{tier} {since} …")
        words = next((words for words in ways if len(words) <= width), ways[-1])
    elif exact.problem and tier == Tier.FORMULA:
        words = f"{tier} not exact"
    elif exact.resting and tier == Tier.FORMULA:
        words = f"{tier} formula, {exact.resting}"
        words = words if len(words) <= width else f"{tier} formula"
    return words


def table_lines(view: PlanView, width: int, height: int) -> list[Line]:
    """Title, one row per component, totals. Pure in `view`."""
    if view.estimate is None:
        if not view.problem:
            return [rule(_title(None, width), width), [Span(" pricing this plan", "dim")]]
        note = f"✗ {view.problem}"
        return [rule(_title(None, width), width), *_problem(note, width, height - 1)]
    table = view.estimate.table
    stale = view.stale or bool(view.problem)
    title = _title(table.peak_phase, width)
    note = "outdated" if stale else progress_words(view, width - len(title) - 5)
    lines = [
        rule(title, width, note),
        *_problem(view.problem and f"✗ {view.problem}", width, height - 1),
    ]
    columns = _columns(table, view.before, width, stale)
    if columns.phases:
        lines.append(_head(table, columns))
    components = _component_rows(table, columns)
    totals = _totals(table, columns)
    lines += _largest(components, height - len(lines) - len(totals))
    lines += cut(totals, height - len(lines))
    lines += _remarks(view, table, width, height - len(lines))
    return lines[:height]


@dataclass(frozen=True)
class _Columns:
    """The columns of the table: names, bytes at the peak, changes, and a column for each of some phases."""

    name_width: int
    change_width: int
    """0 if there is no room for changes."""
    phases: tuple[str, ...]
    changes: dict[str, int]
    """By how much the last change of the plan moved each row."""
    stale: bool
    """Whether the numbers belong to an earlier plan."""


def _columns(table: MemoryTable, before: MemoryTable | None, width: int, stale: bool) -> _Columns:
    phases = shown_phases(table, width)
    change_width = CHANGE if width >= 14 + NUMBER + CHANGE else 0
    name_width = min(width - NUMBER - change_width - 1 - len(phases) * (NUMBER + 1), 28)
    return _Columns(name_width, change_width, phases, _changes(table, before), stale)


def _head(table: MemoryTable, columns: _Columns) -> Line:
    """The names of the columns."""
    head = [Span(" " * (columns.name_width + 1)), Span(right("at peak", NUMBER), "dim")]
    head.append(Span(right("±", columns.change_width), "dim"))
    for phase in columns.phases:
        role = "strong" if phase == table.peak_phase else "dim"
        head.append(Span(right(SHORT_PHASES.get(phase, phase), NUMBER + 1), role))
    return head


def _component_rows(table: MemoryTable, columns: _Columns) -> list[tuple[int, Line]]:
    """A row for each component, and one for a correction by runs, each with its bytes at the peak."""
    rows: list[tuple[int, Line]] = []
    by_name = {component.name: component for component in table.components}
    for name, size in components_of(table).items():
        component = by_name[name]
        amount = amount_word(size, component.tier_at(table.peak_phase))
        line = _row(name, amount, name, columns, "dim" if columns.stale or size == 0 else "")
        for phase in columns.phases:
            role = "dim" if columns.stale or phase != table.peak_phase else "strong"
            amount = amount_word(component.at(phase), component.tier_at(phase))
            line.append(Span(right(amount, NUMBER + 1), role))
        rows.append((size, line))
    if table.correction_bytes:
        amount = f"{table.tier}{signed_bytes(table.correction_bytes).rjust(NUMBER - 1)}"
        line = _row(CORRECTION, amount, CORRECTION, columns, "dim" if columns.stale else "")
        rows.append((abs(table.correction_bytes), line))
    return rows


def _row(name: str, amount: str, changes_key: str, columns: _Columns, role: str) -> Line:
    """The name of a row, its bytes at the peak, and by how much the last change of the plan moved them."""
    return [
        Span(" " + left(_narrow(name, columns.name_width), columns.name_width), role),
        Span(right(amount, NUMBER), role),
        _change(columns.changes.get(changes_key, 0), columns),
    ]


def _largest(parts: list[tuple[int, Line]], room: int) -> list[Line]:
    """The rows of components, each with its bytes; the smallest ones are left out if there is no room for all."""
    if len(parts) <= room:
        return [line for _, line in parts]
    largest = sorted(parts, key=lambda part: -part[0])[: max(0, room - 1)]
    left_out = len(parts) - len(largest)
    more = [Span(f" … {left_out} smaller", "dim")]
    return [*(part[1] for part in parts if part in largest), *([more] if room > 0 else [])]


def _problem(words: str, width: int, room: int) -> list[Line]:
    """Why the plan is not priced, whole if the table has the room."""
    return [[Span(f" {row}", "bad")] for row in wrap(words, width - 2, room)] if words else []


def _narrow(name: str, width: int) -> str:
    """A component's name, short enough to leave a cell before its number."""
    return name if len(name) < width else _SHORT_NAMES.get(name, name)


def _title(phase: str | None, width: int) -> str:
    if width < 50:
        return "memory at peak" if phase is None else f"peak: {SHORT_PHASES.get(phase, phase)}"
    return "memory at peak" + ("" if phase is None else f" · {phase}")


def _changes(table: MemoryTable, before: MemoryTable | None) -> dict[str, int]:
    """The change of each row, with both tables at the tier of the less exact one."""
    if before is None:
        return {}
    now, then = alike(table, before)
    old = components_of(then)
    changes = {name: count - old.get(name, 0) for name, count in components_of(now).items()}
    changes[CORRECTION] = now.correction_bytes - then.correction_bytes
    for name in ("peak_bytes", "reserved_bytes", "device_bytes", "host_bytes"):
        changes[name] = getattr(now, name) - getattr(then, name)
    return changes


def _remarks(view: PlanView, table: MemoryTable, width: int, room: int) -> list[Line]:
    """The source of the exact numbers, or why there are none, in at most `room` rows."""
    exact = view.exact
    if room <= 0 or view.stale or view.problem:
        return []
    if table.source:
        words, role = f"{Tier.EXACT} {table.source}", "dim"
        words += f" · {table.caveat}" if table.caveat else ""
        if table.out_of_memory:
            words, role = f"✗ out of memory, says {table.source}", "bad"
    elif exact.problem:
        words, role = f"not exact: {exact.problem}", "warn"
    elif exact.seconds is not None:
        verb = "compiled" if table.backend == "jax" else "traced"
        words, role = (
            f"this plan's own step is being {verb} · {view.keys.shown('plan', 'exact')} stops it",
            "dim",
        )
    else:
        words, role = exact.resting and f"exact numbers: {exact.resting}", "dim"
    return [[Span(f" {text}", role)] for text in wrap(words, width - 2, min(2, room))]


def _totals(table: MemoryTable, columns: _Columns) -> list[Line]:
    """The rows of what is allocated, reserved and taken; after the device's bytes, their band."""
    rows = [
        ("allocated", "peak_bytes", table.tier),
        ("reserved", "reserved_bytes", table.reserved_tier),
        ("on device", "device_bytes", table.device_tier),
        ("host RAM", "host_bytes", table.host_tier),
    ]
    lines: list[Line] = []
    for name, key, tier in rows:
        first = name == "allocated"
        role = "dim" if columns.stale else "strong" if first else ""
        line = _row(name, amount_word(getattr(table, key), tier), key, columns, role)
        if first:
            for phase in columns.phases:
                peak = phase == table.peak_phase and not columns.stale
                amount = amount_word(table.phases.get(phase, 0), table.phase_tier(phase))
                line.append(Span(right(amount, NUMBER + 1), "strong" if peak else "dim"))
        lines.append(line)
        if key == "device_bytes":
            low, high = map(format_bytes, table.band_bytes)
            between = right(f"{low} – {high}", NUMBER + columns.change_width)
            lines.append(
                [Span(" " + left("  between", columns.name_width), "dim"), Span(between, "dim")]
            )
    return lines


def _change(change: int, columns: _Columns) -> Span:
    width = columns.change_width
    if width == 0:
        return Span("")
    if change == 0 or columns.stale:
        return Span(" " * width)
    return Span(right(signed_bytes(change), width), "good" if change < 0 else "warn")


class MemoryTableView(Painted):
    """The top right of the plan screen."""

    _view: PlanView | None = None

    def show(self, view: PlanView) -> None:
        self._view = view
        self.repaint()

    def draw(self, width: int, height: int) -> list[Line]:
        return table_lines(self._view, width, height) if self._view else []
