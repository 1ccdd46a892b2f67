"""Column blocks describe the same places in rows to kernels as blocks and padding do."""

from __future__ import annotations

import pytest
import torch

from shardwise.engine.buffers import ElasticBuffer
from shardwise.engine.gather.unit_gather import CopyBlocks
from shardwise.engine.reduce.reduce_plan import BlockwisePack, ContiguousPack
from shardwise.planning.column_blocks import (
    column_blocks_of_flat_packing,
    column_blocks_of_layout,
    column_blocks_of_packing,
)
from shardwise.planning.flat import FlatPacking, plan_flat
from shardwise.planning.layout import RowParam
from shardwise.planning.rows import RowsPacking, plan_rows
from shardwise.planning.slices import cut_into_slices

CPU = torch.device("cpu")
SHAPES = [(7, 3), (1,), (8, 2), (0, 4), (5,), (16,), (2, 3)]


def rows_of(row_numel, world):
    rows = ElasticBuffer(world * row_numel * 4, CPU)
    rows.grow()
    return rows, rows.tensor(torch.float32, 0, (world, row_numel)).fill_(float("nan"))


def pack_by_column_blocks(blocks, gradients, world, row_numel):
    """What a kernel does, told in Python."""
    packed = torch.full((world, row_numel), float("nan"))
    for block in blocks:
        for rank in range(world):
            first = rank * block.shard + block.skip
            there = max(0, min(block.filled, block.numel - first))
            columns = packed[rank, block.start : block.start + block.length]
            columns[:there] = gradients[block.member].flatten()[first : first + there]
            columns[there:] = 0
    return packed


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_packed_by_column_blocks_rows_are_those_packed_by_blocks(world):
    packing = RowsPacking(plan_rows([RowParam(shape, 0, "all", 4, 4) for shape in SHAPES], world))
    gradients = [torch.rand(shape) + 1 for shape in SHAPES]
    rows, found = rows_of(packing.row_numel, world)
    BlockwisePack(packing, rows, torch.float32, len(SHAPES)).fill(list(gradients), is_complete=True)
    blocks = column_blocks_of_packing(packing)
    assert torch.equal(pack_by_column_blocks(blocks, gradients, world, packing.row_numel), found)


@pytest.mark.parametrize("world", [2, 3])
def test_slices_by_column_blocks_are_those_packed_by_blocks(world):
    shapes = [(70, 3), (1,), (8, 2), (0, 4), (50,)]
    packing = RowsPacking(plan_rows([RowParam(shape, 0, "all", 4, 4) for shape in shapes], world))
    gradients = [torch.rand(shape) + 1 for shape in shapes]
    slices = cut_into_slices(packing, 32 * world)
    assert len(slices) > 2
    for each in slices:
        rows, found = rows_of(each.row_numel, world)
        BlockwisePack(each, rows, torch.float32, len(shapes)).fill(list(gradients), is_complete=True)
        blocks = column_blocks_of_packing(packing, each.columns)
        assert torch.equal(pack_by_column_blocks(blocks, gradients, world, each.row_numel), found)


@pytest.mark.parametrize("world", [1, 3])
def test_a_line_by_column_blocks_is_the_line(world):
    layout = plan_flat([RowParam(shape, 0, "all", 4, 4) for shape in SHAPES], world)
    packing = FlatPacking(layout, range(len(SHAPES)))
    gradients = [torch.rand(shape) + 1 for shape in SHAPES]
    rows, found = rows_of(packing.row_numel, world)
    ContiguousPack(packing, rows, torch.float32, SHAPES).fill(list(gradients), is_complete=True)
    blocks = column_blocks_of_flat_packing(packing, [gradient.numel() for gradient in gradients])
    assert torch.equal(
        pack_by_column_blocks(blocks, gradients, 1, world * packing.row_numel), found.view(1, -1)
    )


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_parameters_by_column_blocks_are_those_copied_out_by_blocks(world):
    kinds = [(torch.float32, "wide"), (torch.bfloat16, "narrow")] * 4
    params = [
        RowParam(shape, 0, kind, 4, dtype.itemsize)
        for shape, (dtype, kind) in zip(SHAPES, kinds, strict=False)
    ]
    layout = plan_rows(params, world)
    rows, full = ElasticBuffer(world * layout.sent_bytes, CPU), ElasticBuffer(layout.full_bytes, CPU)
    sent = rows.tensor(torch.uint8, 0, (world, layout.sent_bytes))
    found = full.tensor(torch.uint8, 0, (layout.full_bytes,))
    rows.grow()
    full.grow()
    sent.copy_(torch.randint(1, 255, sent.shape))
    found.zero_()
    CopyBlocks(layout, rows, full, [kinds[index][0] for index in range(len(params))]).run()
    by_column_blocks = torch.zeros_like(found)
    for block in column_blocks_of_layout(layout):
        for rank in range(world):
            there = max(0, min(block.filled, block.numel - rank * block.shard))
            start = block.full_start + rank * block.shard
            by_column_blocks[start : start + there] = sent[rank, block.start : block.start + there]
    assert found.any()
    assert torch.equal(by_column_blocks, found)


def test_parameters_that_are_cut_along_another_dim_have_no_column_blocks():
    params = [RowParam((4, 4), 0, "all", 4, 4), RowParam((4, 4), 1, "all", 4, 4)]
    layout = plan_rows(params, 2)
    assert column_blocks_of_layout(layout) is None
    assert column_blocks_of_packing(RowsPacking(layout)) is None
