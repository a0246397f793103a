"""Reads a SentencePiece model (`tokenizer.model`) without the library that made it.

The file is a protocol buffer (google/sentencepiece, `sentencepiece_model.proto`). Only these fields
are read: the pieces with their scores and kinds, and how text is normalized and cut.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of pieces."""
UNIGRAM, BPE = 1, 2
"""Kinds of models."""
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
"""Wire types of protocol buffers."""


class Piece(NamedTuple):
    """One entry of the vocabulary; its id is its index."""

    text: str
    score: float
    kind: int


class SentencePiece(NamedTuple):
    """A model: its vocabulary and its rules."""

    pieces: tuple[Piece, ...]
    kind: int
    unknown: int
    begin: int
    """Id of the token that begins a text; -1: none."""
    end: int
    character_map: bytes
    """A compiled normalization of characters; empty: none."""
    prefix: bool
    """Whether a space is put before a text."""
    strips: bool
    """Whether spaces at both ends and repeated ones are removed."""
    escapes: bool
    """Whether spaces become U+2581."""
    byte_fallback: bool


def parse(content: bytes) -> SentencePiece:
    """The model in a file's content. Raises ValueError."""
    pieces: list[Piece] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(content):
        if isinstance(value, bytes) and number == 1:
            pieces.append(_piece(value))
        elif isinstance(value, bytes) and number == 2:
            trainer = dict(_fields(value))
        elif isinstance(value, bytes) and number == 3:
            normalizer = dict(_fields(value))
    if not pieces:
        raise ValueError("holds no pieces")
    kind = _number(trainer, 3, UNIGRAM)
    if kind not in (UNIGRAM, BPE):
        raise ValueError("is neither a Unigram nor a BPE model")
    unknown = next((i for i, p in enumerate(pieces) if p.kind == UNKNOWN), 0)
    character_map = normalizer.get(2, b"")
    return SentencePiece(
        pieces=tuple(pieces),
        kind=kind,
        unknown=unknown,
        begin=_number(trainer, 41, 1),
        end=_number(trainer, 42, 2),
        character_map=character_map if isinstance(character_map, bytes) else b"",
        prefix=bool(_number(normalizer, 3, 1)),
        strips=bool(_number(normalizer, 4, 1)),
        escapes=bool(_number(normalizer, 5, 1)),
        byte_fallback=bool(_number(trainer, 35, 0)),
    )


def _piece(content: bytes) -> Piece:
    text, score, kind = b"", 0.0, NORMAL
    for number, value in _fields(content):
        if number == 1 and isinstance(value, bytes):
            text = value
        elif number == 2 and isinstance(value, bytes):
            (score,) = struct.unpack("<f", value)
        elif number == 3 and isinstance(value, int):
            kind = value
    return Piece(text.decode("utf-8"), score, kind)


def _number(fields: dict[int, int | bytes], number: int, default: int) -> int:
    value = fields.get(number, default)
    if not isinstance(value, int):
        raise ValueError(f"field {number} is no number")
    return value if value < 1 << 63 else value - (1 << 64)


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a message. Raises ValueError if it is damaged."""
    place = 0
    while place < len(content):
        key, place = _varint(content, place)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, place = _varint(content, place)
            yield number, value
            continue
        if kind == _BYTES:
            size, place = _varint(content, place)
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            size = 8 if kind == _EIGHT_BYTES else 4
        else:
            raise ValueError("is no SentencePiece model")
        if place + size > len(content):
            raise ValueError("is cut short")
        yield number, content[place : place + size]
        place += size


def _varint(content: bytes, place: int) -> tuple[int, int]:
    """Decode a varint, 7 bits per byte and the lowest first. Returns the number and the offset after it."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(content):
            raise ValueError("is cut short")
        byte = content[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise ValueError("is no SentencePiece model")
