"""Writes the event log of one attempt: its trainer appends, anyone may follow.

One record per line, ``<compact JSON>\\t<crc32, 8 hex digits>\\n``, in segments of 16 MiB. Each
record is one `write` to a descriptor opened for appending, so a reader sees whole lines, or the
start of the last one.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from memconsole.runs.record.files import sync_directory
from memconsole.runs.record.log import events
from memconsole.runs.record.log.eventline import Gap, encode_line
from memconsole.runs.record.log.eventreader import SEGMENT_BYTES, last_sequence, segment_numbers
from memconsole.runs.record.log.events import Event
from memconsole.runs.record.processes.identity import boot_seconds
from memconsole.runs.record.spares import FULL

CLOCK_JUMP_SECONDS = 2.0
WAITING_RECORDS = 256
"""If more records than this wait for room on the disk, frequent ones are dropped."""

_sync = getattr(os, "fdatasync", os.fsync)


class EventWriter:
    """Appends events to an attempt's log. One writer per attempt; not thread-safe.

    A full or failing disk never makes it raise. Records wait in memory until there is space again;
    if there are more than `WAITING_RECORDS`, those of frequent kinds are dropped and counted.
    """

    def __init__(
        self,
        attempt_directory: Path,
        *,
        wall: Callable[[], float] = time.time,
        boot: Callable[[], float] = boot_seconds,
        segment_bytes: int = SEGMENT_BYTES,
        secrets: Iterable[str] = (),
        on_full: Callable[[], None] | None = None,
    ) -> None:
        """`secrets` are texts that never reach the log. `on_full` may free space on the disk."""
        self._directory = attempt_directory
        self._wall = wall
        self._boot = boot
        self._segment_bytes = segment_bytes
        self._secrets = [msgspec.json.encode(text)[1:-1] for text in secrets if len(text) >= 6]
        self._on_full = on_full
        self._descriptor = -1
        self._size = 0
        self._broken_line = False
        self._waiting: list[Event] = []
        self._durable = False
        self._dropped = 0
        self._drop_reason = ""
        self._full = False
        self._clock_offset = wall() - boot()
        segments = segment_numbers(attempt_directory)
        self._segment = segments[-1] if segments else 0
        self._sequence = last_sequence(attempt_directory) if segments else 0

    def write(self, event: Event, durable: bool = False) -> bool:
        """Append one event; with `durable`, sync it to disk. Returns False if it is not on disk."""
        offset = self._wall() - self._boot()
        jump = offset - self._clock_offset
        if abs(jump) > CLOCK_JUMP_SECONDS:
            self._clock_offset = offset
            self._queue(events.Warning(message=f"the wall clock jumped by {jump:+.0f} s"), False)
        self._queue(event, durable)
        return self._flush()

    def flush(self) -> bool:
        """Retry what could not be written. Returns False if something is still waiting."""
        return self._flush()

    def settled(self) -> bool:
        """Whether nothing waits for room on a full disk, after another try."""
        return self._flush() or not self._full

    def close(self) -> None:
        self._flush()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _queue(self, event: Event, durable: bool) -> None:
        self._sequence += 1
        stamped = msgspec.structs.replace(
            event, time_wall=self._wall(), time_boot=self._boot(), sequence=self._sequence
        )
        self._waiting.append(stamped)
        self._durable = self._durable or durable

    def _flush(self) -> bool:
        """Write everything that waits. On failure free space once, then keep it for later."""
        if self._drain():
            return True
        if self._on_full is not None:
            self._on_full()
            if self._drain():
                return True
        self._forget()
        return False

    def _drain(self) -> bool:
        """Append what waits, oldest first."""
        try:
            if self._dropped:
                self._append(self._gap())
                self._dropped = 0
            while self._waiting:
                self._append(self._waiting[0])
                del self._waiting[0]
            if self._durable and self._descriptor >= 0:
                _sync(self._descriptor)
            self._durable = False
        except OSError as error:
            self._drop_reason = error.strerror or str(error)
            self._full = error.errno in FULL
            return False
        return True

    def _forget(self) -> None:
        """Keep records in memory for later: if there are many, only rare ones. Count the lost ones."""
        if len(self._waiting) <= WAITING_RECORDS:
            return
        kept = [
            e
            for e in self._waiting
            if not isinstance(e, events.Step | events.Memory | events.Ranks)
        ]
        kept = kept[-WAITING_RECORDS:]
        self._dropped += len(self._waiting) - len(kept)
        self._waiting = kept

    def _gap(self) -> Gap:
        return Gap(
            time_wall=self._wall(),
            time_boot=self._boot(),
            count=self._dropped,
            reason=self._drop_reason,
        )

    def _append(self, event: Event) -> None:
        line = encode_line(event, self._secrets)
        if self._descriptor < 0 or self._size + len(line) > self._segment_bytes:
            self._rotate()
        if self._broken_line:
            line = b"\n" + line
        written = os.write(self._descriptor, line)
        self._size += written
        self._broken_line = written < len(line)
        if self._broken_line:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _rotate(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        path = self._directory / f"events-{self._segment + 1:06d}.log"
        descriptor = os.open(path, flags, 0o600)
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = descriptor
        self._segment += 1
        self._size = 0
        self._broken_line = False
        sync_directory(self._directory)
