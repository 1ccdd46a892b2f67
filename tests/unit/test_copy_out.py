"""Gathered rows come to the same full parameters by one kernel for all columns as block by block."""

from __future__ import annotations

import pytest
import torch

from shardwise.engine.buffers import ElasticBuffer
from shardwise.engine.gather.unit_gather import CopyBlocks, CopySharedRows, SplitRows
from shardwise.planning.flat import plan_flat
from shardwise.planning.layout import RowParam
from shardwise.planning.rows import plan_rows

CPU = torch.device("cpu")
WORLD = 4
# Rows of 3 float32 and of 5 bfloat16: neither kind ends where the next may begin.
PARAMS = [
    RowParam((8, 3), 0, "wide", 4, 4),
    RowParam((4, 5), 0, "narrow", 4, 2),
    RowParam((12,), 0, "wide", 4, 4),
    RowParam((4, 1), 0, "narrow", 4, 2),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("members", [(0, 1, 2, 3), (0, 2), (1, 3), (1,)])
def test_columns_and_blocks_come_to_the_same(members):
    layout = plan_rows([PARAMS[index] for index in members], WORLD)
    dtypes = [DTYPES[index] for index in members]
    rows = ElasticBuffer(WORLD * layout.sent_bytes, CPU)
    full = ElasticBuffer(layout.full_bytes, CPU)
    shards = layout.even_shards()
    assert shards is not None
    ways = [SplitRows(layout, shards, rows, full), CopyBlocks(layout, rows, full, dtypes)]
    everything = rows.tensor(torch.uint8, 0, (WORLD * layout.sent_bytes,))
    result = full.tensor(torch.uint8, 0, (layout.full_bytes,))
    assert everything.untyped_storage().nbytes() == 0, "tensors are made before there is memory"
    rows.grow()
    full.grow()
    everything.copy_(torch.arange(everything.numel()) % 251)
    results = []
    for way in ways:
        result.zero_()
        way.run()
        results.append(result.clone())
    assert results[0].any()
    assert torch.equal(*results)


class Apart:
    """Rows that lie each in memory of its own."""

    def __init__(self, rows):
        self._rows = [
            torch.cat([torch.zeros(64 * (1 + rank), dtype=torch.uint8), row]) for rank, row in enumerate(rows)
        ]
        self.is_let_go = False

    def row(self, rank):
        return self._rows[rank][64 * (1 + rank) :]

    def release_rows(self):
        self.is_let_go = True


UNEVEN = [
    RowParam((7, 3), 0, "wide", 4, 4),
    RowParam((2, 9), 1, "wide", 4, 4),
    RowParam((2,), 0, "narrow", 4, 2),
    RowParam((3, 5, 2), 1, "narrow", 4, 2),
    RowParam((9, 2), 0, "wide", 4, 4),
]
UNEVEN_DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("params", [(PARAMS, DTYPES), (UNEVEN, UNEVEN_DTYPES)], ids=["even", "uneven"])
@pytest.mark.parametrize("plan", [plan_rows, plan_flat])
def test_rows_that_lie_apart_come_to_the_same(plan, params, world):
    params, dtypes = params
    layout = plan(params, world)
    rows, full = ElasticBuffer(world * layout.sent_bytes, CPU), ElasticBuffer(layout.full_bytes, CPU)
    together, apart = CopyBlocks(layout, rows, full, dtypes), CopySharedRows(layout, full, dtypes)
    everything = rows.tensor(torch.uint8, 0, (world * layout.sent_bytes,))
    result = full.tensor(torch.uint8, 0, (layout.full_bytes,))
    rows.grow()
    full.grow()
    everything.copy_(torch.arange(everything.numel()) % 251)
    lent = Apart(everything.split(layout.sent_bytes))
    result.zero_()
    together.run()
    expected = result.clone()
    result.zero_()
    apart.run(lent)
    assert expected.any()
    assert torch.equal(result, expected)
    assert lent.is_let_go
