"""Batches for the loop: made in a thread ahead of the device, resumable exactly."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from memconsole_trainer.engine import Batch

AHEAD_BYTES = 64 << 20
"""Most bytes of rows waiting for the device."""
AHEAD_BATCHES = 8


@dataclass(frozen=True)
class BatchShape:
    """Rows of one optimizer step: (micro_batches, micro_batch, sequence_length)."""

    micro_batches: int
    micro_batch: int
    sequence_length: int

    @property
    def rows(self) -> int:
        return self.micro_batches * self.micro_batch


@dataclass(frozen=True)
class Item:
    """One batch, or the end of an epoch where `batch` is None, and the state once it is used."""

    epoch: int
    batch: Batch | None
    units: int
    """What the task counts: unmasked tokens, windows."""
    state: dict[str, Any]


class RowIterator(Protocol):
    """The rows of one epoch in order. Its state is a few numbers, which continue it exactly."""

    def __next__(self) -> Any: ...
    def get_state(self) -> Any: ...
    def set_state(self, state: Any) -> None: ...


class Rows(Protocol):
    """A task's training rows: where an epoch's come from, and how some of them become a batch."""

    row_bytes: int
    """Bytes of one row while it waits."""
    shuffle_buffer: int
    """Rows that are made at once; 0 where they cost nothing."""

    def epoch(self, epoch: int) -> RowIterator:
        """The rows of an epoch, counted from 1."""
        ...

    def join(self, rows: list[Any]) -> Any:
        """Some rows in the form in which they wait: as small as the data allows."""
        ...

    def batch(self, joined: Any, shape: BatchShape) -> tuple[Batch, int]:
        """The batch that joined rows fill, and the units in it."""
        ...


@dataclass(frozen=True)
class _Ahead:
    """What an item is made of; `joined` is None at the end of an epoch."""

    epoch: int
    joined: Any
    state: dict[str, Any]


class BatchStream:
    """Endless batches, epoch after epoch, from `state` or the beginning.

    A thread stays ahead by up to one shuffle window, so that filling the next one does not hold up
    the device. `state` of an item is that of the pipeline right after it: what is ahead in the queue
    does not count as used.
    """

    def __init__(self, rows: Rows, shape: BatchShape, state: dict[str, Any] | None = None) -> None:
        self._rows = rows
        self._shape = shape
        self._state = state or {"epoch": 1, "rows": None}
        window = rows.shuffle_buffer // shape.rows
        most = max(AHEAD_BYTES // (rows.row_bytes * shape.rows), 2)
        ahead = min(max(window, AHEAD_BATCHES), most)
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
            if ahead.joined is None:
                return Item(ahead.epoch, None, 0, ahead.state)
            return Item(ahead.epoch, *self._rows.batch(ahead.joined, self._shape), ahead.state)

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
        iterator = self._rows.epoch(epoch)
        if rows_state is not None:
            iterator.set_state(rows_state)
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
                return False
            if rows:
                state = {"epoch": epoch, "rows": iterator.get_state()}
                if not self._put(_Ahead(epoch, self._rows.join(rows), state)):
                    return False
        return self._put(_Ahead(epoch, None, {"epoch": epoch + 1, "rows": None}))

    def _put(self, ahead: _Ahead | BaseException) -> bool:
        while not self._closing.is_set():
            try:
                self._queue.put(ahead, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False
