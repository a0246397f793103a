"""The C library's heap, where it is glibc's: what it holds free goes back to the system."""

from __future__ import annotations

import ctypes

LARGEST, SMALLEST = 1 << 19, 1 << 16
"""Bytes of what gaps are filled with: whatever finds no gap is given back."""
_aside: list[int] = []


def trim() -> None:
    """Return free pages to the system (malloc_trim(3))."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def close_gaps() -> None:
    """Return free pages, and take the gaps of at least 64 KiB that they leave out of use until the next call.

    An array of any size is put into a gap where one has room for it, before the thresholds of mallopt(3) are asked,
    and the gap's pages stay when the array goes. Compiling leaves gaps of many MiB: the scratch of one step would
    be held ever after. With none, large arrays come from the system and go back to it.
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
        block = library.malloc(size)  # of a gap only its first page is touched
        if block and block < end and library.sbrk(0) == end:
            _aside.append(block)
        else:
            library.free(block)
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
