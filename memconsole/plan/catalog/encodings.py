"""How the text of a file is encoded, by its first bytes."""

from __future__ import annotations

HEAD_BYTES = 4096
"""Bytes of a file in which binary data is looked for."""
_MARKS = (
    (b"\xff\xfe\0\0", "utf-32-le"),
    (b"\0\0\xfe\xff", "utf-32-be"),
    (b"\xff\xfe", "utf-16-le"),
    (b"\xfe\xff", "utf-16-be"),
)
"""Byte order marks."""


def encoding_of(head: bytes) -> str:
    """UTF-8, unless a file begins with the byte order mark of UTF-16 or UTF-32."""
    return next((name for mark, name in _MARKS if head.startswith(mark)), "utf-8")


def unit_bytes(encoding: str) -> int:
    """Bytes of a code unit: 1, 2 or 4."""
    return {"utf-16": 2, "utf-32": 4}.get(encoding[:6], 1)


def is_binary(head: bytes) -> bool:
    """Whether a file begins with bytes that no text has."""
    return encoding_of(head) == "utf-8" and b"\0" in head
