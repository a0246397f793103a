"""`state.json`: the state of a run after the records read so far, for the next reader."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import msgspec

from memconsole import typed_json
from memconsole.runs.read.state.reduce import STATE_VERSION, RunState
from memconsole.runs.record import files

_CHECKSUM = re.compile(rb',"checksum":"([0-9a-f]{8})"\}\s*')


class SavedState(msgspec.Struct, frozen=True, kw_only=True):
    """The state after the events up to `position` in the log of `state.attempt`."""

    version: int = STATE_VERSION
    position: tuple[int, int, int]
    """From `EventReader`: segment, byte offset, last sequence number."""
    damaged: int
    """Lines that could not be read."""
    unseen: int = 0
    """Sequence numbers that were not seen."""
    state: RunState


def write_saved(path: Path, saved: SavedState) -> None:
    """Replace the file. Its last key is the CRC-32 of the JSON without that key. Raises `OSError`."""
    content = msgspec.json.encode(saved)
    sealed = b'%b,"checksum":"%08x"}' % (content[:-1], zlib.crc32(content))
    files.write_atomic(path, sealed, durable=False)


def read_saved(path: Path) -> SavedState | None:
    """The saved state; None if it is missing, damaged, or of another version.

    A file without a checksum, as older versions wrote it, is read all the same.
    """
    content = files.read_regular(path)
    if content is None:
        return None
    seal = _CHECKSUM.search(content, max(0, len(content) - 64))
    if seal is not None and seal.end() == len(content):
        content = content[: seal.start()] + b"}"
        if int(seal[1], 16) != zlib.crc32(content):
            return None
    try:
        saved = typed_json.decode(content, SavedState)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return saved if saved.version == STATE_VERSION else None
