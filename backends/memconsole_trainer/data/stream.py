"""Makes batches in a thread ahead of the device; the stream can be resumed exactly."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.engine import Batch

AHEAD_BYTES = 64 << 20
"""Most bytes of rows that wait for the device."""
AHEAD_BATCHES = 8
"""Batches that wait for the device at least, if they are no more than `AHEAD_BYTES`."""
CLOSE_SECONDS = 5.0
"""How long the end of a run waits for the thread that reads ahead."""


@dataclass(frozen=True)
class BatchShape:
    """Shape of one optimizer step's batch: (micro_batches, micro_batch, sequence_length)."""

    micro_batches: int
    micro_batch: int
    sequence_length: int

    @property
    def rows(self) -> int:
        return self.micro_batches * self.micro_batch


@dataclass(frozen=True)
class Item:
    """One batch, or the end of an epoch if `batch` is None, and the pipeline's state after it."""

    epoch: int
    batch: Batch | None
    units: int
    """Number of the task's units in the batch: unmasked tokens, windows."""
    state: dict[str, Any]


class RowIterator(Protocol):
    """The rows of one epoch in order. Its state is small and lets it continue exactly."""

    def __next__(self) -> Any: ...
    def get_state(self) -> Any: ...
    def set_state(self, state: Any) -> None: ...


class Rows(Protocol):
    """A task's training rows: how to iterate over an epoch, and how to make a batch of rows."""

    row_bytes: int
    """Bytes of one row in the queue."""
    shuffle_buffer: int
    """Rows of one shuffle window, which are produced together; 0 if rows are in memory already."""
    at_hand: bool
    """Whether rows need no work but copying, or reading from a local file."""

    def epoch(self, epoch: int) -> RowIterator:
        """The rows of an epoch; epochs are counted from 1."""
        ...

    def after(self, iterator: RowIterator) -> Any:
        """The state in which the epoch after this ended one begins; None: the beginning of its
        rows."""
        ...

    def join(self, rows: list[Any]) -> Any:
        """Pack rows into the compact form in which they wait in the queue."""
        ...

    def batch(self, joined: Any, shape: BatchShape) -> tuple[Batch, int]:
        """Make a batch of joined rows. Also returns the number of units in it."""
        ...


@dataclass(frozen=True)
class _Queued:
    """An item in the queue; `joined` is None at the end of an epoch."""

    epoch: int
    joined: Any
    state: dict[str, Any]


class BatchStream:
    """Endless batches, epoch after epoch, from `state` or the beginning.

    A thread stays ahead by a shuffle window or `AHEAD_BATCHES` batches, whichever is more, but no
    more than `AHEAD_BYTES`, so that the device need not wait while the next window is filled. An item's
    `state` is that of the pipeline right after the item; items in the queue do not count as used.
    """

    def __init__(self, rows: Rows, shape: BatchShape, state: dict[str, Any] | None = None) -> None:
        self._rows = rows
        self._shape = shape
        self._state = state or {"epoch": 1, "rows": None}
        window = rows.shuffle_buffer // shape.rows
        most = max(AHEAD_BYTES // (rows.row_bytes * shape.rows), 2)
        ahead = min(max(window, AHEAD_BATCHES), most)
        self._queue: queue.Queue[_Queued | BaseException] = queue.Queue(maxsize=ahead)
        self._first: _Queued | None = None
        self._waited_seconds = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._produce, name="data", daemon=True)
        self._thread.start()

    def next(self, waiting: Callable[[], None] | None = None) -> Item:
        """Return the next item. While there is none, `waiting` is called every 0.2 s; it may raise.

        Raises what the source raises.
        """
        return self._item(self._take(waiting))

    def _take(self, waiting: Callable[[], None] | None) -> _Queued:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        while True:
            began = time.monotonic()
            try:
                queued = self._queue.get(timeout=0.2)
            except queue.Empty:
                if waiting is not None:
                    waiting()
                continue
            finally:
                self._waited_seconds += time.monotonic() - began
            if isinstance(queued, BaseException):
                raise queued
            return queued

    def _item(self, queued: _Queued) -> Item:
        """The item, with a batch made of its rows."""
        if queued.joined is None:
            return Item(queued.epoch, None, 0, queued.state)
        return Item(queued.epoch, *self._rows.batch(queued.joined, self._shape), queued.state)

    def peek(self, waiting: Callable[[], None] | None = None) -> Item:
        """Return the next item without consuming it. `waiting` and errors are as in `next`."""
        self.fill(waiting)
        assert self._first is not None
        return self._item(self._first)

    def fill(self, waiting: Callable[[], None] | None = None) -> None:
        """Wait for the first item, and, if rows are at hand, until the queue is full. By then most of
        the data's memory is allocated.

        This time does not count in `take_waited_seconds`, because no step waits. `waiting` and errors are as
        in `next`.
        """
        if self._first is None:
            self._first = self._take(waiting)
        while self._rows.at_hand and not self._queue.full() and self._thread.is_alive():
            if waiting is not None:
                waiting()
            time.sleep(0.01)
        self._waited_seconds = 0.0

    def take_waited_seconds(self) -> float:
        """Seconds that `next` waited for the thread since the last call."""
        seconds, self._waited_seconds = self._waited_seconds, 0.0
        return seconds

    def close(self) -> None:
        """Stop the thread. If it is filling a shuffle window, or waits for a network, it may go on: after `CLOSE_SECONDS` it is
        left to end with the process."""
        self._closing.set()
        latest = time.monotonic() + CLOSE_SECONDS
        while self._thread.is_alive() and time.monotonic() < latest:
            with contextlib.suppress(queue.Empty):
                self._queue.get_nowait()  # so that a blocked `put` returns at once
            self._thread.join(timeout=0.01)

    def _produce(self) -> None:
        try:
            state: dict[str, Any] | None = self._state
            while state is not None:
                state = self._epoch(*_position(state))
        except BaseException as error:  # noqa: BLE001 (`next` raises it)
            self._put(error)

    def _epoch(self, epoch: int, rows_state: Any) -> dict[str, Any] | None:
        """Produce the rest of one epoch. Returns the state of the next one; None if the stream is
        closing."""
        iterator = self._rows.epoch(epoch)
        if rows_state is not None:
            _restore(iterator, rows_state)
        exhausted = False
        while not exhausted:
            rows: list[Any] = []
            while len(rows) < self._shape.rows and not self._closing.is_set():
                try:
                    rows.append(next(iterator))
                except StopIteration:
                    exhausted = True
                    break
            if self._closing.is_set():
                return None
            if rows:
                state = {"epoch": epoch, "rows": iterator.get_state()}
                if not self._put(_Queued(epoch, self._rows.join(rows), state)):
                    return None
        after = {"epoch": epoch + 1, "rows": self._rows.after(iterator)}
        return after if self._put(_Queued(epoch, None, after)) else None

    def _put(self, queued: _Queued | BaseException) -> bool:
        """Wait for room in the queue. Returns whether the item was put there; the stream may be closing instead."""
        while not self._closing.is_set():
            try:
                self._queue.put(queued, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False


def _position(state: dict[str, Any]) -> tuple[int, Any]:
    """The epoch and the rows' state in a pipeline's state. Raises `DataError`."""
    epoch = state.get("epoch")
    if type(epoch) is not int or epoch < 1 or "rows" not in state:
        raise DataError("the checkpoint does not say where in the data it was taken")
    return epoch, state["rows"]


def _restore(iterator: RowIterator, state: Any) -> None:
    """Continue an epoch from a stored state. Raises `DataError`."""
    try:
        iterator.set_state(state)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"the checkpoint's place in the data cannot be read: {type(error).__name__}: {error}"
        ) from error
