"""Typed values from JSON, safe in any thread.

msgspec learns a struct type when it first decodes to it, and a second thread that comes meanwhile finds
the type half known: a segmentation fault (seen with 0.22). So types are learned under one lock, nested
ones with them; decoding itself needs none.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

_Kind = TypeVar("_Kind")
_learning = threading.Lock()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def decoder(kind: type[_Kind]) -> msgspec.json.Decoder[_Kind]:
    """The decoder of `kind`, made once."""
    found = _decoders.get(kind)
    if found is None:
        with _learning:
            found = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return found


def decode(content: bytes | bytearray | memoryview | str, kind: type[_Kind]) -> _Kind:
    """A value of `kind` from JSON. Raises `msgspec.MsgspecError`, `UnicodeDecodeError`, `RecursionError`."""
    return decoder(kind).decode(content)


def convert(value: Any, kind: Any, *, strict: bool = True) -> Any:
    """A value of `kind` from plain lists and dicts. Raises `msgspec.ValidationError`."""
    decoder(kind)
    return msgspec.convert(value, kind, strict=strict)
