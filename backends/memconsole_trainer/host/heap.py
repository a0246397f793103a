"""Returns free memory of glibc's heap to the system. Other C libraries are left alone."""

from __future__ import annotations

import ctypes

LARGEST, SMALLEST = 1 << 19, 1 << 16
"""Bytes of the blocks that fill gaps, from large to small. A block that finds no gap is freed at
once."""
_aside: list[int] = []


def trim() -> None:
    """Return free pages to the system (malloc_trim(3))."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def close_gaps() -> None:
    """Return free pages, then occupy the remaining gaps of at least 64 KiB until the next call.

    malloc puts an array of any size into a gap that has room for it, before it checks the
    thresholds of mallopt(3), and keeps the gap's pages when the array is freed. Compiling leaves
    gaps of many MiB, so the scratch memory of one step would never be returned. Without gaps, large
    arrays come from the system and go back to it.
    """
    library = _glibc()
    if library is None:
        return
    while _aside:
        library.free(_aside.pop())
    library.malloc_trim(0)
    size = LARGEST
    while size >= SMALLEST:
        end = library.sbrk(0)
        block = library.malloc(size)  # touches only the first page of the gap
        if block and block < end and library.sbrk(0) == end:
            _aside.append(block)
        else:
            library.free(block)
            library.malloc_trim(0)  # the heap may have grown by more than the block
            size //= 2


def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
        library.malloc_trim.argtypes = library.malloc.argtypes = [ctypes.c_size_t]
        library.sbrk.argtypes, library.free.argtypes = [ctypes.c_ssize_t], [ctypes.c_void_p]
        library.malloc.restype = library.sbrk.restype = ctypes.c_void_p
    except (OSError, AttributeError):
        return None
    return library
