"""The error for a plan that cannot be used, and how its message shows values."""

from __future__ import annotations

from typing import Any

from memconsole.errors import UserError


class PlanError(UserError, ValueError):
    """A plan that cannot be used; the message is one line for the person who wrote it."""

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


def printable(text: str, limit: int = 200) -> str:
    """`text` on one line: control characters escaped, the middle of a long one left out."""
    if len(text) > limit:
        text = f"{text[: limit - 40]}…{text[-39:]}"
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def quote(value: Any) -> str:
    """A value as an error line shows it: text in quotes, the rest as TOML or Python writes it."""
    if isinstance(value, str):
        return f'"{printable(value)}"'
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of more than 60 digits"
    return printable(repr(value))
