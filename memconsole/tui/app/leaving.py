"""An app that ignores keys once it has begun to close."""

from __future__ import annotations

from rich.console import RenderableType

from memconsole.tui.app.diffing import DiffingApp


class LeavingApp(DiffingApp, inherit_bindings=False):
    """Knows when it is closing. A screen that a key opened then would never be composed."""

    def __init__(self) -> None:
        super().__init__()
        self.leaving = False

    def exit(
        self, result: None = None, return_code: int = 0, message: RenderableType | None = None
    ) -> None:
        self.leaving = True
        super().exit(result, return_code, message)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether an action of the app is available."""
        return False if self.leaving else super().check_action(action, parameters)
