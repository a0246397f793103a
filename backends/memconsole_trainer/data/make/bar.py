"""A progress bar on one line of a terminal; elsewhere a line per tenth."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from memconsole.units import format_count, format_duration

WIDTH = 24
SECONDS = 0.2
"""Shortest time between two drawings of the bar."""


class Bar:
    """Shows how many of `total` units are done, units per second, and the time left."""

    def __init__(
        self, name: str, units: str, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._units, self._stream, self._clock = name, units, stream, clock
        self._redraws = stream.isatty()
        self._started = self._drawn = clock()
        self._tenth, self._width = 0, 0
        self._interrupted = False

    def at(self, done: int, total: int) -> None:
        """`done` of `total` units are written. Raises `KeyboardInterrupt` after `interrupt`."""
        if self._interrupted:
            raise KeyboardInterrupt
        now = self._clock()
        tenth = 10 * done // max(total, 1)
        if self._redraws:
            if now - self._drawn >= SECONDS or done >= total:
                self._drawn = now
                line = self._line(done, total, now)
                self._stream.write("\r" + line.ljust(self._width))
                self._width = len(line)
        elif tenth > self._tenth:
            self._tenth = tenth
            self._stream.write(self._line(done, total, now) + "\n")
        self._stream.flush()

    def interrupt(self) -> None:
        """Let the next `at` raise. A handler that raises by itself may be called inside a library,
        which would swallow the exception."""
        self._interrupted = True

    def end(self) -> None:
        """Leave the line of the bar."""
        if self._redraws and self._width:
            self._stream.write("\n")
            self._stream.flush()

    def _line(self, done: int, total: int, now: float) -> str:
        filled = WIDTH * done // max(total, 1)
        bar = "#" * filled + "." * (WIDTH - filled)
        seconds = now - self._started
        rate = done / seconds if seconds > 0 else 0.0
        left = f"{format_duration((total - done) / rate)} left" if rate and done < total else ""
        words = [
            f"{self._name} [{bar}] {100 * done // max(total, 1):3d} %",
            f"{done:,} of {total:,} {self._units}",
            f"{format_count(rate)}/s" if rate else "",
            left or (format_duration(seconds) if done >= total else ""),
        ]
        return "  ".join(word for word in words if word)
