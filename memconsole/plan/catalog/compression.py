"""Reads compressed files, in the formats that the standard library can decompress."""

from __future__ import annotations

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


def first_line(raw: BufferedIOBase, suffix: str, most: int) -> bytes:
    """At most `most` bytes of the first line, decompressed. Empty if the file is damaged or compressed with Zstandard,
    which only the trainer can read."""
    file = decompressed(raw, suffix)
    if file is raw:
        return raw.readline(most)
    import lzma
    import zlib

    try:
        return file.readline(most) if file is not None else b""
    except (OSError, EOFError, zlib.error, lzma.LZMAError):
        return b""
