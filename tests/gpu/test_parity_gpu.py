"""fully_shard on GPUs: real NCCL ranks, several of them on one GPU where there are not enough."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from shardwise import FSDPModule, MixedPrecisionPolicy, fully_shard, trace
from shardwise.testing import run_ranks
from shardwise.testing.parity import (
    BF16,
    FP32,
    ONE_BATCH,
    Accumulation,
    Precision,
    differences,
    gather_histories,
    run_plain,
    run_sharded,
)
from shardwise.testing.workloads import WORKLOADS, TiedTransformer, seeded
from tests.ranks.models import Layers, held_bytes, is_sharded, seen_weights
from tests.ranks.test_prefetch import BACKWARD_OF_LAYERS, BACKWARD_OF_ROOT, FORWARD

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

LAST_OF_THREE = Accumulation(3, sync_each=False)


def check_on_this_rank(name: str, precision: Precision, tolerance: float) -> list[str]:
    """The sharded run of a workload against the oracle on the same GPU; returns what is wrong."""
    workload = WORKLOADS[name]
    policy = MixedPrecisionPolicy(precision.param_dtype, precision.reduce_dtype)
    runs = [
        (reshard, accumulation) for reshard in (True, False) for accumulation in (ONE_BATCH, LAST_OF_THREE)
    ]
    local = [
        run_sharded(
            workload,
            partial(fully_shard, reshard_after_forward=reshard, mp_policy=policy),
            accumulation=accumulation,
            device="cuda",
        )
        for reshard, accumulation in runs
    ]
    wrong = []
    for (reshard, accumulation), history in zip(runs, gather_histories(local), strict=True):
        expected = run_plain(
            workload, dist.get_world_size(), precision=precision, accumulation=accumulation, device="cuda"
        )
        found = differences(expected, history, tolerance=tolerance)
        if found:
            wrong.append(
                f"reshard {reshard}, {accumulation.label}: {len(found)} differences, first: {found[0]}"
            )
    return wrong


# Not bitwise: on a GPU the kernel that is chosen, and with it the order of its sums, may depend on how a weight
# is aligned in memory; some backward kernels add atomically.


@pytest.mark.parametrize("kind", ["nccl", "gloo-cuda"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_two_ranks_match_the_oracle(name, kind):
    wrong = run_ranks(check_on_this_rank, 2, name, FP32, 1e-5, kind=kind, timeout_seconds=120)
    assert not any(wrong), "\n".join(wrong[0])


@pytest.mark.parametrize("name", WORKLOADS)
def test_two_ranks_match_the_oracle_in_bf16(name):
    wrong = run_ranks(check_on_this_rank, 2, name, BF16, 1e-2, kind="nccl", timeout_seconds=120)
    assert not any(wrong), "\n".join(wrong[0])


@pytest.mark.parametrize("name", WORKLOADS)
def test_one_rank_matches_the_oracle(name):
    wrong = run_ranks(check_on_this_rank, 1, name, FP32, 1e-5, kind="nccl", timeout_seconds=120)
    assert not any(wrong), "\n".join(wrong[0])


WIDTH, NUM_LAYERS = 512, 16


def memory_of_steps() -> tuple[int, int, int, list[int], list[int]]:
    """Bytes of the full model, of the shards, of matrix libraries' workspaces; levels after steps and peaks within."""
    torch.cuda.init()
    model = seeded(Layers(num_layers=NUM_LAYERS, width=WIDTH)).to("cuda")
    full_bytes = sum(param.numel() * param.element_size() for param in model.parameters())
    # A plain step first: the libraries take their workspaces, for forward's thread and for backward's.
    model(torch.randn(8, WIDTH, device="cuda")).sum().backward()
    model.zero_grad()
    workspace_bytes = torch.cuda.memory_allocated() - full_bytes
    for unit in (*model.layers, model):
        fully_shard(unit)
    shard_bytes = sum(param.to_local().numel() * param.element_size() for param in model.parameters())
    inputs = torch.randn(8, WIDTH, device="cuda")
    levels, peaks = [], []
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        model(inputs).sum().backward()
        model.zero_grad()
        torch.cuda.synchronize()
        levels.append(torch.cuda.memory_allocated())
        peaks.append(torch.cuda.max_memory_allocated())
    return full_bytes, shard_bytes, workspace_bytes, levels, peaks


@pytest.mark.parametrize("world_size", [1, 2])
def test_after_a_step_memory_is_back_at_the_sharded_level(world_size):
    for full_bytes, shard_bytes, workspace_bytes, levels, peaks in run_ranks(
        memory_of_steps, world_size, kind="nccl"
    ):
        assert len(set(levels[1:])) == 1, f"memory grows from step to step: {levels}"
        # Besides the shards and the workspaces there are the inputs, and what alignment takes.
        small = 0.02 * full_bytes
        assert levels[-1] <= shard_bytes + workspace_bytes + small, (
            f"{levels[-1]} bytes held, {shard_bytes} in shards, {workspace_bytes} in workspaces"
        )
        # Shards and their gradients, and a few layers of sixteen in full, with their gradients.
        assert peaks[-1] - levels[-1] <= shard_bytes + 0.6 * full_bytes, (
            f"peak {peaks[-1]}, level {levels[-1]}"
        )


def freed_weights(reshard: bool) -> None:
    model = seeded(Layers()).to("cuda")
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model)
    for _ in range(2):
        with seen_weights(model.layers[1].in_proj) as weights:
            loss = model(torch.randn(2, 6, device="cuda")).sum()
        assert is_sharded(model.layers[1].in_proj) == reshard
        assert (held_bytes(weights) == 0) == reshard
        loss.backward()
        assert held_bytes(weights) == 0


@pytest.mark.parametrize("reshard", [True, False])
def test_full_weights_are_freed_after_forward_or_after_backward(reshard):
    run_ranks(freed_weights, 2, reshard, kind="nccl")


def order_of_events() -> list[tuple[str, str, str]]:
    model = seeded(TiedTransformer()).to("cuda")
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    tokens = torch.zeros(2, 6, dtype=torch.long, device="cuda")
    model(tokens).sum().backward()
    with trace.record(model) as recorder:
        model(tokens).sum().backward()
    assert isinstance(model, FSDPModule)
    return recorder.of("unshard", "post_backward")


def test_the_order_of_events_is_that_of_the_cpu():
    expected = [*FORWARD, *BACKWARD_OF_LAYERS, *BACKWARD_OF_ROOT]
    assert run_ranks(order_of_events, 2, kind="nccl") == [expected] * 2
