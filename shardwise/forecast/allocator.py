"""torch's caching allocator for CUDA, played from a tape: bytes allocated, and bytes reserved from the device.

Sizes are rounded to 512 bytes. Each stream has two pools: blocks of up to 1 MiB are cut from segments of 2 MiB, larger
ones from segments of 20 MiB, and from 10 MiB on from segments of their own size, rounded to 2 MiB. A request takes the
smallest free block of its pool that fits, and leaves the rest as a free block; neighbours that are free become one.

    segment   | in use | free    | in use |      a free block is reserved and not allocated
"""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Block", "CachingAllocator"]

_ROUND = 512
_SMALL = 1 << 20
_SMALL_SEGMENT = 2 << 20
_MIN_LARGE = 10 << 20
_LARGE_SEGMENT = 20 << 20
_LARGE_ROUND = 2 << 20


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment, in use or free."""

    size: int
    address: int
    pool: _Pool
    before: Block | None = None
    after: Block | None = None
    is_free: bool = False


@dataclass(slots=True)
class _Pool:
    """Free blocks of one stream, by size and then address; small ones apart from large ones."""

    is_small: bool
    free: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[tuple[int, int], Block] = field(default_factory=dict)

    def put(self, block: Block) -> None:
        block.is_free = True
        key = (block.size, block.address)
        bisect.insort(self.free, key)
        self.blocks[key] = block

    def take(self, block: Block) -> None:
        block.is_free = False
        key = (block.size, block.address)
        del self.free[bisect.bisect_left(self.free, key)]
        del self.blocks[key]

    def smallest_for(self, size: int) -> Block | None:
        index = bisect.bisect_left(self.free, (size, 0))
        return self.blocks[self.free[index]] if index < len(self.free) else None


class CachingAllocator:
    """What is allocated and reserved on one device; ``limit`` is the device's memory, if it may run out."""

    def __init__(self, limit: int | None = None) -> None:
        self.allocated = 0
        self.reserved = 0
        self.most_allocated = 0
        self.most_reserved = 0
        # How often cached segments had to be returned to the device because its memory ran out.
        self.num_retries = 0
        self._limit = limit
        self._pools: dict[tuple[str, bool], _Pool] = {}
        self._end = 0

    def allocate(self, num_bytes: int, stream: str) -> Block:
        size = max(_ROUND, -(-num_bytes // _ROUND) * _ROUND)
        is_small = size <= _SMALL
        pool = self._pools.setdefault((stream, is_small), _Pool(is_small))
        block = pool.smallest_for(size)
        if block is None:
            block = self._new_segment(size, pool)
        else:
            pool.take(block)
        rest = block.size - size
        if rest >= (_ROUND if is_small else _SMALL + 1):
            left = Block(rest, block.address + size, pool, block, block.after)
            if block.after is not None:
                block.after.before = left
            block.after = left
            block.size = size
            pool.put(left)
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def _new_segment(self, size: int, pool: _Pool) -> Block:
        if size <= _SMALL:
            segment = _SMALL_SEGMENT
        elif size < _MIN_LARGE:
            segment = _LARGE_SEGMENT
        else:
            segment = -(-size // _LARGE_ROUND) * _LARGE_ROUND
        if self._limit is not None and self.reserved + segment > self._limit:
            self.num_retries += 1
            self.release_cached()
        self.reserved += segment
        self.most_reserved = max(self.most_reserved, self.reserved)
        # Segments are not neighbours of one another.
        block = Block(segment, self._end, pool)
        self._end += segment + _ROUND
        return block

    def free(self, block: Block) -> None:
        self.allocated -= block.size
        pool = block.pool
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                pool.take(other)
                _merge(block, other)
        pool.put(block)

    def release_cached(self) -> None:
        """Returns segments to the device that are free as a whole, as torch does before it gives up."""
        for pool in self._pools.values():
            for block in list(pool.blocks.values()):
                if block.before is None and block.after is None:
                    pool.take(block)
                    self.reserved -= block.size

    def free_blocks(self) -> Counter[str]:
        """Bytes that are reserved and free, by stream."""
        found: Counter[str] = Counter()
        for (stream, _), pool in self._pools.items():
            found[stream] += sum(size for size, _ in pool.free)
        return found


def _merge(block: Block, other: Block) -> None:
    """Makes ``other``, a neighbour, part of ``block``."""
    if other is block.before:
        block.address = other.address
        block.before = other.before
        if other.before is not None:
            other.before.after = block
    else:
        block.after = other.after
        if other.after is not None:
            other.after.before = block
    block.size += other.size
