"""Hashes of the data that a run has read. With them, a resumed run detects that the data have changed.

A source is read in numbered blocks, and each block is hashed when it is read. A checkpoint holds the
hashes, and one hash of the sizes and modification times of the files. XXH3 hashes faster than memory can
be read. It detects accidents and edits, but not deliberate forgery.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

GROUPS = 4096
"""Most hashes of a part in a checkpoint. If there are more blocks, neighbours share a hash."""
CHECKED_BYTES = 256 << 20
"""Bytes that are read again when a run is resumed, if no file has changed its size or time."""

Content = Iterable[Any]
"""What a block holds, as buffers: bytes or contiguous arrays."""


class BlockHashes:
    """The hashes of one array or list of texts, by block.

    `content` reads a block again. Blocks that earlier attempts of the run have read are known from
    its checkpoint.
    """

    def __init__(self, count: int, content: Callable[[int], Content]) -> None:
        self._count = count
        self._content = content
        self._own = np.zeros(count, np.uint64)
        """The hashes of the blocks that this process has read; 0 for others."""
        self._assumed = np.zeros(count, np.uint64)
        """The hashes of blocks that were read when their tokens were kept."""
        self._earlier = np.zeros(count, np.bool_)
        self._groups = np.zeros(min(count, GROUPS), np.uint64)
        """For each group of neighbours, all hashes of earlier blocks combined by exclusive or."""
        self.changed = False
        """Whether a block had another content when this process read it again."""

    def take(self, block: int, content: Content) -> None:
        """Hash a block that was read."""
        found = _hash(block, content)
        before = self._own[block] or self._assumed[block]
        if before and before != found:
            self.changed = True
        if not self._own[block]:
            self._own[block] = found

    def known(self, block: int) -> int:
        """The hash of a block that this process has read; 0 if it has not."""
        return int(self._own[block])

    def assume(self, block: int, found: int) -> None:
        """Record the hash of a block that is not read, because its tokens are in the cache."""
        self._assumed[block] = found

    def state(self) -> dict[str, Any]:
        """The hashes of all blocks read so far, for a checkpoint."""
        known = np.where(self._own != 0, self._own, self._assumed)
        new = np.flatnonzero((known != 0) & ~self._earlier)
        groups, read = self._groups.copy(), self._earlier.copy()
        np.bitwise_xor.at(groups, new * len(groups) // max(self._count, 1), known[new])
        read[new] = True
        return {
            "blocks": self._count,
            "read": base64.b64encode(np.packbits(read).tobytes()).decode(),
            "hashes": base64.b64encode(groups.astype("<u8").tobytes()).decode(),
        }

    def check(
        self, state: Mapping[str, Any], most_bytes: int | None, tick: Callable[[], None]
    ) -> str:
        """Compare with a checkpoint, reading again up to `most_bytes`, spread over the data.

        Returns "same" if all blocks were read by then and have been compared, "changed" if one
        differs, and "" if not all could be compared. Raises what reading raises.
        """
        if state["blocks"] != self._count:
            return "changed"
        bits = np.frombuffer(base64.b64decode(state["read"]), np.uint8)
        read = np.unpackbits(bits, count=self._count).astype(np.bool_)
        groups = np.frombuffer(base64.b64decode(state["hashes"]), "<u8").astype(np.uint64)
        seen, every = 0, bool(read.all())
        for group in np.random.default_rng(0).permutation(len(groups)):
            if most_bytes is not None and seen >= most_bytes:
                every = False
                break
            first = -(-group * self._count // len(groups))
            stop = -(-(group + 1) * self._count // len(groups))
            together = np.uint64(0)
            for block in (first + np.flatnonzero(read[first:stop])).tolist():
                if not self._own[block]:
                    pieces = list(self._content(block))
                    seen += sum(memoryview(piece).nbytes for piece in pieces)
                    self._own[block] = _hash(block, pieces)
                    tick()
                together ^= self._own[block]
            if together != groups[group]:
                return "changed"
        self._earlier, self._groups = read, groups
        return "same" if every else ""


class DataHashes:
    """What is known of the data of a run: its files, and what was read of each part."""

    def __init__(self, files: Sequence[Path], parts: Mapping[str, BlockHashes]) -> None:
        self.files = files
        self._files = _stamps(files)
        self._parts = parts

    @classmethod
    def of(cls, several: Sequence[DataHashes]) -> DataHashes:
        """The hashes of several sources together."""
        files = [path for one in several for path in one.files]
        named = enumerate(several)
        return cls(files, {f"{i}/{name}": h for i, one in named for name, h in one._parts.items()})

    @property
    def changed(self) -> bool:
        """Whether data that this process read twice had changed meanwhile."""
        return any(part.changed for part in self._parts.values())

    def state(self) -> dict[str, Any]:
        """The hashes to store in a checkpoint, as JSON values."""
        parts = {name: part.state() for name, part in self._parts.items()}
        return {"files": self._files, "parts": parts}

    def difference(self, state: Mapping[str, Any], tick: Callable[[], None]) -> str:
        """What differs from the state in a checkpoint, as one phrase; empty if nothing does.

        Files with another modification time still count as the same data if all of their content was read
        before and is unchanged. Raises what reading raises.
        """
        untouched = state["files"] == self._files
        found = set()
        for name, part in self._parts.items():
            known = state["parts"].get(name)
            same = part.check(known, CHECKED_BYTES if untouched else None, tick) if known else ""
            if same == "changed":
                return "the content that was read before is not the same"
            found.add(same)
        if untouched or found == {"same"}:
            return ""
        return "its files were written again, and not all of their content had been read before"


def text_content(texts: Iterable[str | bytes]) -> Content:
    """The content of a block of texts. The lengths tell where one ends."""
    for text in texts:
        data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        yield b"%d:" % len(data)
        yield data


def text_hash(text: str) -> int:
    """A hash of a text, long enough that different texts have different hashes in practice."""
    return xxhash.xxh3_128_intdigest(text.encode("utf-8", "surrogatepass"))


def array_content(values: NDArray[Any]) -> Content:
    """The content of a block of rows: numbers, or texts."""
    if values.dtype.kind == "O":
        return text_content(values.tolist())
    return (np.ascontiguousarray(values).view(np.uint8),)


def _hash(block: int, content: Content) -> np.uint64:
    """The hash of a block, never 0. The number counts too, so that exchanged blocks differ."""
    digest = xxhash.xxh3_64(seed=block)
    for piece in content:
        digest.update(piece)
    return np.uint64(digest.intdigest() or 1)


def _stamps(files: Sequence[Path]) -> str:
    """One hash of the name, size and modification time of each file."""
    digest = hashlib.sha256()
    for path in files:
        try:
            status = path.stat()
            words = f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0"
        except OSError:
            words = f"{path.name}\0gone\0"  # reading it will say so
        digest.update(words.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
