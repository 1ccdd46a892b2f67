"""Gathered rows come to the same full parameters by one kernel for all columns as block by block."""

from __future__ import annotations

import pytest
import torch

from shardwise.engine.gather import CopyPieces, SplitRows
from shardwise.engine.storage import Elastic
from shardwise.plan.layout import RowParam
from shardwise.plan.rows import plan_rows

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
    rows = Elastic(WORLD * layout.sent_bytes, CPU)
    full = Elastic(layout.full_bytes, CPU)
    shares = layout.shares()
    assert shares is not None
    ways = [SplitRows(layout, shares, rows, full), CopyPieces(layout, rows, full, dtypes)]
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
