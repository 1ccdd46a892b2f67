"""The arithmetic of a step's memory, against figures that were measured on a GPU with a group of NCCL's kind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.planning.memory import UnitBytes, step_memory

BLOCK = 1024
NOTHING = UnitBytes("", 0, 0, 0, 0, 0, 0, 0)


def block(number: int, world: int, keeps: bool = False, offloads: bool = False) -> UnitBytes:
    shard = BLOCK // world
    return UnitBytes(
        f"block {number}",
        shards=0 if offloads else shard,
        full=BLOCK,
        gathering=shard if offloads else 0,
        gradients=BLOCK,
        rows=0,
        own_row=shard,
        shard_gradients=0 if offloads else shard,
        is_kept=keeps,
        rows_in_full=True,
    )


@pytest.mark.parametrize(
    ("world", "keeps", "offloads", "expected"),
    [
        (2, False, False, (3.0, 5.0, 8.0, 6.0)),
        (8, False, False, (0.75, 2.75, 4.25, 1.5)),
        (2, True, False, (3.0, 9.0, 10.0, 6.0)),
        (8, True, False, (0.75, 6.75, 7.75, 1.5)),
        (2, False, True, (0.0, 2.5, 3.0, 0.0)),
        (8, False, True, (0.0, 2.125, 3.0, 0.0)),
    ],
)
def test_six_equal_blocks_need_this_many_blocks_of_memory(world, keeps, offloads, expected):
    planned = step_memory(NOTHING, [block(number, world, keeps, offloads) for number in range(6)])
    totals = (planned.idle, planned.forward.total, planned.backward.total, planned.after_backward)
    assert tuple(total / BLOCK for total in totals) == expected


sizes = st.integers(0, 1 << 20)
units = st.builds(
    UnitBytes,
    name=st.just("unit"),
    shards=sizes,
    full=sizes,
    gathering=sizes,
    gradients=sizes,
    rows=sizes,
    own_row=sizes,
    shard_gradients=sizes,
    is_sliced=st.booleans(),
    rows_in_full=st.booleans(),
)


@given(units, st.lists(units, max_size=6), st.booleans())
def test_everything_but_shards_and_their_gradients_is_freed_in_the_end(root, others, holds_gradients):
    planned = step_memory(root, others, holds_gradients)
    everyone = [root, *others]
    shards = sum(unit.shards for unit in everyone)
    gradients = sum(unit.shard_gradients for unit in everyone)
    assert planned.idle == shards + (gradients if holds_gradients else 0)
    assert planned.after_backward == shards + gradients
    assert planned.backward.total >= planned.after_backward
    assert planned.forward.total >= planned.idle
