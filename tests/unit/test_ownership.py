"""Ownership: every element has one owner, loads are fair, and a buffer holds every parameter once."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shardwise.planning.ownership import (
    BufferLayout,
    OwnedPiece,
    ParamSize,
    even_pieces,
    loads_of,
    owned_layout,
    whole_pieces,
)

numels = st.lists(st.integers(0, 5000), min_size=1, max_size=40)
worlds = st.integers(1, 9)
extents = st.lists(
    st.builds(ParamSize, st.integers(0, 20_000), st.sampled_from([1, 2, 4, 8, 16])), min_size=1, max_size=30
)


def assert_each_element_has_one_owner(pieces: list[OwnedPiece], sizes: list[int], world: int) -> None:
    for param, numel in enumerate(sizes):
        bounds = [(piece.start, piece.stop) for piece in pieces if piece.param == param]
        assert bounds[0][0] == 0
        assert bounds[-1][1] == numel
        assert all(before[1] == after[0] for before, after in pairwise(bounds))
    assert all(0 <= piece.owner < world for piece in pieces)


def assert_pieces_lie_in_their_owners_spans(
    layout: BufferLayout, pieces: list[OwnedPiece], sizes: list[ParamSize]
) -> None:
    for piece in pieces:
        start = layout.starts[piece.param] + piece.start * sizes[piece.param].itemsize
        stop = layout.starts[piece.param] + piece.stop * sizes[piece.param].itemsize
        if piece.numel:
            assert layout.spans[piece.owner].start <= start
            assert stop <= layout.spans[piece.owner].stop


def assert_parameters_do_not_overlap(layout: BufferLayout, sizes: list[ParamSize]) -> None:
    taken = sorted(
        (start, start + extent.bytes)
        for start, extent in zip(layout.starts, sizes, strict=True)
        if extent.numel
    )
    assert all(before[1] <= after[0] for before, after in pairwise(taken))
    assert all(start % extent.itemsize == 0 for start, extent in zip(layout.starts, sizes, strict=True))
    assert not taken or taken[-1][1] <= layout.total_bytes


def test_sizes_that_repeat_for_each_rank_come_out_equal() -> None:
    for world in (1, 2, 3, 4, 8):
        assert loads_of(whole_pieces([9, 7, 5, 3] * world, [0] * world), world) == [24] * world


def test_a_group_added_later_fills_the_rank_that_is_behind() -> None:
    sizes = [9, 7, 5, 3] * 4
    first = whole_pieces(sizes[:-1], [0] * 4)
    second = whole_pieces([3], loads_of(first, 4))
    assert loads_of([*first, *second], 4) == [24] * 4


@given(numels, worlds)
def test_whole_pieces_never_cut_a_parameter(sizes: list[int], world: int) -> None:
    pieces = whole_pieces(sizes, [0] * world)
    assert [(piece.param, piece.start, piece.stop) for piece in pieces] == [
        (param, 0, numel) for param, numel in enumerate(sizes)
    ]
    assert_each_element_has_one_owner(pieces, sizes, world)


@given(numels, worlds)
def test_no_rank_is_ahead_of_another_by_more_than_the_largest_parameter(sizes: list[int], world: int) -> None:
    loads = loads_of(whole_pieces(sizes, [0] * world), world)
    assert max(loads) - min(loads) <= max(sizes)


@given(extents, worlds)
def test_the_spans_of_an_owned_layout_hold_exactly_their_owners_parameters(
    sizes: list[ParamSize], world: int
) -> None:
    pieces = whole_pieces([extent.numel for extent in sizes], [0] * world)
    layout = owned_layout(sizes, pieces, world)
    assert_parameters_do_not_overlap(layout, sizes)
    assert_pieces_lie_in_their_owners_spans(layout, pieces, sizes)


@given(extents, worlds, st.sampled_from([1, 2, 8]))
def test_pieces_keep_their_owners_when_their_elements_take_more_or_less_memory(
    sizes: list[ParamSize], world: int, itemsize: int
) -> None:
    pieces, _ = even_pieces(sizes, world)
    resized = [ParamSize(extent.numel, itemsize) for extent in sizes]
    layout = owned_layout(resized, pieces, world)
    assert_parameters_do_not_overlap(layout, resized)
    assert_pieces_lie_in_their_owners_spans(layout, pieces, resized)
    assert all(before.stop <= after.start for before, after in pairwise(layout.spans))
    assert all(start % itemsize == 0 for start in layout.starts)


@given(extents, worlds)
def test_even_pieces_lie_in_the_span_of_their_owner(sizes: list[ParamSize], world: int) -> None:
    pieces, layout = even_pieces(sizes, world)
    assert layout.is_even
    assert_each_element_has_one_owner(pieces, [extent.numel for extent in sizes], world)
    assert_parameters_do_not_overlap(layout, sizes)
    assert_pieces_lie_in_their_owners_spans(layout, pieces, sizes)


@given(extents, worlds)
def test_even_pieces_cut_at_most_once_a_span_boundary(sizes: list[ParamSize], world: int) -> None:
    pieces, _ = even_pieces(sizes, world)
    assert len(pieces) - len(sizes) <= world - 1


@given(
    st.integers(2, 8),
    st.lists(st.builds(ParamSize, st.integers(1, 3000), st.sampled_from([2, 4])), min_size=1, max_size=60),
    st.integers(100_000, 3_000_000),
)
def test_even_pieces_are_fair_to_two_percent_whatever_dominates(
    world: int, small: list[ParamSize], large_numel: int
) -> None:
    sizes = [*small, ParamSize(large_numel, 4)]
    pieces, _ = even_pieces(sizes, world)
    owned = [0] * world
    for piece in pieces:
        owned[piece.owner] += piece.numel * sizes[piece.param].itemsize
    assert max(owned) <= 1.02 * sum(extent.bytes for extent in sizes) / world


def test_equal_spans_with_gaps_between_them_are_not_even() -> None:
    layout = owned_layout(
        [ParamSize(5, 4), ParamSize(5, 4)], [OwnedPiece(0, 0, 5, 0), OwnedPiece(1, 0, 5, 1)], 2
    )
    assert len({span.numel for span in layout.spans}) == 1
    assert not layout.is_even


def test_small_parameters_are_not_cut() -> None:
    sizes = [ParamSize(501, 4) for _ in range(2000)]
    for world in (2, 3, 4, 7):
        pieces, _ = even_pieces(sizes, world)
        assert len(pieces) == len(sizes)


def test_a_cut_falls_where_kernels_take_their_steps() -> None:
    pieces, _ = even_pieces([ParamSize(77, 4), ParamSize(1_000_003, 4), ParamSize(400_001, 2)], 5)
    cuts = [(piece.param, piece.start) for piece in pieces if piece.start]
    assert len(cuts) == 4
    assert all(start * [4, 4, 2][param] % 128 == 0 for param, start in cuts)


def test_an_element_is_never_cut_in_two() -> None:
    pieces, layout = even_pieces([ParamSize(3, 1), ParamSize(1000, 16), ParamSize(5, 8)], 4)
    for piece in pieces:
        assert layout.starts[piece.param] % [1, 16, 8][piece.param] == 0
    assert sum(piece.numel for piece in pieces) == 1008
