"""PyTorch's CUDA caching allocator replayed over a list of allocations: reserved bytes, and the least capacity.

After c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h of torch 2.11 to 2.13, one stream:

- sizes are rounded up to 512 bytes (kMinBlockSize);
- up to 1 MiB (kSmallSize) come from a pool of 2 MiB segments (kSmallBuffer), larger ones from another pool:
  below 10 MiB (kMinLargeAlloc) from segments of 20 MiB (large_segment_size), else from a segment of their
  own rounded up to 2 MiB (kRoundLarge);
- the smallest free block that is large enough is taken, at the lowest address. Its remainder becomes a free
  block of its own if it has at least 512 bytes (small pool) or more than 1 MiB (large pool; should_split;
  max_split_size has no limit by default). Else the block stays whole, and allocated bytes count all of it;
- free neighbours within a segment are merged;
- when the device refuses memory, completely free segments are returned to it, and the request is tried once more.

With `expandable_segments`, which the torch engine turns on, each pool has one range of addresses. Pages of
2 MiB (small pool) or 20 MiB (large) are mapped where a request needs them, blocks split from 512 bytes on, and
a refusal unmaps the pages that are wholly free.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import msgspec

MIN_BLOCK = 512
SMALL_SIZE = 2**20
SMALL_BUFFER = 2 * 2**20
LARGE_BUFFER = 20 * 2**20
MIN_LARGE = 10 * 2**20
ROUND_LARGE = 2 * 2**20
PRECISION = 1 / 512
"""Precision of the least capacity, as a share of it, but at least a page of the small pool."""


class Replayed(msgspec.Struct, frozen=True):
    """The result of a replay."""

    completes: bool
    allocated_bytes: int
    """The peak of the sizes of blocks in use: torch.cuda.max_memory_allocated."""
    reserved_bytes: int
    """The peak of the memory taken from the device: torch.cuda.max_memory_reserved."""


class OutOfMemoryError(Exception):
    """The device has too little memory left, even after all free segments were returned."""


class Block:
    """A range of addresses in one segment that is in use, free, or (in an expandable segment) not mapped."""

    __slots__ = ("address", "after", "before", "mapped", "segment", "size", "used")

    def __init__(self, address: int, size: int, segment: int, mapped: bool = True) -> None:
        self.address, self.size, self.segment = address, size, segment
        self.mapped, self.used = mapped, False
        self.before: Block | None = None
        self.after: Block | None = None

    def cut(self, size: int, *, mapped: bool) -> Block:
        """Shorten this block to its first `size` bytes. Returns a new block of the other bytes, linked behind it."""
        rest = Block(self.address + size, self.size - size, self.segment, mapped)
        rest.before, rest.after = self, self.after
        if self.after is not None:
            self.after.before = rest
        self.after, self.size = rest, size
        return rest


def replay(
    events: Sequence[int],
    sizes: Sequence[int],
    *,
    capacity: int | None = None,
    expandable: bool = True,
) -> Replayed:
    """Run `events` through the allocator: i + 1 allocates `sizes[i]` bytes, -(i + 1) releases them.

    `capacity`: bytes the device can give to the allocator; None is unlimited. `expandable`: whether segments can
    grow. Every trace is replayed so; `tests/accuracy/torch_reserved.py` also replays without, to fit the reserved bytes of
    ROCm.
    """
    kind = ExpandableAllocator if expandable else SegmentAllocator
    allocator = kind(capacity)
    try:
        for event in events:
            if event > 0:
                allocator.allocate(event, sizes[event - 1])
            else:
                allocator.release(-event)
        completes = True
    except OutOfMemoryError:
        completes = False
    return Replayed(completes, allocator.peak_allocated, allocator.peak_reserved)


def least_capacity(events: Sequence[int], sizes: Sequence[int]) -> int:
    """The smallest capacity in which `events` complete, to within `PRECISION`, with expandable segments.

    It lies between the live peak and the bytes that are reserved without a limit.
    """
    unlimited = replay(events, sizes)
    low, high = unlimited.allocated_bytes - 1, unlimited.reserved_bytes
    while high - low > max(SMALL_BUFFER, int(high * PRECISION)):
        middle = (low + high) // 2
        if replay(events, sizes, capacity=middle).completes:
            high = middle
        else:
            low = middle
    return high


def rounded(size: int) -> int:
    """The size of the smallest block that holds `size` bytes."""
    return max(MIN_BLOCK, -(-size // MIN_BLOCK) * MIN_BLOCK)


class Pool:
    """Free blocks of one pool by size, then address."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.page = SMALL_BUFFER if small else LARGE_BUFFER
        self.free: list[tuple[int, int]] = []
        self.blocks: dict[int, Block] = {}
        """Free blocks by their address."""

    def put(self, block: Block) -> None:
        insort(self.free, (block.size, block.address))
        self.blocks[block.address] = block

    def take(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]
        del self.blocks[block.address]

    def best(self, size: int) -> Block | None:
        """The smallest free block of at least `size` bytes."""
        at = bisect_left(self.free, (size, -1))
        return self.blocks[self.free[at][1]] if at < len(self.free) else None


class SegmentAllocator:
    """The allocator with segments of fixed size."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.pools = {True: Pool(True), False: Pool(False)}
        self.used: dict[int, Block] = {}
        """Blocks in use by the name given to `allocate`."""
        self._segments = 0
        self._end = 0

    def allocate(self, name: int, size: int) -> None:
        """Allocate `size` bytes; zero bytes allocate nothing. Raises `OutOfMemoryError`."""
        if not size:
            return
        size = rounded(size)
        pool = self.pools[size <= SMALL_SIZE]
        block = self.take_free(pool, size)
        if block is None:
            block = self.take_new(pool, size)
        if block is None:
            self.return_free_memory()
            block = self.take_new(pool, size)
        if block is None:
            raise OutOfMemoryError
        rest = block.size - size
        if rest >= MIN_BLOCK if self.splits_from_512_bytes(pool) else rest > SMALL_SIZE:
            pool.put(block.cut(size, mapped=True))
        block.used = True
        self.used[name] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def release(self, name: int) -> None:
        """Free the block `name`, and merge it with free neighbours."""
        block = self.used.pop(name, None)
        if block is None:
            return
        block.used = False
        self.allocated -= block.size
        self.join(self._pool_of(block), block)

    def take_free(self, pool: Pool, size: int) -> Block | None:
        """Take the smallest free block of at least `size` bytes from `pool`; None if there is none."""
        block = pool.best(size)
        if block is not None:
            pool.take(block)
        return block

    def take_new(self, pool: Pool, size: int) -> Block | None:
        """Reserve a new segment and return it as one block; None if the device refuses."""
        if pool.small:
            length = SMALL_BUFFER
        elif size < MIN_LARGE:
            length = LARGE_BUFFER
        else:
            length = -(-size // ROUND_LARGE) * ROUND_LARGE
        if not self.reserve(length):
            return None
        self._segments += 1
        block = Block(self._end, length, 2 * self._segments + pool.small)
        self._end += length
        return block

    def splits_from_512_bytes(self, pool: Pool) -> bool:
        """Whether a remainder of 512 bytes becomes a block. Otherwise it must be larger than 1 MiB."""
        return pool.small

    def return_free_memory(self) -> None:
        """Return every completely free segment to the device."""
        for pool in self.pools.values():
            for block in list(pool.blocks.values()):
                if block.before is None and block.after is None:
                    pool.take(block)
                    self.reserved -= block.size

    def reserve(self, size: int) -> bool:
        """Take `size` bytes from the device. False if it has too little left."""
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def join(self, pool: Pool, block: Block) -> Block:
        """Put `block` back into `pool`, merged with its free neighbours."""
        before, after = block.before, block.after
        if before is not None and not before.used and before.mapped:
            pool.take(before)
            before.size += block.size
            before.after = after
            if after is not None:
                after.before = before
            block = before
        if after is not None and not after.used and after.mapped:
            pool.take(after)
            block.size += after.size
            block.after = after.after
            if after.after is not None:
                after.after.before = block
        pool.put(block)
        return block

    def _pool_of(self, block: Block) -> Pool:
        return self.pools[block.segment % 2 == 1]


class ExpandableAllocator(SegmentAllocator):
    """The allocator with one expandable segment for each pool and unlimited addresses.

    A list of blocks covers each segment. The last block is unmapped and unlimited.
    """

    ENDLESS = 2**60
    """The size of the unmapped block at a segment's end, which no trace fills."""
    SMALL_START = 2**61
    """The first address of the small pool's segment. The large pool's segment starts at 0."""

    def __init__(self, capacity: int | None) -> None:
        super().__init__(capacity)
        self._unmapped: dict[bool, list[Block]] = {}
        for small in (True, False):
            # The pools' address ranges do not overlap; the segment number identifies the pool.
            start = self.SMALL_START if small else 0
            block = Block(start, self.ENDLESS, int(small), mapped=False)
            self._unmapped[small] = [block]

    def splits_from_512_bytes(self, pool: Pool) -> bool:
        return True

    def take_free(self, pool: Pool, size: int) -> Block | None:
        """Take the smallest free block of at least `size` bytes. Unmapped bytes right behind a block count as its own."""
        at = bisect_left(pool.free, (size, -1))
        if at == len(pool.free):
            return None
        best = pool.blocks[pool.free[at][1]]
        for position in range(at + 1, len(pool.free)):
            following = pool.blocks[pool.free[position][1]]
            if self._size_with_unmapped(following) >= self._size_with_unmapped(best):
                break
            best = following
        pool.take(best)
        return best

    def take_new(self, pool: Pool, size: int) -> Block | None:
        """Map and return the lowest range of free or unmapped addresses that holds `size` bytes."""
        unmapped = self._unmapped[pool.small]
        for gap in unmapped:
            start = gap.before if gap.before is not None and not gap.before.used else gap
            if self._has_room(start, size):
                return self._map(pool, start, size)
        raise AssertionError("the last block of a segment has no end")

    def return_free_memory(self) -> None:
        """Unmap the pages that lie completely inside free blocks."""
        for pool in self.pools.values():
            for block in list(pool.blocks.values()):
                self._unmap(pool, block)

    def _size_with_unmapped(self, block: Block) -> int:
        """Bytes of a free block and of the unmapped block behind it."""
        after = block.after
        return block.size + (after.size if after is not None and not after.mapped else 0)

    @staticmethod
    def _has_room(start: Block, size: int) -> bool:
        """Whether at least `size` bytes from `start` on are free or unmapped."""
        total, block = 0, start
        while total < size:
            if block.used:
                return False
            total += block.size
            if block.after is None:
                break
            block = block.after
        return total >= size

    def _map(self, pool: Pool, start: Block, size: int) -> Block | None:
        """Map pages from `start` on until they form a free block of at least `size`, and take it from `pool`."""
        block = start
        if not block.mapped:
            mapped = self._map_block(pool, block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            gap = block.after
            assert gap is not None
            mapped = self._map_block(pool, gap, min(size - block.size, gap.size))
            if mapped is None:
                return None
            block = mapped
        pool.take(block)
        return block

    def _map_block(self, pool: Pool, gap: Block, size: int) -> Block | None:
        """Map whole pages from the start of `gap`, merge them with free neighbours, and return the merged block."""
        length = -(-size // pool.page) * pool.page
        if not self.reserve(length):
            return None
        unmapped = self._unmapped[pool.small]
        at = next(i for i, block in enumerate(unmapped) if block is gap)
        if length < gap.size:
            unmapped[at] = gap.cut(length, mapped=False)
        else:
            del unmapped[at]
        gap.mapped = True
        return self.join(pool, gap)

    def _unmap(self, pool: Pool, block: Block) -> None:
        """Unmap the whole pages inside a free block; its other bytes stay mapped."""
        base = self.SMALL_START if pool.small else 0
        first = base + -(-(block.address - base) // pool.page) * pool.page
        last = base + (block.address + block.size - base) // pool.page * pool.page
        if last <= first:
            return
        pool.take(block)
        self.reserved -= last - first
        pages = block
        if first > block.address:
            pages = block.cut(first - block.address, mapped=True)
            pool.put(block)
        if pages.size > last - first:
            pool.put(pages.cut(last - first, mapped=True))
        pages.mapped = False
        self._insert_gap(pool, pages)

    def _insert_gap(self, pool: Pool, gap: Block) -> None:
        """Merge an unmapped block with unmapped neighbours."""
        unmapped = self._unmapped[pool.small]
        before, after = gap.before, gap.after
        if before is not None and not before.mapped:
            unmapped.remove(before)
            gap.address, gap.size = before.address, gap.size + before.size
            gap.before = before.before
            if gap.before is not None:
                gap.before.after = gap
        if after is not None and not after.mapped:
            unmapped.remove(after)
            gap.size, gap.after = gap.size + after.size, after.after
            if gap.after is not None:
                gap.after.before = gap
        at = bisect_left([block.address for block in unmapped], gap.address)
        unmapped.insert(at, gap)
