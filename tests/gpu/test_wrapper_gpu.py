"""`FullyShardedDataParallel` on GPUs: the tests of `tests/ranks`, on NCCL; memory with shards on the host.

Ranks share GPUs where there are fewer than ranks.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
)
from shardwise.testing import run_ranks
from shardwise.testing.parity import Accumulation
from shardwise.testing.workloads import seeded
from tests.ranks import test_wrapper as on_cpu
from tests.ranks import test_wrapper_order as order
from tests.ranks import test_wrapper_precision as precision
from tests.ranks import test_wrapper_state as state
from tests.ranks.models import Layers, TwoLayers
from tests.ranks.wrapped import ONE_AXIS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]
SECONDS = 180


def on_nccl(function, world_size, *args):
    return run_ranks(function, world_size, *args, kind="nccl", timeout_seconds=SECONDS)


# --- the tests of tests/ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_workload_matches_the_oracle(world_size):
    # Not bitwise: on a GPU kernels choose their order of sums by alignment, and a backend adds in an order of its own.
    cases = [
        (name, each, {"sharding_strategy": strategy, "use_orig_params": orig})
        for number, name in enumerate(on_cpu.NAMED)
        for each in (Accumulation(), on_cpu.LAST_OF_TWO)
        for strategy, orig in zip(ONE_AXIS, (number % 2 == 0, number % 2 == 1, number % 2 == 0), strict=True)
    ]
    assert on_nccl(on_cpu.parity, world_size, cases, 1e-5) == [[]] * world_size


def test_hybrid_strategies_match_the_oracle():
    assert on_nccl(on_cpu.hybrid, 4) == [[]] * 4


def test_shards_on_the_host_match_the_oracle():
    cases = [
        (
            name,
            each,
            {"sharding_strategy": strategy, "use_orig_params": orig, "cpu_offload": CPUOffload(True)},
        )
        for name in ("tied transformer", "adapters")
        for each in (Accumulation(), Accumulation(2), on_cpu.LAST_OF_TWO)
        for strategy, orig in itertools.product(ONE_AXIS, (False, True))
    ]
    assert on_nccl(on_cpu.parity, 2, cases, 1e-5) == [[]] * 2


def test_mixed_precision_matches_the_oracle():
    # A last digit of float32 gradients can tip a weight's rounding to bf16, whose step is 2**-8.
    assert on_nccl(precision.parity, 2, 1e-2) == [[]] * 2


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_differ_in_their_order_raise_or_warn_and_none_hangs(world_size):
    on_nccl(order.differs_at_first, world_size)
    on_nccl(order.differs_later, world_size)
    on_nccl(order.trains_and_evaluates, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_whole_parameters_state_dicts_and_clipping(world_size):
    on_nccl(state.kinds, world_size)
    on_nccl(state.clips, world_size)
    on_nccl(state.optimizer_kinds, world_size)
    if world_size > 1:
        on_nccl(state.summons, world_size)


def test_an_infinity_on_one_rank_is_one_for_all():
    on_nccl(precision.scales, 2)


# --- memory -----------------------------------------------------------------------------------------------------------

WIDTH = 1024


def held_after_steps(offload, accumulates):
    """Bytes on the device between steps beside the inputs, and those of a whole model."""
    # Matrix libraries keep workspaces for forward's thread and for backward's: they are no model's.
    nn.Linear(WIDTH, WIDTH, device="cuda")(torch.randn(4, WIDTH, device="cuda")).sum().backward()
    before = torch.cuda.memory_allocated()
    model = seeded(Layers(num_layers=4, width=WIDTH))
    full_bytes = 4 * sum(param.numel() for param in model.parameters())
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({TwoLayers}),
        cpu_offload=CPUOffload(offload_params=offload),
        device_id=torch.cuda.current_device(),
    )
    optim = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    inputs = torch.randn(4, WIDTH, device="cuda")
    levels = []
    for _ in range(6):
        for _ in range(2 if accumulates else 1):
            model(inputs).square().mean().backward()
        gradients = torch.cuda.memory_allocated() - before
        optim.step()
        optim.zero_grad()
        torch.cuda.synchronize()
        levels.append(torch.cuda.memory_allocated() - before)
    if offload:
        assert all(param.device.type == "cpu" for param in model.parameters())
    return levels, gradients, full_bytes


@pytest.mark.parametrize("accumulates", [False, True])
def test_shards_on_the_host_leave_the_device_empty_between_steps(accumulates):
    for levels, gradients, full_bytes in on_nccl(held_after_steps, 2, True, accumulates):
        assert levels[-1] < full_bytes / 4
        assert gradients < full_bytes / 4
        assert levels[1:] == levels[1:2] * 5, "memory grows from step to step"


def test_shards_gradients_and_momentum_are_all_that_is_held():
    for world_size in (2, 4):
        for levels, gradients, full_bytes in on_nccl(held_after_steps, world_size, False, False):
            shard = full_bytes / world_size
            assert levels[-1] < 2 * shard + full_bytes / 4
            assert gradients < 3 * shard + full_bytes / 4
            assert levels[1:] == levels[1:2] * 5, "memory grows from step to step"


def cpu_module_without_a_device():
    """A module built on the host moves to the group's device by itself, and so do its buffers."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model = FullyShardedDataParallel(model, sync_module_states=True)
    assert all(param.device.type == "cuda" for param in model.parameters())
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    low = FullyShardedDataParallel(
        nn.Linear(64, 64),
        mixed_precision=MixedPrecision(torch.float16, torch.float16, keep_low_precision_grads=True),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
    )
    low(torch.randn(4, 64, device="cuda")).sum().backward()
    assert all(param.grad.dtype == torch.float16 for param in low.parameters())
    return dist.get_rank()


def test_a_module_on_the_host_needs_no_device_id():
    assert on_nccl(cpu_module_without_a_device, 2) == [0, 1]
