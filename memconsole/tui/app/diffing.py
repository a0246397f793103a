"""An app that sends only the cells that changed."""

from __future__ import annotations

import os

from rich.color import ColorSystem
from rich.console import RenderableType
from textual import events
from textual._compositor import ChopsUpdate, LayoutUpdate
from textual.app import App
from textual.screen import Screen

from memconsole.tui.app.terminal_diff import Difference, TerminalDiff


class DiffingApp(App[None], inherit_bindings=False):
    """Puts a `TerminalDiff` between Textual's updates and the terminal."""

    def __init__(self) -> None:
        if not os.environ.get("NO_COLOR"):
            os.environ.pop("NO_COLOR", None)  # Textual obeys an empty one, too
        super().__init__()
        self.terminal = TerminalDiff()

    @property
    def colours(self) -> ColorSystem | None:
        """The colours that are sent; None with NO_COLOR, where bold, dim and reversed text are left."""
        return None if self.no_color else self.console._color_system or ColorSystem.TRUECOLOR

    def on_resize(self, event: events.Resize) -> None:
        """Forget what is shown: on a resize, terminals reflow, cut or clear it."""
        self.terminal.forget()

    def on_load(self) -> None:
        """Paint again after each suspension, in which the shell has written over the screen."""
        self.app_resume_signal.subscribe(self, lambda _: self.action_repaint())

    def action_repaint(self) -> None:
        """Send the whole screen again."""
        self.terminal.forget()
        self.screen.refresh(repaint=True, layout=True)
        for widget in self.screen.query("*"):
            widget.refresh()

    def _display(self, screen: Screen[object], renderable: RenderableType | None) -> None:
        """Textual calls this with each update. One that is not sent must not count as shown."""
        sends = self._running and not self._closed and self._driver is not None
        if (
            isinstance(renderable, ChopsUpdate | LayoutUpdate)
            and sends
            and not self._batch_count
            and not self.is_headless
        ):
            text = self.terminal.render(renderable, self.size.width, self.size.height, self.colours)
            if text:
                super()._display(screen, Difference(text))  # type: ignore[arg-type]
            return
        super()._display(screen, renderable)
