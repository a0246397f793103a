"""The terminal's driver: asks for clicks and the wheel, never for every movement of the mouse."""

from __future__ import annotations

from textual.drivers.linux_driver import LinuxDriver

CLICKS, SGR = 1000, 1006
"""Terminal modes: presses, releases and the wheel; their positions as numbers."""


class ClickDriver(LinuxDriver):
    """Textual also asks for movements (mode 1003), which cost a slow link bytes and are not used."""

    def _enable_mouse_support(self) -> None:
        if self._mouse:
            for mode in (CLICKS, SGR):
                self.write(f"\x1b[?{mode}h")
            self.flush()

    def take_mouse(self, taken: bool) -> None:
        """Receive clicks and the wheel, or leave the mouse to the terminal."""
        if taken:
            self._mouse = True
            self._enable_mouse_support()
        else:
            self._disable_mouse_support()
            self.flush()
            self._mouse = False
