"""Packs whole documents into rows. Only documents that are longer than a row are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from memconsole_trainer.data.text.tokens.marked import only_read
from memconsole_trainer.data.text.tokens.tokenizer import Tokens


class Piece(NamedTuple):
    """Tokens `start` to `stop` of a document."""

    document: int
    start: int
    stop: int


class Cuts(NamedTuple):
    """How many documents were packed, and how many of them are longer than a row."""

    documents: int = 0
    cut: int = 0
    answers_cut: int = 0
    """Number of documents in which a cut separates an answer, or a part of it, from the text before it."""
    longest: int = 0

    def joined(self, other: Cuts) -> Cuts:
        """Both together."""
        return Cuts(
            self.documents + other.documents,
            self.cut + other.cut,
            self.answers_cut + other.answers_cut,
            max(self.longest, other.longest),
        )

    def warnings(self, sequence_length: int, records: str = "records") -> tuple[str, ...]:
        """Warnings about documents that are cut, which `records` names; empty if there are none."""
        if not self.cut:
            return ()
        return (
            f"{self.cut:,} of {self.documents:,} {records} are longer than a row and are cut, "
            f"{self.answers_cut:,} of them before or in what is learned: data.sequence_length = "
            f"{sequence_length:,}, the longest record has {self.longest:,} tokens",
        )


def cuts(documents: Sequence[Tokens], row_tokens: int) -> Cuts:
    """The cuts of `documents`, whose tokens are marked."""
    long = [tokens for tokens in documents if len(tokens) > row_tokens]
    return Cuts(
        documents=len(documents),
        cut=len(long),
        answers_cut=sum(bool((tokens[row_tokens:] >= 0).any()) for tokens in long),
        longest=max(map(len, documents), default=0),
    )


def placed(lengths: Sequence[int], row_tokens: int) -> list[list[Piece]]:
    """The pieces of each row. A document goes whole to the first row that has room for it.

    A document that is longer than a row is cut. Two consecutive pieces share a token, so that each token is
    a target once.
    """
    pieces = [
        Piece(number, start, min(start + row_tokens, length))
        for number, length in enumerate(lengths)
        for start in range(0, max(length - 1, min(length, 1)), row_tokens - 1)
    ]
    rows: list[list[Piece]] = []
    room = np.full(len(pieces) + 1, row_tokens)
    """Free tokens of each row. There are never more rows than pieces."""
    for piece in pieces:
        size = piece.stop - piece.start
        row = len(rows)
        if size < row_tokens:
            row = int((room[: len(rows) + 1] >= size).argmax())
        if row == len(rows):
            rows.append([])
        rows[row].append(piece)
        room[row] -= size
    return rows


def laid(documents: Sequence[Tokens], rows: Sequence[Sequence[Piece]], row_tokens: int) -> Tokens:
    """The rows one after another, each filled up to `row_tokens` with padding. The first token of a piece that continues a
    document is a target in the piece before; after another document it is only read."""
    dtype = documents[0].dtype if len(documents) else np.dtype(np.int16)
    whole = np.full((len(rows), row_tokens), np.iinfo(dtype).min, dtype)
    for row, pieces in zip(whole, rows, strict=True):
        at = 0
        for piece in pieces:
            size = piece.stop - piece.start
            row[at : at + size] = documents[piece.document][piece.start : piece.stop]
            if at and piece.start:
                row[at : at + 1] = only_read(row[at : at + 1])
            at += size
    return whole.reshape(-1)
