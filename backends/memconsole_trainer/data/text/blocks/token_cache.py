"""Tokens of a source kept on disk, block by block, so that each text is tokenized once: not in each
epoch, nor in each run.

A folder holds two files that are only appended to: `tokens`, and `index` with a record for each block.
A record has a hash of itself and of its tokens. If a crash or damage made the hash wrong, the block is
tokenized and appended again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from memconsole.regular_file import open_descriptor
from memconsole.units import format_bytes
from memconsole_trainer.data import disk_cache
from memconsole_trainer.data.text.blocks.block import NAMES_BYTES, Facts, Made, Roles
from memconsole_trainer.data.text.blocks.packing import Cuts

VERSION = 6
"""Part of every key. Increase it if tokens are made from text in another way."""
RECORD = np.dtype(
    [
        ("block", "<u8"),
        ("start", "<u8"),  # byte of the file of tokens
        ("tokens", "<u4"),
        ("documents", "<u4"),
        ("train_bytes", "<u8"),
        ("left_out", "<u4"),
        ("packed", "<u4"),
        ("cut", "<u4"),
        ("answers_cut", "<u4"),
        ("longest", "<u4"),
        ("tools", "<u4"),
        ("reasoning", "<u4"),
        ("unwritten_roles", "<u4"),
        ("left_names", f"S{NAMES_BYTES}"),
        ("unknown_roles", "<u4"),
        ("odd_names", f"S{NAMES_BYTES}"),
        ("source", "<u8"),  # hash of the texts
        ("hash", "<u8"),
    ]
)
MOST_BLOCK_BYTES = 1 << 28
"""A larger block is not kept."""
_END = np.iinfo(np.uint64).max
"""`start` of the record that says how many blocks a stream has."""
CHECKED_BYTES = 64 << 20
"""Bytes that are written between two checks of the free space of the disk."""


class Kept(NamedTuple):
    """A block as it was kept, and the hash of the texts that it was made of; 0 if unknown."""

    made: Made
    source: int


class TokenCache:
    """Blocks of tokens in `folder`. `count` is the number of blocks, if it is known.

    Only the first process that opens a folder appends to it; others read what it has written. A
    full or failing disk ends the writing, never the run.
    """

    def __init__(
        self,
        folder: Path,
        dtype: Any,
        count: int | None,
        most_bytes: int,
        say: Callable[[str], None],
    ) -> None:
        """At most `most_bytes` are kept in this folder and those beside it. `say` is called once with the reason
        why nothing more is kept. Raises `OSError` if the folder can be neither written nor read."""
        self.folder = folder
        self._dtype = np.dtype(dtype)
        self._count = count
        self._most_bytes = most_bytes
        self._say = say
        self._records = np.zeros(1024, RECORD)
        self._known = 0
        """How many records of the index are read."""
        self._place = np.zeros(0, np.int64)
        """For each block the number of its record, counted from 1; 0: none."""
        self._loaded = 0
        """Bytes of the index that were read."""
        self.ended: int | None = None
        """Number of blocks of a stream that was read to its end."""
        self._beside = 0
        self._writing = False
        self._using = threading.Lock()
        """Held while a block is looked up or kept: the thread that reads ahead, and one that scores answers, may do so at the
        same time."""
        self._to_index = self._to_tokens = -1
        try:
            self._lock = disk_cache.lock(folder)
            if self._lock is not None:
                self._to_index = self._appended("index")
                self._to_tokens = self._appended("tokens")
                self._writing = True
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
        self._index = open_descriptor(folder / "index", follow=False)
        self._tokens = open_descriptor(folder / "tokens", follow=False)
        self._end = os.fstat(self._tokens).st_size
        self._unchecked = CHECKED_BYTES
        if self._writing:
            size = os.fstat(self._index).st_size
            os.ftruncate(self._to_index, size - size % RECORD.itemsize)
        self._load()

    @property
    def kept_bytes(self) -> int:
        """Bytes of the tokens that are kept."""
        return self._end

    def get(self, block: int) -> Kept | None:
        """A block; None if it is not kept, or damaged."""
        with self._using:
            return self._get(block)

    def _get(self, block: int) -> Kept | None:
        if not self._number(block) and not self._writing:
            self._load()
        number = self._number(block)
        if not number:
            return None
        record = self._records[number - 1]
        size = int(record["tokens"]) * self._dtype.itemsize
        data = b""
        if size > MOST_BLOCK_BYTES:
            size = 0  # no block is so large: the record is damaged
        with contextlib.suppress(OSError):
            data = os.pread(self._tokens, size, int(record["start"]))
        if record["block"] != block or len(data) != size or _hash(record, data) != record["hash"]:
            self._place[block] = 0
            return None
        cuts = Cuts(*(int(record[name]) for name in ("packed", "cut", "answers_cut", "longest")))
        facts = Facts(
            int(record["documents"]),
            int(record["train_bytes"]),
            int(record["left_out"]),
            cuts,
            int(record["tools"]),
            int(record["reasoning"]),
            Roles.read(int(record["unwritten_roles"]), bytes(record["left_names"])),
            Roles.read(int(record["unknown_roles"]), bytes(record["odd_names"])),
        )
        return Kept(Made(np.frombuffer(data, self._dtype), facts), int(record["source"]))

    def put(self, block: int, made: Made, source: int = 0) -> None:
        """Keep a block, unless another process writes, or there is no room."""
        with self._using:
            self._put(block, made, source)

    def _put(self, block: int, made: Made, source: int) -> None:
        if not self._writing or self._number(block):
            return
        tokens = np.ascontiguousarray(made.tokens, self._dtype)
        if tokens.nbytes > MOST_BLOCK_BYTES or not self._has_room(tokens.nbytes):
            return
        facts = made.facts
        told = (*facts[:3], *facts.cuts, facts.tools, facts.reasoning)
        roles = (*facts.unwritten_roles.kept(), *facts.unknown_roles.kept())
        record = np.array((block, self._end, len(tokens), *told, *roles, source, 0), RECORD)
        self._append(record, tokens.tobytes())

    def end(self, count: int) -> None:
        """Remember that a stream has `count` blocks."""
        with self._using:
            if self._writing and self.ended is None:
                self._append(
                    np.array((count, _END, *[0] * (len(RECORD.names or ()) - 2)), RECORD), b""
                )

    def _append(self, record: Any, data: bytes) -> None:
        record["hash"] = _hash(record, data)
        try:
            _write(self._to_tokens, data)
            _write(self._to_index, record.tobytes())
        except OSError as error:
            self._stop(error.strerror or type(error).__name__)
            return
        self._end += len(data)
        self._unchecked += len(data)
        self._loaded += RECORD.itemsize
        self._take(record.reshape(1))

    def _has_room(self, size: int) -> bool:
        """Whether `size` bytes may be written; makes room, or stops the writing, if not."""
        if self._unchecked >= CHECKED_BYTES:
            self._unchecked = 0
            self._beside = disk_cache.others(self.folder)
            try:
                free = disk_cache.free_bytes(self.folder)
            except OSError:
                free = 0
            if free < CHECKED_BYTES:
                spared = format_bytes(disk_cache.SPARED_BYTES)
                self._stop(f"{spared} of the disk are left for checkpoints")
                return False
        over = self._beside + self._end + size - self._most_bytes
        if over > 0:
            self._beside -= disk_cache.make_room(self.folder, over)
        if self._beside + self._end + size > self._most_bytes:
            self._stop(f"data.cache_gib allows {format_bytes(self._most_bytes)} for all data")
            return False
        return True

    def _stop(self, reason: str) -> None:
        self._writing = False
        self._say(f"no more tokens are kept on disk: {reason}; the others are made again each time")

    def _number(self, block: int) -> int:
        return int(self._place[block]) if block < len(self._place) else 0

    def _load(self) -> None:
        """Read what was added to the index."""
        parts = []
        with contextlib.suppress(OSError):
            while data := os.pread(self._index, 1 << 24, self._loaded):
                whole = len(data) - len(data) % RECORD.itemsize
                if not whole:
                    break
                parts.append(np.frombuffer(data[:whole], RECORD))
                self._loaded += whole
        if parts:
            self._take(np.concatenate(parts))

    def _take(self, added: Any) -> None:
        """Add records to those that are known. Later ones replace earlier ones of the same block."""
        known, self._known = self._known, self._known + len(added)
        if self._known > len(self._records):
            self._records = _grown(self._records, self._known)
        self._records[known : self._known] = added
        ends = added["start"] == _END
        for record in added[ends]:
            if _hash(record, b"") == record["hash"]:
                self.ended = int(record["block"])
        # A stream's blocks are kept in their order, so that no number can be larger than this.
        limit = self._known if self._count is None else self._count
        usable = np.flatnonzero(~ends & (added["block"] < limit))
        if not len(usable):
            return
        blocks = added["block"][usable].astype(np.int64)
        need = int(blocks.max()) + 1
        if need > len(self._place):
            self._place = _grown(self._place, need)
        self._place[blocks] = known + usable + 1

    def _appended(self, name: str) -> int:
        return os.open(self.folder / name, os.O_WRONLY | os.O_APPEND | disk_cache.FLAGS, 0o600)


def _grown(array: Any, wanted: int) -> Any:
    """`array` with room for at least `wanted` elements, and at least twice as many as before."""
    room = max(wanted, 2 * len(array))
    return np.concatenate([array, np.zeros(room - len(array), array.dtype)])


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _hash(record: Any, data: bytes) -> int:
    """The hash of a record and its tokens."""
    digest = xxhash.xxh3_64(record.tobytes()[: -RECORD["hash"].itemsize])
    digest.update(data)
    return digest.intdigest()
