"""Gradients end to end: each at its place, and nothing but zeros between them."""

from __future__ import annotations

from math import prod

import pytest
import torch

from shardwise.engine.buffers import ElasticBuffer
from shardwise.engine.reduce.reduce_plan import plan_pack
from shardwise.planning.flat import FlatPacking, plan_flat
from shardwise.planning.layout import RowParam

SHAPES = [(3, 5), (0, 2), (), (40,), (2, 2, 2)]
CPU = torch.device("cpu")


@pytest.mark.parametrize("kinds", [("a",) * 5, ("a", "b", "a", "b", "a")])
@pytest.mark.parametrize("trained", [(0, 1, 2, 3, 4), (0, 3), (4,)])
@pytest.mark.parametrize("missing", [(), (0,)])
def test_rows_hold_gradients_and_zeros_whatever_was_there_before(kinds, trained, missing):
    world = 3
    layout = plan_flat([RowParam(s, 0, k, 4, 4) for s, k in zip(SHAPES, kinds, strict=True)], world)
    packing = FlatPacking(layout, trained)
    rows = ElasticBuffer(world * packing.row_numel * 4, CPU)
    everything = rows.tensor(torch.float32, 0, (world * packing.row_numel,))
    shapes = [SHAPES[index] for index in trained]
    pack = plan_pack(packing, rows, torch.float32, shapes, [torch.float64] * len(shapes))
    rows.grow()
    everything.fill_(float("nan"))
    gradients = [
        None
        if number in missing
        else torch.arange(1, prod(shape) + 1, dtype=torch.float64).view(shape) * (number + 1)
        for number, shape in enumerate(shapes)
    ]
    pack.fill(gradients, is_complete=all(gradient is not None for gradient in gradients))
    assert everything.isfinite().all()
    segments = {number: segment for segment in packing.segments for number in segment.members}
    total = 0.0
    for number, index in enumerate(trained):
        gradient = gradients[number]
        flat = torch.zeros(prod(SHAPES[index])) if gradient is None else gradient.flatten().float()
        total += float(flat.sum())
        for rank in range(world):
            span = layout.shard_span(index, rank)
            start = rank * packing.row_numel + segments[number].start + packing.shard_start(number, rank)
            assert torch.equal(everything[start : start + span.numel], flat[span.start : span.stop])
    assert float(everything.sum()) == total
