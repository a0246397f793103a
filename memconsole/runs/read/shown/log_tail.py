"""Reads the last lines of a trainer's output, with progress bars resolved.

A large file is not read from its start.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

from memconsole.regular_file import open_regular
from memconsole.sanitize import clean_line

MAX_LINES = 200
_BLOCK = 64 * 1024
_FIRST_LOOK = 1024 * 1024
"""The most bytes read backwards on the first poll, and the most read on any later poll."""
_LONGEST_LINE = 64 * 1024


class LogTail:
    """Follows one growing file. Never raises, whatever the file contains."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._partial = b""
        self._offset = 0
        self._inode: int | None = None

    def poll(self) -> tuple[str, ...]:
        """The current last lines; an unfinished line is the last one."""
        try:
            with open_regular(self.path) as file:
                self._read(file.fileno())
        except OSError:
            pass
        shown = tuple(self._lines)
        partial = _resolve(self._partial)
        return (*shown[1 - MAX_LINES :], partial) if partial else shown

    def _read(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._lines.clear()
            self._partial = b""
            self._inode = status.st_ino
            self._offset = _start_of_last_lines(descriptor, status.st_size)
        elif status.st_size - self._offset > _FIRST_LOOK:
            # Too much was added since the last poll: skip what would have scrolled off the screen.
            self._partial = b""
            self._offset = _start_of_last_lines(descriptor, status.st_size)
        while self._offset < status.st_size:
            block = os.pread(descriptor, _BLOCK, self._offset)
            if not block:
                break
            self._offset += len(block)
            *complete, self._partial = (self._partial + block).split(b"\n")
            self._lines.extend(_resolve(line) for line in complete)
            if len(self._partial) > _LONGEST_LINE:
                self._partial = self._partial[-_LONGEST_LINE:]


def _start_of_last_lines(descriptor: int, size: int) -> int:
    """Offset after which the file has about `MAX_LINES` lines, found by reading backwards."""
    position, breaks = size, 0
    while position > 0 and size - position < _FIRST_LOOK:
        position = max(0, position - _BLOCK)
        block = os.pread(descriptor, _BLOCK, position)
        breaks += block.count(b"\n")
        if breaks > MAX_LINES:
            break
    if position == 0:
        return 0
    # Start at a whole line, unless the line is longer than a block.
    cut = os.pread(descriptor, _BLOCK, position).find(b"\n")
    return position + cut + 1


def _resolve(line: bytes) -> str:
    """What a terminal still shows of a line after carriage returns overwrote earlier text."""
    for part in reversed(line.split(b"\r")):
        shown = clean_line(part.decode("utf-8", errors="replace"))
        if shown.strip():
            return shown
    return ""
