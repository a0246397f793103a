"""Every device of this machine and how full it is; what cannot be known says why."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical

from memconsole.devices.reading import Devices
from memconsole.tui.gauges import reading_lines
from memconsole.tui.ink import Line, Span, columns, fit, rule
from memconsole.tui.keys import bindings
from memconsole.tui.screens.base import ConsoleScreen
from memconsole.tui.widgets.text_lines import TextLines


def device_lines(devices: Devices | None, width: int) -> list[Line]:
    """All readings, in two columns where they fit, then the notes."""
    if devices is None:
        return [[Span(" reading the devices …", "dim")]]
    two = width >= 110 and len(devices.devices) > 1
    part = (width - 3) // 2 if two else width
    blocks = [[*reading_lines(reading, part), []] for reading in devices.devices]
    lines: list[Line] = []
    if two:
        for first, second in zip(blocks[::2], [*blocks[1::2], []], strict=False):
            lines += columns(first, second, 3, part)
    else:
        for block in blocks:
            lines += block
    if not devices.devices:
        lines.append([Span(" no device was found", "warn")])
    if devices.notes:
        lines.append(rule("not here", width))
        lines += [[Span(fit(f" {note}", width), "dim")] for note in devices.notes]
    return lines


class DevicesScreen(ConsoleScreen, inherit_bindings=False):
    """Follows the probe."""

    SCREEN = "devices"
    BINDINGS = bindings("devices")

    def compose_body(self) -> ComposeResult:
        with Vertical(id="body"):
            yield TextLines(id="text")

    def on_mount(self) -> None:
        self._show()

    def on_resize(self) -> None:
        self._show()

    def devices_changed(self, devices: Devices) -> None:
        """A new reading."""
        self._show()

    def _show(self) -> None:
        if self.composed:
            width = max(20, self.size.width - 2)
            self.query_one("#text", TextLines).show(device_lines(self.console.devices, width))
            self.refresh_frame()

    def title_line(self) -> tuple[str, str]:
        devices = self.console.devices
        return "devices", f"{len(devices.devices)} found" if devices else ""

    def action_move(self, rows: int) -> None:
        self.query_one("#text", TextLines).scroll_by(rows)

    async def action_back(self) -> None:
        await self.console.action_show_plan()
