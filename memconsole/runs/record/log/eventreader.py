"""Follows the event log of one attempt: its segments in order, each record once."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from memconsole.regular_file import open_descriptor
from memconsole.runs.record.log import events
from memconsole.runs.record.log.eventline import RECORD_BYTES, Gap, decode_line
from memconsole.runs.record.log.events import Record

SEGMENT_BYTES = 16 << 20
LINE_BYTES = 1 << 20
"""The longest line a reader keeps in memory."""
CHUNK_BYTES = 1 << 20

_SEGMENT = re.compile(r"events-(\d{6,9})\.log")


class EventReader:
    """Follows an attempt's log. Never raises; unreadable lines are counted."""

    def __init__(
        self, attempt_directory: Path, position: tuple[int, int, int] | None = None
    ) -> None:
        """Start at the beginning, or at another reader's `position`."""
        self.directory = attempt_directory
        self._segment, self._offset, self.last_sequence = position or (0, 0, 0)
        self._inode: int | None = None
        self._skipping = False
        self.damaged = 0
        """Lines with a wrong checksum, length or segment end."""
        self.unknown = 0
        """Whole records of kinds this version does not know."""
        self.missing = 0
        """Sequence numbers never seen, because of damage or because the writer dropped them."""

    @property
    def position(self) -> tuple[int, int, int]:
        """(segment, byte offset, last sequence), for a reader that continues later."""
        return self._segment, self._offset, self.last_sequence

    def read(self, max_bytes: int | None = None) -> list[Record]:
        """Every event since the last call, or those in about `max_bytes` of log."""
        records: list[Record] = []
        left = max_bytes if max_bytes is not None else 1 << 62
        while left > 0:
            if self._segment == 0:
                following = self._following()
                if following is None:
                    break
                self._enter(following)
            # Check before reading: a segment that has a successor is complete.
            following = self._following()
            consumed, at_end = self._read_segment(records, min(left, CHUNK_BYTES))
            left -= consumed
            if at_end:
                if following is None:
                    break
                self._leave()
                self._enter(following)
        return records

    def _following(self) -> int | None:
        later = [n for n in segment_numbers(self.directory) if n > self._segment]
        return later[0] if later else None

    def _enter(self, segment: int) -> None:
        self._segment, self._offset, self._inode, self._skipping = segment, 0, None, False

    def _leave(self) -> None:
        """Leave a complete segment. Text after its last newline counts as damaged."""
        if self.torn:
            self.damaged += 1

    _tail = False

    @property
    def torn(self) -> bool:
        """Whether text without a newline stands at the end: a record that is being written, or a
        damaged one."""
        return self._tail or self._skipping

    def _read_segment(self, records: list[Record], budget: int) -> tuple[int, bool]:
        """Read lines of the current segment. Returns (bytes consumed, whether it reached
        the end).
        """
        path = self.directory / f"events-{self._segment:06d}.log"
        self._tail = self._offset > SEGMENT_BYTES + LINE_BYTES
        if self._tail:  # no writer made this
            return 0, True
        try:
            descriptor = open_descriptor(path, follow=False)
        except OSError:
            return 0, True
        try:
            status = os.fstat(descriptor)
            if status.st_size < self._offset or self._inode not in (None, status.st_ino):
                # The file was cut or replaced: read from the start, and skip known records.
                self.damaged += 1
                self._offset, self._skipping = 0, False
            self._inode = status.st_ino
            wanted = max(min(budget, CHUNK_BYTES), RECORD_BYTES)
            chunk = os.pread(descriptor, wanted, self._offset)
            end = chunk.rfind(b"\n") + 1
            while chunk and not end and len(chunk) <= LINE_BYTES and len(chunk) >= wanted:
                more = os.pread(descriptor, CHUNK_BYTES, self._offset + len(chunk))
                if not more:
                    break
                newline = more.rfind(b"\n") + 1
                end = len(chunk) + newline if newline else 0
                wanted += CHUNK_BYTES
                chunk += more
        except OSError:
            return 0, True
        finally:
            os.close(descriptor)
        if not end:
            if len(chunk) > LINE_BYTES:
                self._skipping = True
                self._offset += len(chunk)
                return len(chunk), False
            self._tail = bool(chunk)
            return 0, True
        for line in chunk[: end - 1].split(b"\n"):
            self._take(line, records)
        self._offset += end
        return end, False

    def _take(self, line: bytes, records: list[Record]) -> None:
        if self._skipping:
            self._skipping = False
            self.damaged += 1
            return
        if not line:
            return
        try:
            self._accept(decode_line(line), records)
        except ValueError:
            self.damaged += 1
            for piece in _joined_lines(line):
                with contextlib.suppress(ValueError):
                    self._accept(decode_line(piece), records)

    def _accept(self, event: Record | Gap | None, records: list[Record]) -> None:
        if event is None:
            self.unknown += 1
            return
        if isinstance(event, Gap):
            message = f"{event.count} events could not be written: {event.reason}"
            records.append(
                events.Warning(
                    time_wall=event.time_wall, time_boot=event.time_boot, message=message
                )
            )
            return
        if 0 < event.sequence <= self.last_sequence:
            return
        if event.sequence:
            self.missing += event.sequence - self.last_sequence - 1
            self.last_sequence = event.sequence
        records.append(event)


def _joined_lines(line: bytes) -> list[bytes]:
    """The lines that a damaged newline joined. Raw tabs occur only before checksums."""
    pieces: list[bytes] = []
    while len(pieces) < 4:
        head, tab, rest = line.partition(b"\t")
        if not tab:
            break
        pieces.append(head + tab + rest[:8])
        line = rest[9:]
    return pieces if len(pieces) > 1 else []


def segment_numbers(attempt_directory: Path) -> list[int]:
    """Numbers of the log's segments, ascending."""
    try:
        names = os.listdir(attempt_directory)
    except OSError:
        return []
    return sorted(int(match[1]) for match in map(_SEGMENT.fullmatch, names) if match)


def last_sequence(attempt_directory: Path) -> int:
    """The number of the last record that can be read."""
    reader = EventReader(attempt_directory)
    while reader.read(max_bytes=SEGMENT_BYTES):
        pass
    return reader.last_sequence
