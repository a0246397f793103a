"""Runs a console on a pseudo-terminal, for one browser tab."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import struct
import subprocess
import termios
from collections.abc import Sequence
from dataclasses import dataclass

READ_BYTES = 65536
LARGEST = 500
"""The most columns and rows a page may ask for."""
LEAVE_SECONDS = 3.0
_PRIVATE = ("SSH_CONNECTION", "NO_COLOR", "TMUX", "COLUMNS", "LINES")
"""Variables of the server's own terminal; the browser's terminal must not inherit them."""


@dataclass
class Shell:
    """A running console: its process and the master end of its terminal."""

    process: subprocess.Popen[bytes]
    master: int

    @classmethod
    def open(cls, argv: Sequence[str], columns: int, rows: int) -> Shell:
        """Start `argv` on a new terminal. Raises `OSError`."""
        master, slave = os.openpty()
        try:
            set_size(master, columns, rows)
            environment = {k: v for k, v in os.environ.items() if k not in _PRIVATE}
            process = subprocess.Popen(
                [*argv],
                stdin=slave,
                stdout=slave,
                stderr=slave,
                env=environment | {"TERM": "xterm-256color", "COLORTERM": "truecolor"},
                start_new_session=True,
                close_fds=True,
            )
        except OSError:
            os.close(master)
            raise
        finally:
            os.close(slave)
        return cls(process, master)

    async def read(self) -> bytes:
        """The console's output; empty once it has ended."""
        try:
            return await asyncio.to_thread(os.read, self.master, READ_BYTES)
        except OSError:
            return b""

    async def write(self, keys: bytes) -> None:
        """Type `keys` into the console."""
        while keys:
            written = await asyncio.to_thread(os.write, self.master, keys)
            keys = keys[written:]

    def resize(self, columns: int, rows: int) -> None:
        set_size(self.master, columns, rows)
        os.kill(self.process.pid, signal.SIGWINCH)

    async def close(self) -> None:
        """Hang up, so that the console exits, and kill it if it does not. Runs go on."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGHUP)
            try:
                await asyncio.to_thread(self.process.wait, LEAVE_SECONDS)
            except (subprocess.TimeoutExpired, asyncio.CancelledError):
                self.process.kill()
                self.process.wait()

    def forget(self) -> None:
        """Close the terminal, once nobody reads it."""
        os.close(self.master)


def set_size(descriptor: int, columns: int, rows: int) -> None:
    """Set the terminal's size, within limits."""
    columns, rows = (min(max(1, n), LARGEST) for n in (columns, rows))
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
