"""The simulated caching allocator: which requests are rounded, cut from which segments, and joined again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwise.forecast.allocator import CachingAllocator

MIB = 1 << 20


def test_sizes_are_rounded_to_512_bytes():
    allocator = CachingAllocator()
    allocator.allocate(1, "compute")
    assert allocator.allocated == 512


def test_small_blocks_share_a_segment_of_2_mib():
    allocator = CachingAllocator()
    for _ in range(2):
        allocator.allocate(MIB, "compute")
    assert allocator.reserved == 2 * MIB
    allocator.allocate(512, "compute")
    assert allocator.reserved == 4 * MIB


def test_blocks_above_1_mib_are_cut_from_20_mib_and_from_10_mib_on_have_segments_of_their_size():
    allocator = CachingAllocator()
    allocator.allocate(MIB + 512, "compute")
    assert allocator.reserved == 20 * MIB
    allocator.allocate(11 * MIB, "compute")
    assert allocator.reserved == 20 * MIB
    allocator.allocate(11 * MIB, "compute")
    assert allocator.reserved == 32 * MIB


def test_streams_do_not_share_free_blocks():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MIB, "gather"))
    allocator.allocate(12 * MIB, "compute")
    assert allocator.reserved == 24 * MIB


def test_the_smallest_block_that_fits_is_taken_and_its_rest_stays_free():
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MIB, "compute"), allocator.allocate(12 * MIB, "compute")
    allocator.free(large)
    allocator.free(small)
    allocator.allocate(12 * MIB, "compute")
    allocator.allocate(40 * MIB, "compute")
    assert allocator.reserved == 52 * MIB


def test_free_neighbours_become_one_block():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(4 * MIB, "compute") for _ in range(5)]
    for index in (1, 3, 2):
        allocator.free(blocks[index])
    allocator.allocate(12 * MIB, "compute")
    assert allocator.reserved == 20 * MIB


def test_cached_segments_are_returned_before_memory_runs_out():
    allocator = CachingAllocator(limit=30 * MIB)
    allocator.free(allocator.allocate(20 * MIB, "gather"))
    allocator.allocate(20 * MIB, "compute")
    assert allocator.num_retries == 1
    assert allocator.reserved == 20 * MIB


@given(st.lists(st.tuples(st.integers(1, 64 * MIB), st.sampled_from("ab"), st.integers(0, 20)), max_size=60))
def test_what_is_freed_can_be_allocated_again_without_another_segment(requests):
    allocator = CachingAllocator()
    held = []
    for size, stream, freed in requests:
        held.append(allocator.allocate(size, stream))
        if freed < len(held) - 1:
            allocator.free(held.pop(freed))
        assert sum(block.size for block in held) == allocator.allocated <= allocator.reserved
    for block in held:
        allocator.free(block)
    assert allocator.allocated == 0
    assert sum(allocator.free_blocks().values()) == allocator.reserved
    allocator.release_cached()
    assert allocator.reserved == 0
