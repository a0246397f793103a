"""Batches of text: token ids, next-token targets, and the document number of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from memconsole.plan.tasks.language import MASKED
from memconsole_trainer.data.stream import BatchShape, RowIterator
from memconsole_trainer.data.text.rows.rows import Other, Source, epoch_rows, next_epoch
from memconsole_trainer.data.text.tokens.marked import ids, trimmed
from memconsole_trainer.data.text.tokens.tokenizer import Tokens
from memconsole_trainer.data.text.tokens.tokens import TokenBlocks
from memconsole_trainer.engine import Array, Batch


class Boundary(NamedTuple):
    """How to tell documents apart in a row, if they are isolated."""

    token: int
    """The token that ends a document: the target of its last token."""
    opens: bool
    """Whether this token is also the first input of the next document, whose first token is its target.
    Otherwise it is an input of the document that it ends, with a masked target."""


def language_batch(inputs: Array, targets: Array, documents: Array | None = None) -> Batch:
    """A batch of int32 arrays (micro_batches, micro_batch, sequence_length). A target of -100 is
    masked.

    `documents` gives each token's document number, rising within a row, if documents are isolated:
    positions restart at each document, and a query attends only to keys of its own document.
    """
    arrays = {"inputs": inputs, "targets": targets}
    if documents is not None:
        arrays["documents"] = documents
    return Batch(arrays, int(np.count_nonzero(targets != MASKED)))


def make_batch(rows: list[Tokens], shape: BatchShape, boundary: Boundary | None = None) -> Batch:
    """Make a batch of rows (≤ rows, ≤ sequence_length + 1).

    Missing rows and the ends of short rows have masked targets, so the shape never changes. A
    token that is only read (see `marked`) is an input and a masked target.
    With a `boundary` documents are isolated.
    """
    length, documents = shape.sequence_length, None
    inputs = np.zeros((shape.rows, length), dtype=np.int32)
    targets = np.full((shape.rows, length), MASKED, dtype=np.int32)
    for index, row in enumerate(map(trimmed, rows)):
        inputs[index, : min(len(row), length)] = ids(row[:length])
        targets[index, : max(len(row) - 1, 0)] = row[1:]
    targets[targets < 0] = MASKED
    dimensions = (shape.micro_batches, shape.micro_batch, length)
    if boundary is not None:
        ends = inputs == boundary.token
        numbers = np.cumsum(ends, axis=1, dtype=np.int32)
        if not boundary.opens:
            targets[ends] = MASKED  # the next token belongs to another document
            numbers -= ends
        documents = numbers.reshape(dimensions)
    return language_batch(inputs.reshape(dimensions), targets.reshape(dimensions), documents)


@dataclass(frozen=True)
class _Joined:
    """Concatenated rows in the tokens' own type, which takes a quarter of a batch's bytes."""

    tokens: Tokens
    lengths: tuple[int, ...]


class TextRows:
    """The training rows of text."""

    at_hand = False  # most of them are tokenized first, or read from the net

    def __init__(
        self,
        blocks: TokenBlocks,
        seed: int,
        shuffle_buffer: int,
        held: Tokens | None = None,
        boundary: Boundary | None = None,
        others: Sequence[Other] = (),
    ) -> None:
        """`held` holds all train tokens if they are kept in memory instead of streamed. `others` are
        mixed with these rows."""
        self._blocks = blocks
        self._others = others
        self._seed = seed
        self._buffer = shuffle_buffer
        self._tokens = held
        self._boundary = boundary
        self.shuffle_buffer = 0 if held is not None else shuffle_buffer
        self.row_bytes = 2 * blocks.row_tokens

    def epoch(self, epoch: int) -> RowIterator:
        source = Source(self._blocks, self._tokens)
        found: Any = epoch_rows(source, self._others, self._seed, epoch, self._buffer)
        iterator: RowIterator = found.__iter__()
        return iterator

    def after(self, iterator: RowIterator) -> Any:
        return next_epoch(iterator.get_state()) if self._others else None

    def join(self, rows: list[Tokens]) -> _Joined:
        return _Joined(np.concatenate(rows), tuple(map(len, rows)))

    def batch(self, joined: _Joined, shape: BatchShape) -> tuple[Batch, int]:
        rows = np.split(joined.tokens, np.cumsum(joined.lengths[:-1]))
        made = make_batch(rows, shape, self._boundary)
        masked = joined.tokens.dtype.kind == "i" and bool((joined.tokens < 0).any())
        units = sum(max(len(trimmed(row)) - 1, 0) for row in rows) if masked else int(made.weight)
        return made, units
