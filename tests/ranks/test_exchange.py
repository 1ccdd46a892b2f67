"""Reduce-scatter by exchange on gloo: summed in rank order, counted once, and nobody else's calls touched."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from shardwise.comm.channels.registry import channel_of
from shardwise.testing import run_ranks

CPU = torch.device("cpu")


def rows_of(rank, world, dtype):
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(world * 1001, generator=generator) * 100).to(dtype)


def reduced_in_rank_order(dtype):
    rank, world = dist.get_rank(), dist.get_world_size()
    own = torch.empty(1001, dtype=dtype)
    channel_of(dist.group.WORLD, CPU).issue_reduce_scatter(
        own, rows_of(rank, world, dtype), average=False
    ).wait()
    expected = rows_of(0, world, dtype).view(world, -1)[rank]
    for other in range(1, world):
        expected = expected + rows_of(other, world, dtype).view(world, -1)[rank]
    return torch.equal(own, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_rows_are_summed_in_rank_order_to_the_last_bit(world_size, dtype):
    assert all(run_ranks(reduced_in_rank_order, world_size, dtype, kind="gloo"))


def counted():
    calls, world = channel_of(dist.group.WORLD, CPU), dist.get_world_size()
    with CommDebugMode() as mode:
        calls.issue_reduce_scatter(torch.empty(3), torch.ones(3 * world), average=False).wait()
    return {str(op): count for op, count in mode.get_comm_counts().items()}


def test_an_exchange_counts_as_one_reduce_scatter():
    assert run_ranks(counted, 2, kind="gloo") == [{"c10d._reduce_scatter_base_": 1}] * 2


def kernels_after_counting():
    counted()
    return [torch._C._dispatch_dump(f"c10d::{op}") for op in ("_allgather_base_", "_reduce_scatter_base_")]


def test_torchs_kernels_stand_alone_again_after_a_call_that_was_counted():
    """A kernel in Python that hands on to torch's holds the interpreter's lock, for which gloo's threads may wait."""
    found = run_ranks(kernels_after_counting, 2, kind="gloo")
    assert not any("inactive" in kernel for kernels in found for kernel in kernels)


def native_beside_ours(in_mode):
    """Torch's own call on the same group, while one of ours is under way, with an op ours does not know."""
    rank, world = dist.get_rank(), dist.get_world_size()
    calls = channel_of(dist.group.WORLD, CPU)
    ours = torch.empty(4)
    pending = calls.issue_reduce_scatter(ours, torch.full((4 * world,), rank + 1.0), average=False)
    largest = torch.empty(4)
    rows = torch.arange(4.0 * world) + rank
    if in_mode:
        with CommDebugMode():
            dist.distributed_c10d.reduce_scatter_tensor(largest, rows, op=dist.ReduceOp.MAX)
    else:
        dist.distributed_c10d.reduce_scatter_tensor(largest, rows, op=dist.ReduceOp.MAX)
    pending.wait()
    expected = torch.arange(4.0 * world).view(world, -1)[rank] + world - 1
    return torch.equal(largest, expected) and ours.tolist() == [world * (world + 1) / 2] * 4


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("in_mode", [False, True], ids=["plain", "under a dispatch mode"])
def test_other_calls_still_reach_torchs_kernel(in_mode):
    assert all(run_ranks(native_beside_ours, 3, in_mode, kind="gloo"))
