"""Reads compressed files, in the formats that the standard library can decompress."""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedIOBase
from typing import IO, cast


def decompressed(raw: BufferedIOBase, suffix: str) -> BufferedIOBase | None:
    """The content of an open file with this suffix; `raw` itself if it is not compressed, None for Zstandard."""
    if suffix == ".gz":
        import gzip

        return gzip.GzipFile(fileobj=raw)
    if suffix == ".bz2":
        import bz2

        return bz2.BZ2File(raw)
    if suffix == ".xz":
        import lzma

        return lzma.LZMAFile(cast(IO[bytes], raw))
    return None if suffix == ".zst" else raw


def first_lines(raw: BufferedIOBase, suffix: str, most: int) -> Iterator[bytes]:
    """The lines of the first `most` bytes, decompressed; the last one may be cut. They end where the file is damaged.
    There is none in a file that is compressed with Zstandard, which only the trainer can read."""
    file = decompressed(raw, suffix)
    while file is not None and most > 0:
        line = file.readline(most) if file is raw else _line(file, most)
        if not line:
            return
        yield line
        most -= len(line)


def _line(file: BufferedIOBase, most: int) -> bytes:
    """A line of a compressed file; empty at its end, and where it is damaged."""
    import lzma
    import zlib

    try:
        return file.readline(most)
    except (OSError, EOFError, zlib.error, lzma.LZMAError):
        return b""
