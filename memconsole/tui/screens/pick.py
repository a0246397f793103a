"""A picker with type-ahead: catalog entries, and the typed text if any text is allowed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Input

from memconsole.devices.cluster import PARTITIONS
from memconsole.devices.reading import Devices
from memconsole.plan.plan import Plan
from memconsole.plan.tasks import task_of
from memconsole.tui.draw.ink import Line, Span, cleaned, fit_parts, left, width_of
from memconsole.tui.draw.words import verdict_mark
from memconsole.tui.keys.rows import bindings
from memconsole.tui.screens.base import ConsoleModal
from memconsole.tui.widgets.choice_list import ChoiceList
from memconsole.tui.widgets.entry import Entry
from memconsole.tui.widgets.paths import completed, completions, looks_like_path
from memconsole.units import format_bytes, format_count

SLURM = "slurm:"
"""Begins the value of a choice that is a partition of a Slurm cluster."""
WAIT_SECONDS = 0.2
"""Seconds that the device picker waits for a cluster's partitions. If they come later, the next picker shows them."""
MOST_FILES = 200
"""Most files that the data picker lists."""


@dataclass(frozen=True)
class Choice:
    """One row: its value, its name, and a note."""

    value: str
    label: str
    note: str = ""
    label_width: int = 22
    also: str = ""
    """Words that find it and are not shown."""
    sentence: str = ""
    """What the note means, shown above the footer while the row is selected."""


def matching(choices: Sequence[Choice], text: str) -> list[Choice]:
    """The choices that contain every typed word. The choice with exactly this name comes first, then names that start with
    the first word."""
    words = text.lower().split()
    if not words:
        return list(choices)
    found = [
        c for c in choices if all(word in f"{c.label} {c.note} {c.also}".lower() for word in words)
    ]
    return sorted(
        found,
        key=lambda c: (
            c.label.lower() != text.strip().lower(),
            text.strip().lower() not in c.also.split("\n"),
            not c.label.lower().startswith(words[0]),
            words[0] not in c.label.lower(),
        ),
    )


def choices_for(kind: str, plan: Plan, devices: Devices | None) -> tuple[list[Choice], str | None]:
    """What can be picked, and what may be typed instead, or None."""
    from memconsole.plan import catalog
    from memconsole.plan.plan import installed_backends

    if kind == "model":
        rows = []
        for name, model in catalog.models().items():
            size = "sized by model.target_params"
            if model.parameters:
                size = f"{format_count(model.parameters)} parameters"
            rows.append(Choice(name, name, f"{size} · {model.label}"))
        return rows, "directory or hub id"
    if kind == "dataset":
        own = task_of(plan).files
        if own:
            return _files_with(own, plan), f"path ({', '.join(own)})"
        rows = []
        for name, data in catalog.datasets().items():
            size = f"{format_bytes(data.bytes)} · " if data.bytes else ""
            rows.append(Choice(name, name, f"{size}{data.label or data.note or data.where}"))
        return rows, "path, hf://owner/name or *.h5"
    if kind == "backend":
        return [Choice(name, name, _BACKENDS.get(name, "")) for name in installed_backends()], None
    rows = [Choice("auto", "auto", "the best device of this machine")]
    local = {reading.id: reading for reading in (devices.devices if devices else ())}
    for reading in local.values():
        total = reading.total_bytes
        size = format_bytes(total) if isinstance(total, int) else "size n/a"
        note = f"{size} {reading.memory_label} · {reading.name} · this machine"
        rows.append(Choice(reading.id, reading.id, note))
    if "cpu" not in local:
        rows.append(Choice("cpu", "cpu", "this machine's processor"))
    for partition in PARTITIONS.look(WAIT_SECONDS):
        value = SLURM + partition.name
        rows.append(Choice(value, value, f"a Slurm job · {partition.words}"))
    verdicts = _verdicts(plan)
    for name, device in catalog.devices().items():
        size = f"{format_bytes(device.total_bytes)} {device.memory_label}"
        note = f"{size} · {verdicts.get(name, 'not for this backend')} · {device.label} · catalog"
        rows.append(Choice(name, name, note))
    return rows, "device name"


def _files_with(suffixes: tuple[str, ...], plan: Plan) -> list[Choice]:
    """The files with one of these suffixes in the working folder and beside the plan's data."""
    beside = Path(plan.data.source).expanduser().parent
    found: dict[Path, Choice] = {}
    with contextlib.suppress(OSError):
        here = Path.cwd()
        for folder in (here, here / beside):
            for file in sorted(folder.iterdir()) if folder.is_dir() else ():
                if file.suffix.lower() in suffixes and file.is_file():
                    name = str(file.relative_to(here)) if file.is_relative_to(here) else str(file)
                    note = f"{format_bytes(file.stat().st_size)} · {file.parent}"
                    found.setdefault(file.resolve(), Choice(name, name, note))
    return list(found.values())[:MOST_FILES]


def _verdicts(plan: Plan) -> dict[str, str]:
    """Whether the current plan fits each catalog device, and which is the smallest that it fits."""
    from memconsole.devices.planned import catalog_budgets
    from memconsole.memory.answers.solve import planned_on, smallest_device
    from memconsole.memory.estimate import table_of
    from memconsole.plan.plan import PlanError

    try:
        budgets = catalog_budgets(plan)
        tables = {name: table_of(planned_on(plan, name), on) for name, on in budgets.items()}
    except PlanError:
        return dict.fromkeys(catalog_names(), "not priced")
    words = {name: verdict_mark(table.verdict, "too small") for name, table in tables.items()}
    smallest = smallest_device(plan, budgets)
    return words | ({smallest: "✓ smallest that fits"} if smallest else {})


def catalog_names() -> tuple[str, ...]:
    """Every catalog device."""
    from memconsole.plan import catalog

    return tuple(catalog.devices())


_BACKENDS = {
    "torch": "PyTorch: eager or torch.compile; CPU, CUDA, ROCm, Apple MPS",
    "jax": "JAX, flax NNX: compiled by XLA; CPU, CUDA, TPU",
}


class PickScreen(ConsoleModal, inherit_bindings=False):
    """Type to narrow, arrows to move, enter to choose. Closes with the value or None.

    A note that is too long ends with its last whole part. The selected row's sentence, or its note
    if that is cut, stands above the footer.
    """

    SCREEN = "pick"
    BINDINGS = bindings("pick")

    def __init__(
        self,
        heading: str,
        choices: Sequence[Choice],
        present: str = "",
        free_text: str | None = None,
    ) -> None:
        super().__init__()
        self.heading = heading
        self._choices = tuple(choices)
        self._present = present
        self._free_text = free_text
        self._found = list(choices)
        self._cursor = next((n for n, c in enumerate(choices) if c.value == present), 0)

    def compose_body(self) -> ComposeResult:
        with Vertical(id="body", classes="form"):
            yield Entry(placeholder="type to narrow", id="entry")
            yield ChoiceList(id="choices")

    def on_mount(self) -> None:
        self.part(Entry).focus()

    def title_line(self) -> tuple[str, str]:
        return self.heading, f"or type a {self._free_text}" if self._free_text else ""

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        text = event.value
        self._found = matching(self._choices, text)
        typed = text.strip()
        if self._free_text and typed and all(c.value != typed for c in self._found):
            self._found.append(Choice(typed, typed, f"as typed: {self._free_text}"))
        if self._takes_paths and looks_like_path(typed):
            there = completions(typed)
            notes = {True: "folder", False: "file"}
            self._found += [
                Choice(name, name, notes[name.endswith("/")]) for name in there if name != typed
            ]
        self._cursor = 0
        self.redraw()

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.action_accept()

    @on(Entry.Ended)
    def _ended(self, message: Entry.Ended) -> None:
        """Home and end move the list while nothing is typed."""
        message.stop()
        self.action_move(-len(self._found) - 1 if message.first else len(self._found) + 1)

    @on(ChoiceList.Clicked)
    def _clicked(self, message: ChoiceList.Clicked) -> None:
        """A click selects a choice; a click on the selected one chooses it."""
        message.stop()
        self._cursor = min(message.row, max(0, len(self._found) - 1))
        self.redraw()
        if message.again:
            self.action_accept()

    @property
    def _takes_paths(self) -> bool:
        return any(word in (self._free_text or "") for word in ("path", "directory", "file"))

    def conditions(self) -> set[str]:
        found = super().conditions()
        return found | {"paths"} if self._takes_paths else found

    def action_complete(self) -> None:
        entry = self.part(Entry)
        entry.value = completed(entry.value)
        entry.cursor_position = len(entry.value)

    def action_move(self, rows: int) -> None:
        if self._found:
            cursor = self._cursor + rows
            last = len(self._found) - 1
            self._cursor = cursor % (last + 1) if abs(rows) == 1 else min(max(0, cursor), last)
            self.redraw()

    def action_accept(self) -> None:
        if self._found:
            self.dismiss(cleaned(self._found[self._cursor].value))

    def draw_body(self) -> None:
        width = max(20, self.size.width)
        lines: list[Line] = []
        below = ""
        for place, choice in enumerate(self._found):
            mark = "●" if choice.value == self._present else " "
            head = [
                Span(f"{mark} ", "accent"),
                Span(left(choice.label, choice.label_width), "strong"),
            ]
            room = width - choice.label_width - 10
            if place == self._cursor:
                cut = width_of([Span(choice.note)]) > room
                below = choice.sentence or (choice.note if cut else "")
            lines.append([*head, Span("  " + fit_parts(choice.note, room), "dim")])
        self.part(ChoiceList).show(lines, self._cursor)
        self.notice(below, "dim")
