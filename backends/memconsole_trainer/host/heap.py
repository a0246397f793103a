"""Returns free memory of glibc's heap, or of jemalloc, to the system. Does nothing with other C libraries."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

LARGEST, SMALLEST = 1 << 19, 1 << 16
"""Bytes of the blocks that fill gaps, from large to small. A block that finds no gap is freed at
once."""
_aside: list[int] = []
_NO_HUGE_PAGES = 15
"""MADV_NOHUGEPAGE of madvise(2)."""
_PURGE = b"arena.4096.purge"
"""What mallctl(3) calls the return of the free pages of all arenas (4096: MALLCTL_ARENAS_ALL)."""


def trim() -> None:
    """Return free pages to the system (malloc_trim(3), and mallctl(3) if jemalloc is loaded), and let the heap use small
    pages again."""
    library = _glibc()
    if library is None:
        return
    if hasattr(library, "mallctl"):
        library.mallctl(_PURGE, None, None, None, ctypes.c_size_t(0))
    library.malloc_trim(0)
    _take_small_pages(library)


def _take_small_pages(library: ctypes.CDLL) -> None:
    """Let the heap use small pages. Huge pages are for large blocks, which have mappings of their own; in the heap, a
    single small array would keep a whole huge page."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            if line.endswith("[heap]"):
                begin, end = (int(word, 16) for word in line.split()[0].split("-"))
                library.madvise(begin, end - begin, _NO_HUGE_PAGES)


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
    trim()
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
        library.madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
        library.sbrk.argtypes, library.free.argtypes = [ctypes.c_ssize_t], [ctypes.c_void_p]
        library.malloc.restype = library.sbrk.restype = ctypes.c_void_p
    except (OSError, AttributeError):
        return None
    return library
