"""Decodes JSON to typed values, from any thread.

msgspec builds its description of a struct type on the first decode. If a second thread decodes to
the same type meanwhile, it sees a half-built description and crashes with a segmentation fault
(seen with 0.22). So decoders are created under one lock. Decoding itself needs no lock.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

_Kind = TypeVar("_Kind")
_learning = threading.Lock()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def decoder(kind: type[_Kind]) -> msgspec.json.Decoder[_Kind]:
    """The decoder of `kind`, created once."""
    known = _decoders.get(kind)
    if known is None:
        with _learning:
            known = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return known


def decode(content: bytes | bytearray | memoryview | str, kind: type[_Kind]) -> _Kind:
    """A value of `kind` from JSON.

    Raises `msgspec.MsgspecError`, `UnicodeDecodeError` or `RecursionError`.
    """
    return decoder(kind).decode(content)


def convert(value: Any, kind: Any, *, strict: bool = True) -> Any:
    """A value of `kind` from plain lists and dicts. Raises `msgspec.ValidationError`."""
    decoder(kind)
    return msgspec.convert(value, kind, strict=strict)
