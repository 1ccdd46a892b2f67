"""Slices hold every element of the rows they are cut from, at its column, and fill each place once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwise.planning.layout import RowParam
from shardwise.planning.rows import RowsPacking, plan_rows
from shardwise.planning.slices import cut_into_slices
from tests.unit.test_rows import offsets_in


@given(
    shapes=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=3), min_size=1, max_size=5),
    world=st.integers(1, 9),
    most_numel=st.integers(1, 3000),
)
def test_slices_are_the_rows_cut_into_columns(shapes: list[list[int]], world: int, most_numel: int) -> None:
    packing = RowsPacking(plan_rows([RowParam(tuple(shape), 0, "a", 4, 4) for shape in shapes], world))

    def filled(blocks_of, padding, row_numel):
        """What stands where in the rows: (parameter, element), or None for padding."""
        places = {}
        for index in range(len(shapes)):
            for block in blocks_of(index):
                sources = offsets_in(block.full_start, block.shape, block.full_strides)
                targets = offsets_in(block.packed_start, block.shape, block.packed_strides)
                for source, target in zip(sources, targets, strict=True):
                    assert target not in places
                    places[target] = (index, source)
        for pad in padding:
            for target in offsets_in(pad.packed_start, pad.shape, pad.packed_strides):
                assert target not in places
                places[target] = None
        assert sorted(places) == list(range(world * row_numel))
        return places

    rows = filled(packing.blocks, packing.padding(), packing.row_numel)
    end = 0
    for each in cut_into_slices(packing, most_numel):
        assert each.columns.start == end
        assert each.row_numel * world <= max(most_numel, 32 * world)
        end = each.columns.stop
        for target, what in filled(each.blocks, each.padding(), each.row_numel).items():
            rank, column = divmod(target, each.row_numel)
            assert rows[rank * packing.row_numel + each.columns.start + column] == what
    assert end == packing.row_numel
