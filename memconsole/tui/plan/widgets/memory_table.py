"""The memory table: components at the peak, each phase if there is room, and the totals."""

from __future__ import annotations

from memconsole.memory.exact.sharpen import alike
from memconsole.memory.table import COMPONENTS, MemoryTable, Tier
from memconsole.tui.draw.bars import bar
from memconsole.tui.draw.lines import Line, Span, cut, left, right, rule, wrap
from memconsole.tui.draw.words import signed_bytes
from memconsole.tui.views.plan_view import PlanView
from memconsole.tui.widgets.painted import Painted
from memconsole.units import format_bytes

_SHORT = {
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "optimizer step": "step",
    "evaluation": "evaluate",
    "checkpoint": "save",
}
CORRECTION = "correction by runs"
"""The row of a calibrated table that makes its components add up to the peak."""
_NARROW = {
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


def _amount(count: int, tier: Tier) -> str:
    return "—" if count == 0 else f"{tier} {format_bytes(count).rjust(NUMBER - 2)}"


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
    phases = shown_phases(table, width)
    change_width = CHANGE if width >= 14 + NUMBER + CHANGE else 0
    name_width = min(width - NUMBER - change_width - 1 - len(phases) * (NUMBER + 1), 28)
    widths = name_width, change_width
    if phases:
        lines.append(_head(table, phases, widths))
    changes = _changes(table, view.before)
    parts = _component_rows(table, phases, widths, stale, changes)
    totals = _totals(table, phases, widths, stale, changes)
    lines += _largest(parts, height - len(lines) - len(totals))
    lines += cut(totals, height - len(lines))
    lines += _remarks(view, table, width, height - len(lines))
    return lines[:height]


Widths = tuple[int, int]
"""Cells of the column of names, and of the column of changes, which is 0 if there is no room for it."""


def _head(table: MemoryTable, phases: tuple[str, ...], widths: Widths) -> Line:
    """The names of the columns."""
    name_width, change_width = widths
    head = [Span(" " * (name_width + 1)), Span(right("at peak", NUMBER), "dim")]
    head.append(Span(right("±", change_width), "dim"))
    for phase in phases:
        role = "strong" if phase == table.peak_phase else "dim"
        head.append(Span(right(_SHORT.get(phase, phase), NUMBER + 1), role))
    return head


def _component_rows(
    table: MemoryTable,
    phases: tuple[str, ...],
    widths: Widths,
    stale: bool,
    changes: dict[str, int],
) -> list[tuple[int, Line]]:
    """A row for each component, and one for a correction by runs, each with its bytes at the peak."""
    rows: list[tuple[int, Line]] = []
    by_name = {component.name: component for component in table.components}
    for name, count in components_of(table).items():
        component = by_name[name]
        amount = _amount(count, component.tier_at(table.peak_phase))
        role = "dim" if stale or count == 0 else ""
        line = _row(name, amount, changes.get(name, 0), widths, stale, role)
        for phase in phases:
            role = "dim" if stale or phase != table.peak_phase else "strong"
            amount = _amount(component.at(phase), component.tier_at(phase))
            line.append(Span(right(amount, NUMBER + 1), role))
        rows.append((count, line))
    if table.correction_bytes:
        amount = f"{table.tier}{signed_bytes(table.correction_bytes).rjust(NUMBER - 1)}"
        change = changes.get(CORRECTION, 0)
        line = _row(CORRECTION, amount, change, widths, stale, "dim" if stale else "")
        rows.append((abs(table.correction_bytes), line))
    return rows


def _row(name: str, amount: str, change: int, widths: Widths, stale: bool, role: str) -> Line:
    """The name of a row, its bytes at the peak, and by how much the last change of the plan moved them."""
    name_width, change_width = widths
    return [
        Span(" " + left(_narrow(name, name_width), name_width), role),
        Span(right(amount, NUMBER), role),
        _change(change, change_width, stale),
    ]


def _largest(parts: list[tuple[int, Line]], room: int) -> list[Line]:
    """The rows of components, each with its bytes; the smallest ones are left out if there is no room for all."""
    if len(parts) <= room:
        return [line for _, line in parts]
    kept = sorted(parts, key=lambda part: -part[0])[: max(0, room - 1)]
    left_out = len(parts) - len(kept)
    more = [Span(f" … {left_out} smaller", "dim")]
    return [*(part[1] for part in parts if part in kept), *([more] if room > 0 else [])]


def _problem(words: str, width: int, room: int) -> list[Line]:
    """Why the plan is not priced, whole if the table has the room."""
    return [[Span(f" {row}", "bad")] for row in wrap(words, width - 2, room)] if words else []


def _narrow(name: str, width: int) -> str:
    """A component's name, short enough to leave a cell before its number."""
    return name if len(name) < width else _NARROW.get(name, name)


def _title(phase: str | None, width: int) -> str:
    if width < 50:
        return "memory at peak" if phase is None else f"peak: {_SHORT.get(phase, phase)}"
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


def _totals(
    table: MemoryTable,
    phases: tuple[str, ...],
    widths: Widths,
    stale: bool,
    changes: dict[str, int],
) -> list[Line]:
    rows = [
        ("allocated", "peak_bytes", table.tier),
        ("reserved", "reserved_bytes", table.reserved_tier),
        ("on device", "device_bytes", table.device_tier),
        ("host RAM", "host_bytes", table.host_tier),
    ]
    lines: list[Line] = []
    for name, key, tier in rows:
        first = name == "allocated"
        role = "dim" if stale else "strong" if first else ""
        amount = _amount(getattr(table, key), tier)
        line = _row(name, amount, changes.get(key, 0), widths, stale, role)
        if first:
            for phase in phases:
                peak = phase == table.peak_phase and not stale
                count = table.phases.get(phase, 0)
                amount = _amount(count, table.phase_tier(phase))
                line.append(Span(right(amount, NUMBER + 1), "strong" if peak else "dim"))
        lines.append(line)
        if key == "device_bytes":
            low, high = map(format_bytes, table.band_bytes)
            name_width, change_width = widths
            between = right(f"{low} – {high}", NUMBER + change_width)
            lines.append([Span(" " + left("  between", name_width), "dim"), Span(between, "dim")])
    return lines


def _change(change: int, width: int, stale: bool) -> Span:
    if width == 0:
        return Span("")
    if change == 0 or stale:
        return Span(" " * width)
    return Span(right(signed_bytes(change), width), "good" if change < 0 else "warn")


def phase_lines(view: PlanView, width: int, height: int) -> list[Line]:
    """Live bytes of every phase as bars; the peak is marked."""
    if view.estimate is None or height <= 1:
        return []
    table = view.estimate.table
    lines = [rule("phases", width, "outdated" if view.stale else "live bytes")]
    phases = list(table.phases)
    if height - 1 < len(phases):
        # The highest ones, in order of time.
        kept = sorted(phases, key=lambda p: -table.phases[p])[: height - 1]
        phases = [p for p in phases if p in kept]
    room = width - 16 - NUMBER
    for phase in phases:
        count = table.phases[phase]
        peak = phase == table.peak_phase
        role = "dim" if view.stale else "strong" if peak else ""
        lines.append(
            [
                Span((" ▲ " if peak else "   "), "warn"),
                Span(left(_SHORT.get(phase, phase), 9), role),
                *bar(count, max(1, *table.phases.values()), room, role="warn" if peak else "train"),
                Span(right(_amount(count, table.phase_tier(phase)), NUMBER + 2), role),
            ]
        )
    return lines[:height]


class MemoryTableView(Painted):
    """The top right of the plan screen."""

    _view: PlanView | None = None

    def show(self, view: PlanView) -> None:
        self._view = view
        self.repaint()

    def draw(self, width: int, height: int) -> list[Line]:
        return table_lines(self._view, width, height) if self._view else []


class PhaseStrip(Painted):
    """Live bytes over one training step."""

    _view: PlanView | None = None

    def show(self, view: PlanView) -> None:
        self._view = view
        self.repaint()

    def draw(self, width: int, height: int) -> list[Line]:
        return phase_lines(self._view, width, height) if self._view else []
