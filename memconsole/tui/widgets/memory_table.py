"""The memory table: components by bytes at the peak, per phase where there is room, and the totals."""

from __future__ import annotations

from memconsole.memory.table import COMPONENTS, PHASES, MemoryTable
from memconsole.tui.bars import bar
from memconsole.tui.ink import Line, Span, fit, left, right, rule
from memconsole.tui.views import PlanView
from memconsole.tui.widgets.painted import Painted
from memconsole.tui.words import signed_bytes
from memconsole.units import format_bytes

_SHORT = {
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "optimizer step": "step",
    "evaluation": "evaluate",
    "checkpoint": "save",
}
NUMBER = 9
CHANGE = 10


def components_of(table: MemoryTable) -> dict[str, int]:
    """Bytes of every component at the peak, in table order, the canonical ones first."""
    found = {component.name: component.at(table.peak_phase) for component in table.components}
    ordered = {name: found.pop(name) for name in COMPONENTS if name in found}
    return ordered | found


def shown_phases(table: MemoryTable, width: int) -> tuple[str, ...]:
    """The phases that get a column of their own: none on narrow screens."""
    known = tuple(p for p in PHASES if p in table.phases)
    known += tuple(p for p in table.phases if p not in known)
    room = (width - 18 - NUMBER - CHANGE) // (NUMBER + 1)
    if room < 3:
        return ()
    # Where not all fit, the phases of a training step come first and the peak is always shown.
    kept = known[:room]
    if table.peak_phase in known and table.peak_phase not in kept:
        kept = (*kept[:-1], table.peak_phase)
    return kept


def _amount(count: int) -> str:
    return "—" if count == 0 else format_bytes(count)


def table_lines(view: PlanView, width: int, height: int) -> list[Line]:
    """Title, one row per component, totals. Pure in `view`."""
    if view.estimate is None:
        note = view.problem or "pricing this plan"
        return [rule("memory at peak", width), [Span(" " + fit(note, width - 1), "dim")]]
    table = view.estimate.table
    stale = view.stale or bool(view.problem)
    note = "outdated" if stale else f"{table.tier} {table.peak_phase}"
    lines = [rule("memory at peak", width, note)]
    phases = shown_phases(table, width)
    change_width = CHANGE if width >= 14 + NUMBER + CHANGE else 0
    name_width = width - NUMBER - change_width - 1 - len(phases) * (NUMBER + 1)
    name_width = min(name_width, 28)
    if phases:
        head = [Span(" " * (name_width + 1)), Span(right("at peak", NUMBER), "dim")]
        head.append(Span(right("±", change_width), "dim"))
        head += [Span(right(_SHORT.get(p, p), NUMBER + 1), "strong" if p == table.peak_phase else "dim") for p in phases]  # fmt: skip
        lines.append(head)
    before = components_of(view.before) if view.before else {}
    now = components_of(table)
    by_name = {component.name: component for component in table.components}
    for name, count in now.items():
        role = "dim" if stale or count == 0 else ""
        line = [
            Span(" " + left(name, name_width), role),
            Span(right(_amount(count), NUMBER), role),
            _change(count - before.get(name, 0) if view.before else 0, change_width, stale),
        ]
        component = by_name[name]
        for phase in phases:
            role = "dim" if stale or phase != table.peak_phase else "strong"
            line.append(Span(right(_amount(component.at(phase)), NUMBER + 1), role))
        lines.append(line)
    lines += _totals(view, table, phases, name_width, change_width, stale)
    return lines[:height]


def _totals(
    view: PlanView,
    table: MemoryTable,
    phases: tuple[str, ...],
    name_width: int,
    change_width: int,
    stale: bool,
) -> list[Line]:
    before = view.before
    rows = [
        ("allocated", table.peak_bytes, before.peak_bytes if before else None),
        ("reserved", table.reserved_bytes, before.reserved_bytes if before else None),
        ("on the device", table.device_bytes, before.device_bytes if before else None),
        ("host RAM", table.host_bytes, before.host_bytes if before else None),
    ]
    if table.peak_bytes == table.reserved_bytes == table.device_bytes:
        del rows[1:3]
    lines: list[Line] = []
    for name, count, earlier in rows:
        first = name == "allocated"
        role = "dim" if stale else "strong" if first else ""
        line = [
            Span(" " + left(f"{name} {table.tier}" if first else name, name_width), role),
            Span(right(_amount(count), NUMBER), role),
            _change(count - earlier if earlier is not None else 0, change_width, stale),
        ]
        if first:
            for phase in phases:
                peak = phase == table.peak_phase and not stale
                count = table.phases.get(phase, 0)
                line.append(Span(right(_amount(count), NUMBER + 1), "strong" if peak else "dim"))
        lines.append(line)
    return lines


def _change(change: int, width: int, stale: bool) -> Span:
    if width == 0:
        return Span("")
    if change == 0 or stale:
        return Span(" " * width)
    return Span(right(signed_bytes(change), width), "good" if change < 0 else "warn")


def phase_lines(view: PlanView, width: int, height: int) -> list[Line]:
    """Live bytes of every phase as a bar, the peak marked."""
    if view.estimate is None or height <= 1:
        return []
    table = view.estimate.table
    lines = [rule("phases", width, "live bytes")]
    phases = [p for p in PHASES if p in table.phases]
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
                *bar(count, max(1, table.peak_bytes), room, role="warn" if peak else "train"),
                Span(right(_amount(count), NUMBER + 2), role),
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
