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
    "ctrl+l": "\x0c", "ctrl+q": "\x11", "ctrl+c": "\x03", "ctrl+z": "\x1a",
}  # fmt: skip


PRIVATE = re.compile(rb"\x1b\[[<>=?][0-9;]*[a-zA-Z$]")
"""Private sequences; pyte knows only those that set and reset modes."""


def only_known(match: re.Match[bytes]) -> bytes:
    """A private sequence if pyte knows it, else nothing."""
    text = match.group(0)
    return text if text[2:3] == b"?" and text[-1:] in b"hl" else b""


class Terminal:
    """`argv` running in its own session on a pty of `columns` x `rows`.

    `bytes_per_second` is how fast the other end reads: a slow link.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        columns: int = 80,
        rows: int = 24,
        bytes_per_second: int | None = None,
    ) -> None:
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        self.raw = bytearray()
        self._drawn = 0
        self._closing = False
        self.heard_at = time.monotonic()
        """When the newest bytes came."""
        self._bytes_per_second = bytes_per_second
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
        while not self._closing:
            try:
                ready, _, _ = select.select([self.master], [], [], 0.1)
                if not ready:
                    continue
                data = os.read(self.master, self._portion())
            except (OSError, ValueError):
                return
            if not data:
                return
            self.heard_at = time.monotonic()
            with self._lock:
                self.raw += data

    def _portion(self) -> int:
        """How much to read now; on a slow link not at once again."""
        if self._bytes_per_second is None:
            return 65536
        time.sleep(0.05)
        return max(1, self._bytes_per_second // 20)

    def send(self, keys: str) -> None:
        """Send one named key, or text, and wait for nothing."""
        os.write(self.master, KEYS.get(keys, keys).encode())

    def rest(self, quiet_seconds: float = 0.2, most_seconds: float = 10.0) -> None:
        """Wait until the program has been silent for a while."""
        end = time.monotonic() + most_seconds
        while time.monotonic() < end and time.monotonic() - self.heard_at < quiet_seconds:
            time.sleep(0.01)

    def press(self, *keys: str) -> None:
        """Send named keys or literal text, one after the other."""
        for key in keys:
            os.write(self.master, KEYS.get(key, key).encode())
            time.sleep(0.05)

    @property
    def text(self) -> str:
        """The screen as lines of text; the emulator is given what came since only now, as it is slow."""
        with self._lock:
            news = bytes(self.raw[self._drawn :])
            self._drawn = len(self.raw)
            self._stream.feed(PRIVATE.sub(only_known, news))
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
        self._close_master()
        os.killpg(self.process.pid, signal.SIGHUP)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._close_master()

    def _close_master(self) -> None:
        """Once nobody reads it any more: its number may soon be another terminal's."""
        if not self._closing:
            self._closing = True
            self._reader.join()
            os.close(self.master)


def launch(console: Terminal) -> None:
    """Launch the plan on the screen under the name that the console proposes."""
    console.press("l")
    console.wait_for("starts it, ", 60)
    console.press("enter")
