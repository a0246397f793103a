"""A trainer's sign of progress: 64 bytes rewritten in place.

Readers compare its counters and never its times.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from memconsole.runs.record.files import read_regular

_BODY = struct.Struct("<8sQQQQ16s")
_CHECK = struct.Struct("<I4x")
_MAGIC = b"MCBEAT01"
HEARTBEAT = "heartbeat"
"""Name of the file in an attempt's directory."""
HEARTBEAT_BYTES = _BODY.size + _CHECK.size
assert HEARTBEAT_BYTES == 64


@dataclass(frozen=True)
class Heartbeat:
    """What the trainer was doing at its heartbeat number `count`."""

    count: int
    boot_nanoseconds: int
    step: int
    bytes_written: int
    phase: str


class HeartbeatWriter:
    """Owns an attempt's `heartbeat` file."""

    def __init__(self, attempt_directory: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(attempt_directory / HEARTBEAT, flags, 0o600)
        self._count = 0

    def beat(self, phase: str, step: int, bytes_written: int, boot_seconds: float) -> None:
        """Write the next heartbeat. Takes microseconds; disk errors are ignored here."""
        self._count += 1
        body = _BODY.pack(
            _MAGIC,
            self._count,
            round(boot_seconds * 1e9),
            max(0, step),
            max(0, bytes_written),
            phase.encode()[:16],
        )
        try:
            os.pwrite(self._descriptor, body + _CHECK.pack(zlib.crc32(body)), 0)
        except OSError:
            return

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_heartbeat(attempt_directory: Path) -> Heartbeat | None:
    """The newest heartbeat; None if there is none or the file is damaged."""
    for _ in range(2):
        content = read_regular(attempt_directory / HEARTBEAT, HEARTBEAT_BYTES)
        if content is None:
            return None
        beat = _parse(content)
        if beat is not None:
            return beat
    return None


def _parse(content: bytes) -> Heartbeat | None:
    if len(content) != HEARTBEAT_BYTES:
        return None
    body, check = content[: _BODY.size], content[_BODY.size :]
    if _CHECK.unpack(check)[0] != zlib.crc32(body):
        return None
    magic, count, boot, step, written, phase = _BODY.unpack(body)
    if magic != _MAGIC:
        return None
    return Heartbeat(count, boot, step, written, phase.rstrip(b"\0").decode("utf-8", "replace"))
