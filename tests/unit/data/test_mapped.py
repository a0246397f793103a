"""Arrays outside the heap: their own pages, which go back to the system with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from memconsole_trainer.host import mapped


def mappings() -> list[tuple[int, int, str]]:
    """Beginning, end and permissions of each mapping of this process."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_ = line.split()
        begin, end = (int(word, 16) for word in span.split("-"))
        found.append((begin, end, permissions))
    return found


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads Linux's list of mappings")
def test_an_array_has_pages_of_its_own_and_gives_them_back() -> None:
    array = mapped.empty((64, 32, 19), np.float32)
    array[:] = 1.0
    at = array.ctypes.data
    assert at % 4096 == 0
    (own,) = [m for m in mappings() if m[0] <= at < m[1]]
    assert own[2] == "rw-p"  # private: it counts as the process's own memory
    del array
    assert not [m for m in mappings() if m[0] <= at < m[1]]


def test_an_array_is_of_zeros_of_its_shape_and_type_and_can_be_empty() -> None:
    found = mapped.empty((3, 5), np.int64)
    assert (found.shape, found.dtype, int(found.sum())) == ((3, 5), np.int64, 0)
    none = mapped.empty((0, 7), np.float32)
    assert (none.shape, none.dtype) == ((0, 7), np.float32)
