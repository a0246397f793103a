"""A real pseudo-terminal with an emulator behind it, for driving the console by keys."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Mapping, Sequence

import pyte

KEYS = {
    "enter": "\r", "escape": "\x1b", "tab": "\t", "space": " ", "backspace": "\x7f",
    "up": "\x1b[A", "down": "\x1b[B", "right": "\x1b[C", "left": "\x1b[D",
    "ctrl+l": "\x0c", "ctrl+q": "\x11", "ctrl+c": "\x03",
}  # fmt: skip


PRIVATE = re.compile(rb"\x1b\[[<>=?][0-9;]*[a-zA-Z$]")
"""Private sequences; pyte knows only those that set and reset modes."""


def only_known(match: re.Match[bytes]) -> bytes:
    """A private sequence if pyte knows it, else nothing."""
    text = match.group(0)
    return text if text[2:3] == b"?" and text[-1:] in b"hl" else b""


class Terminal:
    """`argv` running in its own session on a pty of `columns` x `rows`."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], columns: int = 80, rows: int = 24
    ) -> None:
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        self.raw = bytearray()
        self.master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            argv,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**env, "TERM": "xterm-256color", "COLORTERM": "truecolor"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            close_fds=True,
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                ready, _, _ = select.select([self.master], [], [], 0.5)
                if not ready:
                    continue
                data = os.read(self.master, 65536)
            except (OSError, ValueError):
                return
            if not data:
                return
            with self._lock:
                self.raw += data
                self._stream.feed(PRIVATE.sub(only_known, data))

    def press(self, *keys: str) -> None:
        """Send named keys or literal text, one after the other."""
        for key in keys:
            os.write(self.master, KEYS.get(key, key).encode())
            time.sleep(0.05)

    @property
    def text(self) -> str:
        """The screen as lines of text."""
        with self._lock:
            return "\n".join(line.rstrip() for line in self._screen.display)

    def wait_for(self, pattern: str, seconds: float = 20.0) -> re.Match[str]:
        """Wait until the screen matches; fails showing the screen."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            match = re.search(pattern, self.text)
            if match:
                return match
            time.sleep(0.05)
        raise AssertionError(f"{pattern!r} not on the screen after {seconds} s:\n{self.text}")

    def wait_gone(self, pattern: str, seconds: float = 20.0) -> None:
        """Wait until the screen no longer matches."""
        end = time.monotonic() + seconds
        while re.search(pattern, self.text):
            assert time.monotonic() < end, f"{pattern!r} still on the screen:\n{self.text}"
            time.sleep(0.05)

    def exit_code(self, seconds: float = 20.0) -> int:
        """Wait for the program to end."""
        return self.process.wait(seconds)

    def hang_up(self) -> None:
        """Close the terminal as a dropped SSH connection does."""
        os.close(self.master)
        os.killpg(self.process.pid, signal.SIGHUP)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        try:
            os.close(self.master)
        except OSError:
            return
