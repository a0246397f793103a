"""Reads the shapes of the datasets in an HDF5 file, and whether it is whole, without h5py, which the console does not
need to have.

Follows "HDF5 File Format Specification Version 3.0" (The HDF Group) for what h5py and other writers usually make: 8-byte
addresses, and groups whose links are in a symbol table or in the group's header.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Iterator
from io import BufferedReader
from pathlib import Path

from memconsole.regular_file import open_regular

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_DATASPACE, _LINK, _CONTINUED, _SYMBOLS = 0x01, 0x06, 0x10, 0x11
"""Types of header messages."""
_SHARED = 0x02
"""The flag of a message that is stored elsewhere."""
_MOST_READS = 10_000
_MOST_BYTES = 1 << 20
_NAME_BYTES = 1 << 10


def dataset_shapes(path: Path, names: Collection[str]) -> dict[str, tuple[int, ...]] | None:
    """The shapes of those of the datasets that are at the top of a file; None if this reader does not understand the
    file, such as one whose top group is in dense storage. Raises `OSError` if it cannot be opened."""
    with open_regular(path) as file:
        try:
            return _Reader(file).shapes(names)
        except (OSError, ValueError, IndexError, OverflowError, RecursionError, struct.error):
            return None


def damage(path: Path) -> str | None:
    """Why a file is no whole HDF5 file; None if its beginning does not tell. Raises `OSError` if it cannot be opened."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(64)
        if start[:8] == _SIGNATURE:
            try:
                version = start[8]
                (end,) = struct.unpack_from("<Q", start, {0: 40, 1: 44}.get(version, 28))
                sizes = start[13:15] if version < 2 else start[9:11]
            except (IndexError, struct.error):
                return f"the file is truncated: it has {size:,} bytes; copy or make it again"
            if version > 3 or sizes != b"\x08\x08" or end <= size:
                return None
            return f"the file is truncated: it has {size:,} of {end:,} bytes; copy or make it again"
        # The signature may also follow a block of the user's, of 512 bytes or a power of two times as many (section II.A).
        place = 512
        while place < size:
            file.seek(place)
            if file.read(8) == _SIGNATURE:
                return None
            place *= 2
    return "not an HDF5 file"


class _Reader:
    def __init__(self, file: BufferedReader) -> None:
        self._file, self._reads = file, 0

    def shapes(self, names: Collection[str]) -> dict[str, tuple[int, ...]]:
        links = list(self._links(self._root()))
        if not links:
            raise ValueError("no links, or links in dense storage")
        return {name: self._shape(header) for name, header in links if name in names}

    def _shape(self, header: int | None) -> tuple[int, ...]:
        for kind, body in self._messages(header) if header is not None else ():
            if kind == _DATASPACE:
                version, rank = body[0], body[1]
                return struct.unpack_from(f"<{rank}Q", body, 8 if version == 1 else 4)
        raise ValueError("a link to elsewhere, or no dataset")

    def _root(self) -> int:
        """The address of the root group's header (section II)."""
        start = self._at(0, 96)
        version = start[8]
        sizes = start[13:15] if version < 2 else start[9:11]
        if start[:8] != _SIGNATURE or version > 3 or sizes != b"\x08\x08":
            raise ValueError("not a usual HDF5 file")
        (address,) = struct.unpack_from("<Q", start, {0: 64, 1: 68}.get(version, 36))
        return int(address)

    def _messages(self, address: int) -> Iterator[tuple[int, bytes]]:
        """Type and content of each message of an object's header (section IV.A)."""
        start = self._at(address, 64)
        version_2 = start[:4] == b"OHDR"
        if version_2:
            flags = start[5]
            size_at = 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
            head_size = 1 << (flags & 3)
            size = int.from_bytes(start[size_at : size_at + head_size], "little")
            head = struct.Struct("<BHB2x" if flags & 0x04 else "<BHB")
            blocks = [(address + size_at + head_size, size)]
        else:
            head = struct.Struct("<HHB3x")
            blocks = [(address + 16, struct.unpack_from("<I", start, 8)[0])]
        for begin, size in blocks:  # grows by the blocks that continue the header
            block, place = self._at(begin, size), 0
            while place + head.size <= len(block):
                kind, length, flags = head.unpack_from(block, place)
                body = block[place + head.size : place + head.size + length]
                place += head.size + length
                if kind == _CONTINUED:
                    where, size = struct.unpack_from("<QQ", body)
                    # Between a signature and a checksum of 4 bytes each, in version 2.
                    blocks.append((where + 4, size - 8) if version_2 else (where, size))
                elif not flags & _SHARED:
                    yield kind, body

    def _links(self, group: int) -> Iterator[tuple[str, int | None]]:
        """Name and header address of each object in a group; None as the address of a soft or an external link."""
        for kind, body in self._messages(group):
            if kind == _SYMBOLS:
                tree, heap = struct.unpack_from("<QQ", body)
                (names,) = struct.unpack_from("<Q", self._at(heap, 32), 24)
                yield from self._symbols(tree, names)
            elif kind == _LINK:
                flags, place, link = body[1], 2, 0
                if flags & 0x08:
                    link, place = body[place], place + 1
                place += (8 if flags & 0x04 else 0) + (1 if flags & 0x10 else 0)
                size = 1 << (flags & 3)
                length = int.from_bytes(body[place : place + size], "little")
                name = body[place + size : place + size + length].decode()
                address = (
                    struct.unpack_from("<Q", body, place + size + length)[0] if not link else None
                )
                yield name, address

    def _symbols(self, node: int, names: int) -> Iterator[tuple[str, int]]:
        """Name and header address of the symbols below a node of a B-tree (section III.A); `names` is the address of
        their names."""
        start = self._at(node, 8)
        if start[:4] == b"TREE":
            (count,) = struct.unpack_from("<H", start, 6)
            keys = self._at(node + 24, 16 * count + 8)
            for entry in range(count):
                (child,) = struct.unpack_from("<Q", keys, 16 * entry + 8)
                yield from self._symbols(child, names)
        elif start[:4] == b"SNOD":
            (count,) = struct.unpack_from("<H", start, 6)
            entries = self._at(node + 8, 40 * count)
            for entry in range(count):
                name, header = struct.unpack_from("<QQ", entries, 40 * entry)
                text = self._at(names + name, _NAME_BYTES).partition(b"\0")[0]
                yield text.decode(), header

    def _at(self, address: int, count: int) -> bytes:
        """Up to `count` bytes. Raises `ValueError` in a damaged file, which could lead in circles."""
        self._reads += 1
        if self._reads > _MOST_READS or not 0 <= count <= _MOST_BYTES:
            raise ValueError("a damaged file")
        self._file.seek(address)
        return self._file.read(count)
