"""Custom Grain datasets: they cut blocks of tokens into rows, shuffle, and read sequential sources.

Importing this imports Grain, so call `rows.load_grain` first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from memconsole_trainer.data.text.tokens.tokenizer import Tokens
from memconsole_trainer.data.text.tokens.tokens import TokenBlocks
from memconsole_trainer.randomness import generator


class RowIterator(grain.DatasetIterator):
    """Joins blocks and cuts them into rows.

    The state is the parent's state before the block in which the next row starts, and how many
    tokens of that block to skip.
    """

    def __init__(self, parent: Any, row_tokens: int, stride: int) -> None:
        super().__init__(parent)
        self._row_tokens = row_tokens
        self._stride = stride
        self._reset({"parent": self._parent.get_state(), "skip": 0, "fresh": 0})

    def _reset(self, state: dict[str, Any]) -> None:
        self._segments: deque[tuple[Any, Tokens]] = deque()
        self._start = state["skip"]
        self._fresh = state["fresh"]
        self._held = 0
        self._ended = False

    def _fill(self, wanted: int) -> None:
        """Read blocks until `wanted` tokens after the row's start are held, or the data ends."""
        while self._held - self._start < wanted and not self._ended:
            before = self._parent.get_state()
            try:
                tokens = next(self._parent)
            except StopIteration:
                self._ended = True
                return
            if len(tokens):
                self._segments.append((before, tokens))
                self._held += len(tokens)
            self._drop()

    def _drop(self) -> None:
        """Drop blocks that end before the row's start."""
        while self._segments and len(self._segments[0][1]) <= self._start:
            gone = len(self._segments.popleft()[1])
            self._start -= gone
            self._held -= gone

    def __next__(self) -> Tokens:
        self._fill(self._row_tokens)
        left = self._held - self._start
        # The first `_fresh` tokens were already targets of the previous row.
        if left < 2 or left <= self._fresh:
            raise StopIteration
        row = self._cut(min(self._row_tokens, left))
        self._start += self._stride
        self._fresh = max(self._row_tokens - self._stride, 0)
        self._drop()
        return row

    def _cut(self, length: int) -> Tokens:
        parts, start = [], self._start
        for _, tokens in self._segments:
            parts.append(tokens[start : start + length])
            length -= len(parts[-1])
            start = max(start - len(tokens), 0)
            if length == 0:
                break
        return np.concatenate(parts)

    def get_state(self) -> dict[str, Any]:
        parent = self._segments[0][0] if self._segments else self._parent.get_state()
        return {"parent": parent, "skip": self._start, "fresh": self._fresh}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["parent"])
        self._reset(state)


class Rows(grain.IterDataset):
    """Rows of at most `row_tokens`, cut from blocks of tokens; a row starts every `stride`
    tokens."""

    def __init__(self, parent: Any, row_tokens: int, stride: int) -> None:
        super().__init__(parent)
        self._row_tokens = row_tokens
        self._stride = stride

    def __iter__(self) -> RowIterator:
        return RowIterator(self._parent.__iter__(), self._row_tokens, self._stride)


class SequentialIterator(grain.DatasetIterator):
    """Blocks of a source that can only be read from front to back; the state is the next block's
    number."""

    def __init__(self, blocks: TokenBlocks) -> None:
        super().__init__()
        self._blocks = blocks
        self._next = 0
        self._reader: Any = None

    def __next__(self) -> Tokens:
        if self._reader is None:
            self._reader = self._blocks.iterate(self._next)
        tokens: Tokens = next(self._reader)
        self._next += 1
        return tokens

    def get_state(self) -> dict[str, Any]:
        return {"block": self._next}

    def set_state(self, state: dict[str, Any]) -> None:
        self._next, self._reader = state["block"], None


class Sequential(grain.IterDataset):
    """Blocks in file order."""

    def __init__(self, blocks: TokenBlocks) -> None:
        super().__init__()
        self._blocks = blocks

    def __iter__(self) -> SequentialIterator:
        return SequentialIterator(self._blocks)


class PermutedIterator(grain.DatasetIterator):
    """Elements in the order given by `order`, read `together()` at a time; the state is how many
    were yielded."""

    def __init__(
        self,
        order: Sequence[int],
        read: Callable[[Sequence[int]], list[Any]],
        together: Callable[[], int],
    ) -> None:
        super().__init__()
        self._order = order
        self._read = read
        self._together = together
        self._next = 0
        self._ahead: deque[Any] = deque()

    def __next__(self) -> Any:
        if self._next >= len(self._order):
            raise StopIteration
        if not self._ahead:
            stop = min(self._next + self._together(), len(self._order))
            numbers = [int(self._order[place]) for place in range(self._next, stop)]
            self._ahead.extend(self._read(numbers))
        self._next += 1
        return self._ahead.popleft()

    def get_state(self) -> dict[str, Any]:
        return {"next": self._next}

    def set_state(self, state: dict[str, Any]) -> None:
        self._next = state["next"]
        self._ahead.clear()


class Permuted(grain.IterDataset):
    """The elements that `read` returns for every number of `order`, a list or a `grain.MapDataset`.

    Grain's own `map` takes 70 microseconds per element.
    """

    def __init__(
        self,
        order: Sequence[int],
        read: Callable[[Sequence[int]], list[Any]],
        together: Callable[[], int],
    ) -> None:
        super().__init__()
        self._arguments = (order, read, together)

    def __iter__(self) -> PermutedIterator:
        return PermutedIterator(*self._arguments)


class WindowShuffleIterator(grain.DatasetIterator):
    """Reads a window of rows and yields them in random order.

    The state is the parent's state before the window, the window's number, and how many of its rows
    were yielded.
    """

    def __init__(self, parent: Any, size: int, seed: int, purpose: str) -> None:
        super().__init__(parent)
        self._size = size
        self._seed = seed
        self._purpose = purpose
        self._before = self._parent.get_state()
        self._window: list[Tokens] = []
        self._number = -1
        self._yielded = 0

    def _read(self) -> None:
        self._window = []
        for row in self._parent:
            self._window.append(row)
            if len(self._window) == self._size:
                break
        self._order = generator(self._seed, f"{self._purpose}/{self._number}").permutation(
            len(self._window)
        )

    def __next__(self) -> Tokens:
        if self._yielded >= len(self._window):
            self._before = self._parent.get_state()
            self._number += 1
            self._yielded = 0
            self._read()
            if not self._window:
                raise StopIteration
        row = self._window[self._order[self._yielded]]
        self._yielded += 1
        return row

    def get_state(self) -> dict[str, Any]:
        return {"before": self._before, "window": self._number, "yielded": self._yielded}

    def set_state(self, state: dict[str, Any]) -> None:
        self._before, self._number = state["before"], state["window"]
        self._yielded = state["yielded"]
        self._parent.set_state(self._before)
        self._window = []
        if self._number >= 0:
            self._read()


class WindowShuffle(grain.IterDataset):
    """Rows shuffled within consecutive windows of `size`.

    Grain's own window shuffle permutes with a block cipher and takes some 15 microseconds per row,
    as much as the rest of the pipeline. One permutation per window takes almost no time.
    """

    def __init__(self, parent: Any, size: int, seed: int, purpose: str) -> None:
        super().__init__(parent)
        self._arguments = (size, seed, purpose)

    def __iter__(self) -> WindowShuffleIterator:
        return WindowShuffleIterator(self._parent.__iter__(), *self._arguments)
