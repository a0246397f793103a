"""The replay of the CUDA caching allocator: its documented sizes, and what must hold for any program."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memconsole.memory.exact.allocator import (
    ExpandableAllocator,
    SegmentAllocator,
    least_capacity,
    replay,
    rounded,
)

MIB = 2**20


def program(seed: int, length: int = 200) -> tuple[list[int], list[int]]:
    """A random balanced list of allocations and releases, small and large."""
    rng = random.Random(seed)
    events: list[int] = []
    sizes: list[int] = []
    live: list[int] = []
    for _ in range(length):
        if live and rng.random() < 0.48:
            events.append(-live.pop(rng.randrange(len(live))))
        else:
            sizes.append(int(2 ** rng.uniform(3, 26)))
            live.append(len(sizes))
            events.append(len(sizes))
    return [*events, *(-name for name in live)], sizes


@pytest.mark.parametrize(
    ("size", "reserved"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 1024, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (31 * MIB, 32 * MIB),
    ],
)
def test_a_first_allocation_reserves_the_segment_that_pytorch_documents(
    size: int, reserved: int
) -> None:
    found = replay([1], [size], expandable=False)
    assert found.reserved_bytes == reserved


def test_the_rest_of_a_large_block_stays_with_it_up_to_one_mib() -> None:
    """should_split: more than 1 MiB must remain; expandable segments always split."""
    events, sizes = [1, -1, 2], [12 * MIB, 11 * MIB]
    assert replay(events, sizes, expandable=False).allocated_bytes == 12 * MIB
    held = SegmentAllocator(None)
    for event in events:
        held.allocate(event, sizes[event - 1]) if event > 0 else held.release(-event)
    assert held.allocated == 12 * MIB
    finely = ExpandableAllocator(None)
    for event in events:
        finely.allocate(event, sizes[event - 1]) if event > 0 else finely.release(-event)
    assert finely.allocated == 11 * MIB


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = SegmentAllocator(None)
    for name, size in enumerate((40 * MIB, 20 * MIB, 30 * MIB), 1):
        allocator.allocate(name, size)
    addresses = {name: block.address for name, block in allocator.used.items()}
    for name in (1, 2, 3):
        allocator.release(name)
    allocator.allocate(4, 25 * MIB)
    assert allocator.used[4].address == addresses[3]
    assert allocator.reserved == 90 * MIB


def test_free_segments_go_back_when_the_device_refuses() -> None:
    events, sizes = [1, -1, 2], [64 * MIB, 96 * MIB]
    for expandable in (False, True):
        assert replay(events, sizes, capacity=100 * MIB, expandable=expandable).completes
        assert not replay(events, sizes, capacity=90 * MIB, expandable=expandable).completes


def test_segments_fragment_where_expandable_ones_grow() -> None:
    """Two freed neighbours in segments of their own cannot serve one request; in one segment they can."""
    events, sizes = [1, 2, -1, -2, 3], [40 * MIB, 40 * MIB, 80 * MIB]
    assert replay(events, sizes, expandable=False).reserved_bytes == 160 * MIB
    assert replay(events, sizes, expandable=True).reserved_bytes == 80 * MIB


def test_expandable_segments_map_whole_pages() -> None:
    assert replay([1], [3 * MIB], expandable=True).reserved_bytes == 20 * MIB
    assert replay([1, 2], [3 * MIB, 18 * MIB], expandable=True).reserved_bytes == 40 * MIB
    assert replay([1, 2], [512, 3 * MIB], expandable=True).reserved_bytes == 22 * MIB


@given(seed=st.integers(0, 10_000), expandable=st.booleans())
def test_blocks_never_overlap_and_books_balance(seed: int, expandable: bool) -> None:
    events, sizes = program(seed)
    allocator = (ExpandableAllocator if expandable else SegmentAllocator)(None)
    live = most = 0
    for event in events:
        size = sizes[abs(event) - 1]
        if event > 0:
            allocator.allocate(event, size)
            live += rounded(size)
        else:
            allocator.release(-event)
            live -= rounded(size)
        most = max(most, live)
        used = sorted(allocator.used.values(), key=lambda block: block.address)
        for left, right in itertools.pairwise(used):
            assert left.address + left.size <= right.address
        free = [block for pool in allocator.pools.values() for block in pool.blocks.values()]
        held = sum(block.size for block in (*used, *free))
        assert held == allocator.reserved
        assert live <= allocator.allocated <= allocator.reserved
    assert allocator.allocated == 0
    if expandable:
        assert allocator.peak_allocated == most
    allocator.return_free_memory()
    assert allocator.reserved == 0


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_least_capacity_completes_and_less_does_not(seed: int) -> None:
    events, sizes = program(seed)
    free = replay(events, sizes)
    least = least_capacity(events, sizes)
    assert free.allocated_bytes <= least <= free.reserved_bytes
    assert replay(events, sizes, capacity=least).completes
    assert replay(events, sizes, capacity=free.reserved_bytes) == free
    assert not replay(events, sizes, capacity=free.allocated_bytes - 1).completes
