"""Train tokens in numbered blocks: the interface that the pipeline reads from any source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from memconsole_trainer.data.sources.hdf5 import TokenRows
from memconsole_trainer.data.sources.split import Split
from memconsole_trainer.data.text.tokens.marked import (
    marked_rows,
    narrowed,
    only_read,
    runs_at_end,
)
from memconsole_trainer.data.text.tokens.tokenizer import Tokenizer, Tokens

LONG_RUN = 8
"""A longer run of one token at the end of a row may be padding."""


class TokenBlocks(Protocol):
    """Blocks of train tokens, without the held-out documents."""

    count: int | None
    """Number of blocks; None if only `iterate` is possible."""
    row_tokens: int
    """Tokens of one row. Inputs are all but the last token, targets all but the first."""
    stride: int
    """Tokens between the starts of consecutive rows of the joined blocks."""

    @property
    def together(self) -> int:
        """How many blocks are best asked for at once."""
        ...

    def several(self, indices: Sequence[int]) -> list[Tokens]:
        """The tokens of these blocks, documents joined by the end-of-text token."""
        ...

    def iterate(self, start: int) -> Iterator[Tokens]:
        """Yield the blocks from number `start` on, in file order."""
        ...


def windows(rows: NDArray[Any], row_tokens: int, stride: int) -> NDArray[Any]:
    """Cut marked rows (n, width ≥ row_tokens) into windows (n · windows of one row, row_tokens), one every
    `stride` tokens. No window spans two rows.

    The last window of a row ends with the row. It may begin less than `stride` after the one before; the targets
    that it has for this reason alone are only read (see `marked`), so that none is learned more often.
    """
    starts = window_starts(rows.shape[1], row_tokens, stride)
    if len(starts) == 1:
        return rows
    picked: NDArray[Any] = rows[:, starts[:, None] + np.arange(row_tokens)]
    if earlier := int(starts[-2]) + stride - int(starts[-1]):
        last = picked[:, -1, : earlier + 1]
        last[...] = only_read(last)
    return picked.reshape(-1, row_tokens)


def window_starts(width: int, row_tokens: int, stride: int) -> NDArray[np.int64]:
    """Offsets of the windows of a row of `width` tokens."""
    last = width - row_tokens
    return np.unique(np.append(np.arange(0, last, stride, dtype=np.int64), last))


class RowBlocks:
    """Rows that are already tokens. A row stays one row, or is cut into several if it is too
    wide."""

    def __init__(
        self,
        rows: TokenRows,
        split: Split,
        vocab_size: int,
        row_tokens: int,
        stride: int,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """`tokenizer` is the one that made the tokens, if known."""
        self._source = rows
        self._split = split
        self._size = rows.block_size
        self._largest_id = vocab_size - 1
        self._tokenizer = tokenizer
        assert rows.count is not None
        self._rows = rows.count
        self.count: int | None = -(-rows.count // self._size)
        self.row_tokens = self.stride = row_tokens
        self._stride = stride
        self._windows = len(window_starts(rows.width, row_tokens, stride))
        self.together = 1

    def several(self, indices: Sequence[int]) -> list[Tokens]:
        return [self.block(index) for index in indices]

    def block(self, index: int) -> Tokens:
        start = index * self._size
        stop = min(start + self._size, self._rows)
        rows = self._source.rows(start, stop)[~self._split.held_out(start, stop)]
        cut = windows(marked_rows(rows, self._tokenizer), self.row_tokens, self._stride)
        return narrowed(cut, self._largest_id).reshape(-1)

    def iterate(self, start: int) -> Iterator[Tokens]:
        for index in range(start, self.count or 0):
            yield self.block(index)

    def repeated_at_end(self) -> tuple[float, int]:
        """The token that the rows of the first block repeat most at their ends (in runs longer than `LONG_RUN`)
        without being marked as padding, after its share of all tokens."""
        rows = self.block(0).reshape(-1, self.row_tokens)
        last, lengths = rows[:, -1], runs_at_end(rows == rows[:, -1:]).sum(axis=1)
        long = (lengths > LONG_RUN) & (last >= 0)
        if not long.any():
            return 0.0, 0
        sums = np.bincount(last[long], weights=lengths[long])
        return float(sums.max()) / rows.size, int(sums.argmax())

    def train_tokens(self) -> int:
        """Number of tokens in all windows of the train rows, padding included, computed without reading them."""
        rows = 0
        for start in range(0, self._rows, 1 << 20):
            stop = min(start + (1 << 20), self._rows)
            rows += int((~self._split.held_out(start, stop)).sum())
        return rows * self._windows * self.row_tokens


def row_count(tokens: int, row_tokens: int, stride: int) -> int:
    """Number of rows that `tokens` consecutive tokens make, including a short last one.

    A further row is cut only if it has a new target and an input for it.
    """
    if tokens < 2:
        return 0
    more = min((tokens - 2) // stride, (tokens - row_tokens - 1) // stride + 1)
    return 1 + max(more, 0)


class ArrayRows:
    """Rows cut from one array in memory: a random-access source."""

    def __init__(self, tokens: Tokens, row_tokens: int, stride: int) -> None:
        self._tokens = tokens
        self._row_tokens = row_tokens
        self._stride = stride
        self._count = row_count(len(tokens), row_tokens, stride)

    def __len__(self) -> int:
        return self._count

    def several(self, indices: Sequence[int]) -> list[Tokens]:
        """The rows of these numbers."""
        return [self[index] for index in indices]

    def __getitem__(self, index: int) -> Tokens:
        start = int(index) * self._stride
        return self._tokens[start : start + self._row_tokens]
