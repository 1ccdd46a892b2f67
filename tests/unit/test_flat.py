"""The flat layout owns every element once, in any world, and its reduces are cut where its parameters are cut."""

from __future__ import annotations

from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.planning.flat import GRID, FlatPacking, plan_flat
from shardwise.planning.layout import ALIGNMENT_BYTES, RowParam

WORLDS = st.integers(1, 1024)
SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@st.composite
def flat_params(draw: st.DrawFn) -> RowParam:
    stored, sent = draw(st.sampled_from([(4, 4), (4, 2), (2, 2), (8, 8), (1, 1)]))
    return RowParam(draw(SHAPES), 0, (stored, sent, draw(st.booleans())), stored, sent)


PARAMS = st.lists(flat_params(), min_size=1, max_size=6)


def offsets_in(start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    offsets = [start]
    for length, stride in zip(shape, strides, strict=True):
        offsets = [offset + i * stride for offset in offsets for i in range(length)]
    return offsets


@given(params=PARAMS, world=WORLDS)
def test_every_element_belongs_to_exactly_one_rank(params: list[RowParam], world: int) -> None:
    layout = plan_flat(params, world)
    for index, param in enumerate(params):
        end = 0
        for rank in range(world):
            span = layout.shard_span(index, rank)
            if span.numel:
                assert span.start == end
                end = span.stop
            assert layout.shard_shape(index, rank) == (span.numel,)
        assert end == prod(param.shape)


@given(params=PARAMS, world=WORLDS)
def test_parts_stand_apart_within_a_row_and_starts_are_aligned(params: list[RowParam], world: int) -> None:
    layout = plan_flat(params, world)
    for rank in {0, world // 2, world - 1}:
        end = 0
        parts = [
            (
                layout.shard_start_bytes(index, rank),
                layout.shard_span(index, rank).numel * param.stored_itemsize,
            )
            for index, param in enumerate(params)
        ]
        for start, size in sorted(part for part in parts if part[1]):
            assert start >= end
            end = start + size
        assert end <= layout.stored_bytes
    for index, start in enumerate(layout.full_starts_bytes):
        assert start % ALIGNMENT_BYTES == 0
        assert start + prod(params[index].shape) * params[index].sent_itemsize <= layout.full_bytes


@given(params=PARAMS, world=WORLDS)
def test_padding_is_bounded_whatever_the_world(params: list[RowParam], world: int) -> None:
    layout = plan_flat(params, world)
    for segment in layout.segments:
        elements = sum(layout.numels[index] for index in segment.members)
        grid = max(GRID, ALIGNMENT_BYTES // segment.sent_itemsize)
        assert world * segment.numel - elements < grid * (len(segment.members) + 2 * world)


@given(params=PARAMS, world=st.integers(1, 20))
def test_gathered_rows_are_the_full_parameters(params: list[RowParam], world: int) -> None:
    layout = plan_flat(params, world)
    # Byte offsets in the rows of all ranks, by byte offset in the full buffer.
    if layout.is_in_place:
        assert layout.full_bytes == world * layout.sent_bytes
        source_of = {
            offset: offset for offset in range(0, layout.full_bytes, layout.segments[0].sent_itemsize)
        }
    else:
        source_of = {}
        for segment, block in layout.copy_out_blocks():
            size = segment.sent_itemsize
            full = offsets_in(block.full_start, block.shape, block.full_strides)
            packed = offsets_in(block.packed_start, block.shape, block.packed_strides)
            source_of.update({f * size: p * size for f, p in zip(full, packed, strict=True)})
    for index, param in enumerate(params):
        segment = layout.segments[layout.positions[index][0]]
        for rank in range(world):
            span = layout.shard_span(index, rank)
            start = rank * layout.sent_bytes + segment.sent_start_bytes
            for element in range(span.start, span.stop):
                own = layout.shard_start(index, rank) + element - span.start
                full_byte = layout.full_starts_bytes[index] + element * param.sent_itemsize
                assert source_of[full_byte] == start + own * param.sent_itemsize


@settings(max_examples=200)
@given(params=PARAMS, world=st.integers(1, 20), data=st.data())
def test_a_reduce_gives_each_rank_the_elements_it_holds(
    params: list[RowParam], world: int, data: st.DataObject
) -> None:
    layout = plan_flat(params, world)
    trained = sorted(data.draw(st.sets(st.integers(0, len(params) - 1), min_size=1)))
    packing = FlatPacking(layout, trained)
    filled: dict[int, tuple[int, int]] = {}
    for number in range(len(trained)):
        for block in packing.blocks(number):
            full = offsets_in(block.full_start, block.shape, block.full_strides)
            packed = offsets_in(block.packed_start, block.shape, block.packed_strides)
            for target, source in zip(packed, full, strict=True):
                assert target not in filled
                filled[target] = (number, source)
    blank = {
        offset
        for pad in packing.padding()
        for offset in offsets_in(pad.packed_start, pad.shape, pad.packed_strides)
    }
    assert blank | set(filled) == set(range(world * packing.row_numel))
    segments = {number: segment for segment in packing.segments for number in segment.members}
    for number, index in enumerate(trained):
        for rank in range(world):
            span = layout.shard_span(index, rank)
            assert packing.shard_shape(number, rank) == (span.numel,)
            start = rank * packing.row_numel + segments[number].start + packing.shard_start(number, rank)
            for offset, element in enumerate(range(span.start, span.stop)):
                assert filled[start + offset] == (number, element)


@given(params=PARAMS, world=st.integers(1, 64))
def test_a_reduce_of_everything_is_cut_like_the_shards(params: list[RowParam], world: int) -> None:
    layout = plan_flat(params, world)
    packing = FlatPacking(layout, range(len(params)))
    assert [segment.numel for segment in packing.segments] == [segment.numel for segment in layout.segments]
    assert packing.is_contiguous == (len(layout.segments) == 1)


@given(numel=st.integers(1, 400), frozen=st.integers(1, 4000), world=st.integers(1, 64))
def test_what_is_frozen_takes_no_room_in_a_reduce(numel: int, frozen: int, world: int) -> None:
    # In one segment: frozen after it was laid out.
    params = [RowParam((frozen,), 0, "x", 4, 4), RowParam((numel,), 0, "x", 4, 4)]
    packing = FlatPacking(plan_flat(params, world), [1])
    assert packing.row_numel < min(numel, plan_flat(params, world).segments[0].numel) + 2 * GRID
