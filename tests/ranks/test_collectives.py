"""One unit's gather and reduce among 128 ranks, seen through the public API."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import same, same_shard
from tests.ranks.subject import MixedPrecisionPolicy, fully_shard
from tests.ranks.tables import slow

RANKS = 128
SIZES = [(17, 257), (17,), (64, 312), (64,), (64, 64), (512, 64), (256,), (64, 297)]


class Holder(nn.Module):
    """Parameters of the given sizes; the gradient of each is the weight it is multiplied with."""

    def __init__(self, sizes=SIZES):
        super().__init__()
        self.params = nn.ParameterList(nn.Parameter(torch.empty(size)) for size in sizes)

    def forward(self, *weights):
        return sum((param * weight).sum() for param, weight in zip(self.params, weights, strict=True))


def everywhere(value):
    return [torch.tensor(value)] * len(SIZES)


def holder():
    return fully_shard(seeded(Holder()))


def originals():
    return [param.detach() for param in seeded(Holder()).parameters()]


def check_full(module, what):
    for shown, original in zip(module.parameters(), originals(), strict=True):
        assert isinstance(shown, nn.Parameter)
        assert not isinstance(shown, DTensor)
        same(shown.detach(), original, what)


def gather():
    module = holder()
    for asynchronous in (False, True):
        handle = module.unshard(async_op=asynchronous)
        if asynchronous:
            handle.wait()
        else:
            assert handle is None
        check_full(module, "gathered parameter")
        module.reshard()
        assert all(isinstance(param, DTensor) for param in module.parameters())


def test_128_ranks_gather_the_original_values():
    run_ranks(gather, RANKS)


class Inner(nn.Module):
    """A unit below a root, so that it is freed after forward."""

    def __init__(self):
        super().__init__()
        self.holder = Holder()

    def forward(self, *weights):
        return self.holder(*weights)


def gather_over_the_group_after_forward(k):
    model = seeded(Inner())
    wanted = [param.detach().clone() for param in model.parameters()]
    fully_shard(model.holder, reshard_after_forward=k)
    fully_shard(model)
    loss = model(*everywhere(1.0))
    assert all(isinstance(param, DTensor) for param in model.parameters())
    model.holder.unshard()
    for shown, original in zip(model.holder.parameters(), wanted, strict=True):
        same(shown.detach(), original, "parameter gathered over the group of the forward")
    loss.backward()
    for param in model.parameters():
        assert param.grad.to_local().eq(1).all()


def test_128_ranks_gather_the_original_values_over_groups_of_8_after_forward():
    run_ranks(gather_over_the_group_after_forward, RANKS, 8)


def reduce_slopes(slope_of, policy):
    """Every rank's gradient is `slope_of(rank)` everywhere; what is each shard of the result filled with?"""
    # Sizes make no difference to how sums come out: a few will do.
    module = fully_shard(seeded(Holder(SIZES[:3])), mp_policy=policy)
    module(*everywhere(slope_of(dist.get_rank()))[:3]).backward()
    found = set()
    for param in module.parameters():
        assert isinstance(param.grad, DTensor)
        assert param.grad.placements == param.placements
        assert param.grad.dtype == param.dtype
        shard = param.grad.to_local()
        assert shard.shape == param.to_local().shape
        found.update(shard.flatten().tolist())
    return found


def last_two_bits(rank):
    return float(rank % 4)


# All sums below are exact in every one of these dtypes, in any order and with any split of the division by powers
# of two, so that the results are compared by equality.


# In the others, the tests below do.
@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float32), slow(torch.float16)], ids=str)
def test_the_reduced_gradient_is_the_average_over_128_ranks(dtype):
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    assert set().union(*run_ranks(reduce_slopes, RANKS, last_two_bits, policy)) == {1.5}


def large(rank):
    return 1024.0


def tiny(rank):
    return 2.0**-20


@pytest.mark.parametrize("slope_of", [large, tiny])
def test_in_fp16_neither_the_sum_overflows_nor_small_values_vanish(slope_of):
    # 128 × 1024 is beyond fp16's 65504, and 2**-20 / 128 is below its smallest number, 2**-24.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    assert set().union(*run_ranks(reduce_slopes, RANKS, slope_of, policy)) == {slope_of(0)}


PERIOD = 17


def period(rank):
    """Small integers that differ from element to element and from rank to rank; their sums are exact."""
    return ((torch.arange(PERIOD) * 7 + rank * 13) % PERIOD - 8).float()


def repeated(values, shape):
    numel = torch.Size(shape).numel()
    return values.repeat(numel // PERIOD + 1)[:numel].view(shape)


def reduce_patterns():
    module = holder()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module(*(repeated(period(rank), size) for size in SIZES)).backward()
    # The pattern repeats along a parameter, so one period of the average tells all of it.
    average = sum(period(r) for r in range(world_size)) / world_size
    for param, size in zip(module.parameters(), SIZES, strict=True):
        same_shard(param.grad, repeated(average, size), "shard of the average")


def test_each_of_128_ranks_gets_its_own_part_of_the_average():
    run_ranks(reduce_patterns, RANKS)
