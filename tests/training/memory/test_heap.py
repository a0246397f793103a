"""Arrays do not move into what the heap holds free, and what is free goes back to the system."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from memconsole.plan.machine import jemalloc
from memconsole.runs.act.environment import JEMALLOC_CONF

PROGRAM = """
import ctypes, sys
from memconsole_trainer.host import heap
from memconsole_trainer.host.host_memory import resident

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def stays_after_an_array():
    before = resident().anonymous
    array = libc.malloc(12 << 20)
    ctypes.memset(array, 1, 12 << 20)
    libc.free(array)
    return resident().anonymous - before

blocks = [libc.malloc(900 << 10) for _ in range(40)]
while libc.malloc(100 << 10) < blocks[-1]:
    pass
for block in blocks:
    libc.free(block)
heap.trim()
open_gap = stays_after_an_array()
for _ in range(2):
    heap.close_gaps()
print(open_gap, stays_after_an_array())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's heap")
def test_an_array_does_not_stay_in_a_gap_that_was_closed() -> None:
    thresholds = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(1 << 20))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **thresholds, "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    in_gap, beside = map(int, done.stdout.split())
    assert in_gap > 10 << 20
    assert beside < 1 << 20


FREED = """
import ctypes
from memconsole_trainer.host import heap
from memconsole_trainer.host.host_memory import resident

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = libc.free.argtypes = [ctypes.c_size_t]
before = resident().anonymous
array = libc.malloc(12 << 20)
ctypes.memset(array, 1, 12 << 20)
libc.free(array)
kept = resident().anonymous - before
heap.trim()
print(kept, resident().anonymous - before)
"""


@pytest.mark.skipif(not jemalloc.library(), reason="jemalloc is not installed")
def test_jemalloc_returns_what_it_keeps_when_it_is_told_to() -> None:
    own = {"LD_PRELOAD": jemalloc.library(), "MALLOC_CONF": JEMALLOC_CONF}
    done = subprocess.run(
        [sys.executable, "-c", FREED],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=True,
    )
    kept, left = map(int, done.stdout.split())
    assert kept > 11 << 20
    assert left < 1 << 20
