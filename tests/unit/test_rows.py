"""The rows layout owns every element once, padding little, and packs and unpacks without loss."""

from __future__ import annotations

import itertools
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.planning.layout import SHARD_ALIGNMENT_BYTES, cut_evenly
from shardwise.planning.rows import (
    ALIGNMENT_BYTES,
    RowCut,
    RowParam,
    plan_blocks,
    plan_padding,
    plan_rows,
    plan_segment_blocks,
)

WORLDS = st.integers(1, 1024)
SHAPES = st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple)


@st.composite
def row_params(draw: st.DrawFn) -> RowParam:
    shape = draw(SHAPES)
    dim = draw(st.integers(0, len(shape) - 1))
    stored, sent = draw(st.sampled_from([(4, 4), (4, 2), (2, 2), (8, 8), (1, 1), (4, 1)]))
    return RowParam(shape, dim, (stored, sent), stored, sent)


def offsets_in(start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """The offsets that a strided block touches, in order."""
    offsets = [start]
    for length, stride in zip(shape, strides, strict=True):
        offsets = [offset + i * stride for offset in offsets for i in range(length)]
    return offsets


@given(size=st.integers(0, 5000), world=WORLDS)
def test_a_cut_gives_every_row_to_exactly_one_rank(size: int, world: int) -> None:
    spans = [cut_evenly(size, world, rank) for rank in range(world)]
    assert spans[0].start == 0
    assert spans[-1].stop == size
    assert all(before.stop == after.start for before, after in itertools.pairwise(spans))
    assert all(span.numel >= 0 for span in spans)


@given(shape=SHAPES, world=WORLDS, data=st.data())
def test_padding_is_less_than_one_row_a_rank(shape: tuple[int, ...], world: int, data: st.DataObject) -> None:
    cut = RowCut(shape, data.draw(st.integers(0, len(shape) - 1)), world)
    padding = cut.shard_size * world - cut.size
    assert 0 <= padding < world
    assert cut.padded_numel * world - cut.numel == padding * cut.outer * cut.inner


@given(params=st.lists(row_params(), max_size=6), world=WORLDS)
def test_parameters_of_a_row_are_aligned_and_apart(params: list[RowParam], world: int) -> None:
    layout = plan_rows(params, world)
    alignment = ALIGNMENT_BYTES if world == 1 else SHARD_ALIGNMENT_BYTES
    assert all(start % ALIGNMENT_BYTES == 0 for start in layout.full_starts_bytes)
    for starts, total, itemsizes in (
        (layout.stored_starts_bytes, layout.stored_bytes, [p.stored_itemsize for p in params]),
        (layout.sent_starts_bytes, layout.sent_bytes, [p.sent_itemsize for p in params]),
    ):
        ranges = sorted(
            (start, start + cut.padded_numel * itemsize)
            for start, cut, itemsize in zip(starts, layout.cuts, itemsizes, strict=True)
        )
        assert all(start % alignment == 0 for start, _ in ranges)
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))
        assert all(stop <= total for _, stop in ranges)
        assert total % alignment == 0


@given(params=st.lists(row_params(), max_size=6), world=WORLDS)
def test_a_segment_has_the_same_elements_stored_and_sent(params: list[RowParam], world: int) -> None:
    layout = plan_rows(params, world)
    members = [index for segment in layout.segments for index in segment.members]
    assert sorted(members) == list(range(len(params)))
    for segment in layout.segments:
        for index, start in zip(segment.members, segment.starts, strict=True):
            assert (
                layout.stored_starts_bytes[index]
                == segment.stored_start_bytes + start * segment.stored_itemsize
            )
            assert layout.sent_starts_bytes[index] == segment.sent_start_bytes + start * segment.sent_itemsize


@given(params=st.lists(row_params(), max_size=6), world=WORLDS)
def test_full_parameters_do_not_overlap(params: list[RowParam], world: int) -> None:
    layout = plan_rows(params, world)
    end = 0
    for start, param in sorted(
        zip(layout.full_starts_bytes, params, strict=True), key=lambda entry: entry[0]
    ):
        assert start >= end or prod(param.shape) == 0
        assert start % ALIGNMENT_BYTES == 0
        end = max(end, start + prod(param.shape) * param.sent_itemsize)
    assert end <= layout.full_bytes


@settings(max_examples=200)
@given(
    shape=st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple),
    world=st.integers(1, 20),
    data=st.data(),
)
def test_packing_and_unpacking_a_parameter_is_exact(
    shape: tuple[int, ...], world: int, data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    cut = RowCut(shape, dim, world)
    start = data.draw(st.integers(0, 5))
    row_numel = start + cut.padded_numel + data.draw(st.integers(0, 5))
    blocks = plan_blocks(cut, start, row_numel)

    packed: dict[int, int] = {}
    for block in blocks:
        full = offsets_in(block.full_start, block.shape, block.full_strides)
        rows = offsets_in(block.packed_start, block.shape, block.packed_strides)
        assert len(full) == len(rows)
        for element, place in zip(full, rows, strict=True):
            assert place not in packed, "two elements packed into one place"
            packed[place] = element
    assert sorted(packed.values()) == list(range(prod(shape))), "every element packed exactly once"

    # Each rank finds its part of the parameter, contiguous and in order, where the parameter starts in its row.
    for rank in range(world):
        span = cut.span_of(rank)
        local = [
            (outer * cut.size + row) * cut.inner + inner
            for outer in range(cut.outer)
            for row in range(span.start, span.stop)
            for inner in range(cut.inner)
        ]
        first = rank * row_numel + start
        assert [packed[first + i] for i in range(len(local))] == local


@settings(max_examples=200)
@given(
    shapes=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4),
    world=st.integers(1, 12),
    data=st.data(),
)
def test_blocks_and_padding_fill_the_rows_without_overlap(
    shapes: list[tuple[int, ...]], world: int, data: st.DataObject
) -> None:
    params = [RowParam(shape, data.draw(st.integers(0, len(shape) - 1)), "one", 4, 4) for shape in shapes]
    layout = plan_rows(params, world)
    starts = [start // 4 for start in layout.sent_starts_bytes]
    row_numel = layout.sent_bytes // 4
    touched: list[int] = []
    for cut, start in zip(layout.cuts, starts, strict=True):
        for block in plan_blocks(cut, start, row_numel):
            touched += offsets_in(block.packed_start, block.shape, block.packed_strides)
    for pad in plan_padding(layout.cuts, starts, row_numel):
        touched += offsets_in(pad.packed_start, pad.shape, pad.packed_strides)
    assert sorted(touched) == list(range(world * row_numel))


@given(
    shapes=st.lists(st.sampled_from([(12, 2), (24,), (12, 2, 2), (36, 3)]), min_size=1, max_size=5),
    world=st.sampled_from([1, 2, 3, 4, 6, 12]),
)
def test_gathering_each_parameter_into_its_place_is_gathering_rows_and_copying_out(
    shapes: list[tuple[int, ...]], world: int
) -> None:
    layout = plan_rows([RowParam(shape, 0, len(shape), 4, 4) for shape in shapes], world)
    shards = layout.even_shards()
    assert shards is not None
    in_place = {
        rank * layout.sent_bytes + shard.shard_start_bytes + offset: shard.full_start_bytes
        + rank * shard.shard_bytes
        + offset
        for shard in shards
        for rank in range(world)
        for offset in range(0, shard.shard_bytes, 4)
    }
    copied = {
        4 * place: 4 * element
        for _, block in layout.copy_out_blocks()
        for place, element in zip(
            offsets_in(block.packed_start, block.shape, block.packed_strides),
            offsets_in(block.full_start, block.shape, block.full_strides),
            strict=True,
        )
    }
    assert in_place == copied


@pytest.mark.parametrize(("shape", "dim"), [((5, 4), 0), ((4, 4), 1), ((0, 4), 0)])
def test_a_parameter_that_is_cut_unevenly_or_across_has_no_place_to_be_gathered_into(
    shape: tuple[int, ...], dim: int
) -> None:
    params = [RowParam((4, 4), 0, "one", 4, 4), RowParam(shape, dim, "one", 4, 4)]
    assert plan_rows(params, 2).even_shards() is None


@settings(max_examples=200)
@given(
    shapes=st.lists(
        st.sampled_from([(4, 2), (8,), (2, 2, 2), (6, 3), (5, 2), (0, 3), (4, 4), (16,)]),
        min_size=1,
        max_size=6,
    ),
    world=st.integers(1, 6),
    data=st.data(),
)
def test_merging_blocks_of_one_size_copies_the_same_elements(
    shapes: list[tuple[int, ...]], world: int, data: st.DataObject
) -> None:
    params = [
        RowParam(shape, data.draw(st.sampled_from([0, len(shape) - 1])), "one", 4, 4) for shape in shapes
    ]
    layout = plan_rows(params, world)
    row_numel = layout.sent_bytes // 4
    (segment,) = layout.segments
    cuts = [layout.cuts[index] for index in segment.members]
    starts = [layout.sent_starts_bytes[index] // 4 for index in segment.members]
    full_starts = [layout.full_starts_bytes[index] // 4 for index in segment.members]
    merged = {}
    for block in plan_segment_blocks(cuts, starts, full_starts, row_numel):
        full = offsets_in(block.full_start, block.shape, block.full_strides)
        for element, place in zip(
            full, offsets_in(block.packed_start, block.shape, block.packed_strides), strict=True
        ):
            assert place not in merged
            merged[place] = element
    separate = {}
    for cut, start, full_start in zip(cuts, starts, full_starts, strict=True):
        for block in plan_blocks(cut, start, row_numel):
            full = offsets_in(full_start + block.full_start, block.shape, block.full_strides)
            separate |= dict(
                zip(offsets_in(block.packed_start, block.shape, block.packed_strides), full, strict=True)
            )
    assert merged == separate


def test_a_transformer_block_is_copied_out_in_three_blocks() -> None:
    """Two norms; four square projections; three projections between width and hidden width."""
    shapes = [(32,), (32, 32), (32, 32), (32, 32), (32, 32), (32,), (64, 32), (64, 32), (32, 64)]
    layout = plan_rows([RowParam(shape, 0, "one", 4, 4) for shape in shapes], 8)
    (segment,) = layout.segments
    blocks = plan_segment_blocks(
        [layout.cuts[index] for index in segment.members],
        [layout.sent_starts_bytes[index] // 4 for index in segment.members],
        [layout.full_starts_bytes[index] // 4 for index in segment.members],
        layout.sent_bytes // 4,
    )
    assert [block.shape[1] for block in blocks] == [2, 4, 3]
