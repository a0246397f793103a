"""Writes a run's scalars to TensorBoard event files, in a thread and without TensorFlow.

The file is a sequence of TFRecords (tensorflow/core/lib/io/record_writer.h): the payload's length
as a little-endian uint64, the masked CRC-32C of those eight bytes, the payload, its masked CRC-32C.
A payload is an `Event` message (tensorflow/core/util/event.proto) in protocol buffers' wire format.
These field numbers are used:

    Event        wall_time 1 (double) · step 2 (int64) · file_version 3 · summary 5 · session_log 7
    Summary      value 1 {tag 1 · simple_value 2 (float)}
    SessionLog   status 1 (START = 1)

Each attempt writes its own file, which begins with a session log START at the attempt's first step.
Readers then drop the values that earlier files hold from that step on, so repeated steps are not
shown twice.
"""

from __future__ import annotations

import math
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from memconsole.runs.record.log import events
from memconsole_trainer.loop.scalars import scalars

FOLDER = "tensorboard"
"""Folder within the run directory."""
_DRAIN_SECONDS = 10.0
"""How long `close` waits for values that are not written yet."""


class TensorBoard:
    """The event file of one attempt in `folder`. `see` only queues, so a slow disk does not delay
    training."""

    def __init__(self, folder: Path, attempt: int, first_step: int, now: float, units: str) -> None:
        """`first_step` is the first step of this attempt; `now` is in seconds since 1970; `units` is
        what the task counts, in the plural. Raises OSError."""
        self._units = units
        folder.mkdir(mode=0o700, exist_ok=True)
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{attempt}"
        self._file = open(folder / name, "xb")  # noqa: SIM115 (closed by `close`)
        self._file.write(record(_double(1, now) + _text(3, "brain.Event:2")))
        start = _varint(1, 1)
        self._file.write(record(_double(1, now) + _varint(2, first_step) + _message(7, start)))
        self._file.flush()
        self._last: dict[str, int] = {}
        self._failed = False
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="tensorboard", daemon=True)
        self._thread.start()

    def see(self, event: events.Event) -> None:
        """Queue the figures of an event. A tag gets at most one value per step."""
        if self._failed:
            return
        step, found = scalars(event, self._units)
        new = [(tag, value) for tag, value in found if step > self._last.get(tag, -1)]
        if new:
            self._last.update((tag, step) for tag, _ in new)
            values = b"".join(_message(1, _text(1, tag) + _float(2, value)) for tag, value in new)
            said = (
                _double(1, event.time_wall or time.time()) + _varint(2, step) + _message(5, values)
            )
            self._queue.put(said)

    def close(self) -> None:
        """Write what is queued, waiting at most `_DRAIN_SECONDS`."""
        self._queue.put(None)
        self._thread.join(_DRAIN_SECONDS)

    def _write(self) -> None:
        try:
            with self._file:
                for payload in self._waiting():
                    self._file.write(record(payload))
                    if self._queue.empty():
                        self._file.flush()
        except OSError as error:  # a full disk ends this file, not the run
            self._failed = True
            print(f"warning: TensorBoard's file ends here: {error}", flush=True)

    def _waiting(self) -> Iterator[bytes]:
        while (payload := self._queue.get()) is not None:
            yield payload


def record(payload: bytes) -> bytes:
    """One TFRecord."""
    length = struct.pack("<Q", len(payload))
    return b"".join((length, _checksum(length), payload, _checksum(payload)))


def _checksum(data: bytes) -> bytes:
    """The masked CRC-32C: rotated right by 15 bits, plus a constant."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    """The Castagnoli CRC of RFC 3720, appendix B.4: reflected, polynomial 0x1EDC6F41."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _table() -> list[int]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, np.uint32(0x82F63B78), np.uint32(0)) ^ (table >> np.uint32(1))
    return [int(entry) for entry in table]


_TABLE = _table()
LARGEST = float(np.finfo(np.float32).max)


def _double(field: int, value: float) -> bytes:
    return _base128(field << 3 | 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    """A value that is too large for fp32 becomes the largest one."""
    if math.isfinite(value):
        value = max(-LARGEST, min(LARGEST, value))
    return _base128(field << 3 | 5) + struct.pack("<f", value)


def _varint(field: int, value: int) -> bytes:
    return _base128(field << 3) + _base128(value)


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode())


def _message(field: int, value: bytes) -> bytes:
    return _base128(field << 3 | 2) + _base128(len(value)) + value


def _base128(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
