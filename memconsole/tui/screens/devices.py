"""Shows every device of this machine and how full it is, with a reason for each missing number."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical

from memconsole.devices.reading import Devices
from memconsole.tui.draw.readings import device_lines
from memconsole.tui.keys.rows import bindings
from memconsole.tui.screens.base import ConsoleScreen
from memconsole.tui.widgets.text_lines import TextLines

FRAME_ROWS = 2
"""Rows of the title and the keys."""


class DevicesScreen(ConsoleScreen, inherit_bindings=False):
    """Shows the probe's newest reading."""

    SCREEN = "devices"
    BINDINGS = bindings("devices")

    def compose_body(self) -> ComposeResult:
        with Vertical(id="body"):
            yield TextLines(id="text")

    def devices_changed(self, devices: Devices) -> None:
        """Show a new reading."""
        self.redraw()

    def draw_body(self) -> None:
        width, height = max(20, self.size.width - 2), self.size.height - FRAME_ROWS
        self.part(TextLines, "text").show(device_lines(self.console.devices, width, height))

    def title_line(self) -> tuple[str, str]:
        devices = self.console.devices
        return "devices", f"{len(devices.devices)} found" if devices else ""

    def action_move(self, rows: int) -> None:
        self.part(TextLines, "text").scroll_by(rows)

    async def action_back(self) -> None:
        await self.console.action_go_back()
