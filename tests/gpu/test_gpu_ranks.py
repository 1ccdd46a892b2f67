"""run_ranks on GPUs: real NCCL ranks, several on one GPU where there are not enough, and gloo with CUDA tensors."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from shardwise.testing import RankFailure, RankTimeout, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

every_gpu_kind = pytest.mark.parametrize("kind", ["nccl", "gloo-cuda"])


def collectives_on_the_gpu():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    total = torch.full((4,), float(rank), device=device)
    dist.all_reduce(total)
    gathered = torch.empty(2 * world_size, device=device)
    dist.all_gather_into_tensor(gathered, torch.full((2,), float(rank), device=device))
    halves = dist.new_group(list(range(world_size)))
    dist.broadcast(total, 0, group=halves)
    return total.tolist(), gathered.tolist(), os.getpid()


def fail_on_rank_1():
    dist.all_reduce(torch.ones(1, device="cuda"))
    if dist.get_rank() == 1:
        raise ValueError("no more memory, say")
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()


def hang_on_rank_1():
    dist.all_reduce(torch.ones(1, device="cuda"))
    if dist.get_rank() == 1:
        time.sleep(100)
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()


@every_gpu_kind
@pytest.mark.parametrize("world_size", [1, 2])
def test_collectives_of_cuda_tensors_work(kind, world_size):
    results = run_ranks(collectives_on_the_gpu, world_size, kind=kind, timeout_seconds=120)
    for total, gathered, _ in results:
        assert total == [float(sum(range(world_size)))] * 4
        assert gathered == [float(rank) for rank in range(world_size) for _ in range(2)]


@every_gpu_kind
def test_the_pool_of_gpu_ranks_is_reused(kind):
    first = run_ranks(collectives_on_the_gpu, 2, kind=kind, timeout_seconds=120)
    again = run_ranks(collectives_on_the_gpu, 2, kind=kind, timeout_seconds=120)
    assert [pid for *_, pid in first] == [pid for *_, pid in again]


@every_gpu_kind
def test_a_failing_gpu_rank_is_reported_and_the_next_call_works(kind):
    with pytest.raises(RankFailure, match="rank 1 of 2 raised ValueError: no more memory, say"):
        run_ranks(fail_on_rank_1, 2, kind=kind, timeout_seconds=120)
    assert len(run_ranks(collectives_on_the_gpu, 2, kind=kind, timeout_seconds=120)) == 2


def test_a_hang_in_nccl_ends_at_the_timeout_with_every_ranks_stack():
    run_ranks(collectives_on_the_gpu, 2, kind="nccl", timeout_seconds=120)
    with pytest.raises(RankTimeout) as caught:
        run_ranks(hang_on_rank_1, 2, kind="nccl", timeout_seconds=8)
    assert str(caught.value).count("in hang_on_rank_1") == 2
    assert len(run_ranks(collectives_on_the_gpu, 2, kind="nccl", timeout_seconds=120)) == 2
