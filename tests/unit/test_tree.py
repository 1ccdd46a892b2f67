"""The order of exact sums: recursive halving, however terms are spread over ranks and over time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.planning.sums import is_power_of_two, total, tree_sum, with_term

# A sum is written down as the pair of what was added, so that two sums are equal only if made in the same order.
Sum = int | tuple["Sum", "Sum"]


def pair(left: Sum, right: Sum) -> Sum:
    return (left, right)


def by_halving(terms: list[int]) -> Sum:
    """Cut at the largest power of two below the number of terms; sum both sides; add."""
    if len(terms) == 1:
        return terms[0]
    half = 1
    while 2 * half < len(terms):
        half *= 2
    return (by_halving(terms[:half]), by_halving(terms[half:]))


@given(num_terms=st.integers(1, 200))
def test_a_sum_is_made_by_recursive_halving(num_terms: int) -> None:
    terms = list(range(num_terms))
    assert tree_sum(terms, pair) == by_halving(terms)


@given(world_log2=st.integers(0, 6), num_backwards=st.integers(1, 40))
def test_terms_summed_over_ranks_first_come_to_the_same_sum(world_log2: int, num_backwards: int) -> None:
    world = 2**world_log2
    terms = list(range(world * num_backwards))
    rows = [tree_sum(terms[start : start + world], pair) for start in range(0, len(terms), world)]
    assert tree_sum(rows, pair) == by_halving(terms)


@given(logs=st.tuples(st.integers(0, 4), st.integers(0, 4)), num_backwards=st.integers(1, 20))
def test_so_do_terms_summed_over_shards_then_over_replicas(logs: tuple[int, int], num_backwards: int) -> None:
    shards, replicas = 2 ** logs[0], 2 ** logs[1]
    terms = iter(range(shards * replicas * num_backwards))
    rows: list[Sum] = [
        tree_sum([tree_sum([next(terms) for _ in range(shards)], pair) for _ in range(replicas)], pair)
        for _ in range(num_backwards)
    ]
    assert tree_sum(rows, pair) == by_halving(list(range(shards * replicas * num_backwards)))


@given(num_terms=st.integers(1, 300))
def test_no_more_blocks_wait_than_the_tree_is_high_and_they_give_the_sum_at_any_time(num_terms: int) -> None:
    blocks: tuple[Sum, ...] = ()
    for count in range(num_terms):
        blocks = with_term(blocks, count, count, pair)
        assert len(blocks) == (count + 1).bit_count() <= (count + 1).bit_length()
        assert total(blocks, pair) == by_halving(list(range(count + 1)))


@pytest.mark.parametrize("number", [1, 2, 64, 0.5, 2.0**-20, 2.0**100])
def test_powers_of_two_are_known(number: float) -> None:
    assert is_power_of_two(number)


@pytest.mark.parametrize("number", [0, -2, 3, 6, 0.75, 0.1, float("inf"), float("nan")])
def test_other_numbers_are_none(number: float) -> None:
    assert not is_power_of_two(number)
