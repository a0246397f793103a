"""A listener to the opening of data that says nothing."""

from __future__ import annotations


class Quiet:
    """A `Teller`."""

    def phase(self, phase: str, detail: str = "") -> None: ...

    def warning(self, message: str) -> None: ...

    def tick(self) -> None: ...

    def wait_while_paused(self) -> None: ...
