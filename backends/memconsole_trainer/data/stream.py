"""Batches for the loop: cut, stacked and padded in a thread ahead of the device, resumable exactly."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from memconsole_trainer.data.rows import array_rows, streamed_rows
from memconsole_trainer.data.tokenizer import Tokens
from memconsole_trainer.data.tokens import TokenBlocks
from memconsole_trainer.engine import Batch

MASKED = -100
AHEAD_BYTES = 64 << 20
"""Most bytes of rows waiting for the device."""
AHEAD_BATCHES = 8


@dataclass(frozen=True)
class BatchShape:
    """Rows of one optimizer step: (micro_batches, micro_batch, sequence_length)."""

    micro_batches: int
    micro_batch: int
    sequence_length: int
    boundary: int | None = None
    """The token that ends a document, where documents in one row are isolated."""

    @property
    def rows(self) -> int:
        return self.micro_batches * self.micro_batch


@dataclass(frozen=True)
class Item:
    """One batch, or the end of an epoch where `batch` is None, and the state once it is used."""

    epoch: int
    batch: Batch | None
    tokens: int
    """Unmasked targets."""
    state: dict[str, Any]


@dataclass(frozen=True)
class _Ahead:
    """What an item is made of, in the bytes that tokens take: a quarter of a batch's."""

    epoch: int
    rows: Tokens
    """Joined."""
    lengths: tuple[int, ...]
    state: dict[str, Any]

    def item(self, shape: BatchShape) -> Item:
        """The batch that the rows fill."""
        if not self.lengths:
            return Item(self.epoch, None, 0, self.state)
        rows = np.split(self.rows, np.cumsum(self.lengths[:-1]))
        return Item(self.epoch, *make_batch(rows, shape), self.state)


def make_batch(rows: list[Tokens], shape: BatchShape) -> tuple[Batch, int]:
    """Rows (≤ rows, ≤ sequence_length + 1) as a batch, and its number of unmasked targets.

    Missing rows and the rest of short rows have masked targets, so the shape never changes.
    """
    length, documents = shape.sequence_length, None
    inputs = np.zeros((shape.rows, length), dtype=np.int32)
    targets = np.full((shape.rows, length), MASKED, dtype=np.int32)
    for index, row in enumerate(rows):
        inputs[index, : min(len(row), length)] = row[:length]
        targets[index, : len(row) - 1] = row[1:]
    dimensions = (shape.micro_batches, shape.micro_batch, length)
    if shape.boundary is not None:
        ends = inputs == shape.boundary
        targets[ends] = MASKED  # the next token is of another document
        numbers = np.zeros_like(inputs)
        np.cumsum(ends[:, :-1], axis=1, out=numbers[:, 1:])
        documents = numbers.reshape(dimensions)
    tokens = int((targets != MASKED).sum())
    return Batch(inputs.reshape(dimensions), targets.reshape(dimensions), documents), tokens


class BatchStream:
    """Endless batches, epoch after epoch, from `state` or the beginning.

    A thread stays ahead by up to one shuffle window, so that filling the next one does not hold up
    the device. `state` of an item is that of the pipeline right after it: what is ahead in the queue
    does not count as used.
    """

    def __init__(
        self,
        blocks: TokenBlocks,
        shape: BatchShape,
        seed: int,
        shuffle_buffer: int,
        held: Tokens | None = None,
        state: dict[str, Any] | None = None,
    ) -> None:
        """`held` are all train tokens when they are kept in memory instead of streamed."""
        self._blocks = blocks
        self._shape = shape
        self._seed = seed
        self._shuffle_buffer = shuffle_buffer
        self._tokens = held
        self._state = state or {"epoch": 1, "rows": None}
        row_bytes = 2 * blocks.row_tokens * shape.rows
        window = 0 if held is not None else shuffle_buffer // shape.rows
        ahead = min(max(window, AHEAD_BATCHES), max(AHEAD_BYTES // row_bytes, 2))
        self._queue: queue.Queue[_Ahead | BaseException] = queue.Queue(maxsize=ahead)
        self._first: Item | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._produce, name="data", daemon=True)
        self._thread.start()

    def next(self, waiting: Callable[[], None] | None = None) -> Item:
        """The next item. `waiting` is called every 0.2 s while there is none, and may raise.

        Raises what the source raised.
        """
        if self._first is not None:
            first, self._first = self._first, None
            return first
        while True:
            try:
                ahead = self._queue.get(timeout=0.2)
            except queue.Empty:
                if waiting is not None:
                    waiting()
                continue
            if isinstance(ahead, BaseException):
                raise ahead
            return ahead.item(self._shape)

    def peek(self, waiting: Callable[[], None] | None = None) -> Item:
        """The next item, which stays the next one. `waiting` and what is raised are as for `next`."""
        self.fill(waiting)
        assert self._first is not None
        return self._first

    def fill(self, waiting: Callable[[], None] | None = None) -> None:
        """Wait until the first item is there, and with it most of the memory the data takes.

        `waiting` and what is raised are as for `next`.
        """
        self._first = self.next(waiting)

    def close(self) -> None:
        """Stop the thread."""
        self._closing.set()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._queue.get_nowait()  # lets a waiting `put` return at once
            self._thread.join(timeout=0.01)

    def _produce(self) -> None:
        try:
            epoch, rows_state = int(self._state["epoch"]), self._state["rows"]
            while self._epoch(epoch, rows_state):
                epoch, rows_state = epoch + 1, None
        except BaseException as error:  # noqa: BLE001 (the loop raises it)
            self._put(error)

    def _epoch(self, epoch: int, rows_state: Any) -> bool:
        """Produce the rest of one epoch; False when closing."""
        iterator = self._dataset(epoch).__iter__()
        if rows_state is not None:
            iterator.set_state(rows_state)
        exhausted = False
        while not exhausted:
            rows: list[Tokens] = []
            while len(rows) < self._shape.rows and not self._closing.is_set():
                try:
                    rows.append(next(iterator))
                except StopIteration:
                    exhausted = True
                    break
            if self._closing.is_set():
                return False
            if rows:
                state = {"epoch": epoch, "rows": iterator.get_state()}
                lengths = tuple(map(len, rows))
                if not self._put(_Ahead(epoch, np.concatenate(rows), lengths, state)):
                    return False
        nothing = np.empty(0, np.int32)
        return self._put(_Ahead(epoch, nothing, (), {"epoch": epoch + 1, "rows": None}))

    def _dataset(self, epoch: int) -> Any:
        b = self._blocks
        if self._tokens is not None:
            return array_rows(self._tokens, b.row_tokens, b.stride, self._seed, epoch)
        return streamed_rows(b, self._seed, epoch, self._shuffle_buffer)

    def _put(self, ahead: _Ahead | BaseException) -> bool:
        while not self._closing.is_set():
            try:
                self._queue.put(ahead, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False
