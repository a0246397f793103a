"""Which windows to cut from a table."""

from __future__ import annotations

import msgspec


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """Which windows to cut from a table."""

    table: str
    """A CSV, TSV, Parquet, JSON or JSON Lines file, which may be compressed."""
    out: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    """Without any, the file has no targets: it is for predictions alone."""
    group: str | None = None
    """The column that says to which series a row belongs. The rows of a series are together."""
    length: int = 32
    stride: int = 1
    ahead: int = 0

    @property
    def rows(self) -> int:
        """The rows that a window and its target take."""
        return self.length + (self.ahead if self.outputs else 0)
