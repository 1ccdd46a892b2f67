"""Ranks whose batches run out step along as shadows, and gradients are as if they had been given zeros."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwise import ConfigError, fully_shard, uneven
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.divergence import WIDTH, Model
from tests.ranks.models import data, same_parameters, sgd
from tests.ranks.subject import beyond_torch

pytestmark = beyond_torch
COUNTS = (3, 1, 2, 4)


def train(average_over_present, replicas):
    rank, world = dist.get_rank(), dist.get_world_size()
    model, plain = seeded(Model()), seeded(Model())
    mesh = init_device_mesh("cpu", (replicas, world // replicas) if replicas else (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim, plain_optim = sgd(model.parameters()), sgd(plain.parameters())
    weights = []
    for batch, weight in uneven(
        model,
        (data(step, rank, 3, WIDTH) for step in range(COUNTS[rank])),
        average_over_present=average_over_present,
    ):
        weights.append(weight)
        (weight * model(batch).square().mean()).backward()
        optim.step()
        optim.zero_grad()
    for step in range(max(COUNTS[:world])):
        present = [other for other in range(world) if step < COUNTS[other]]
        share = world / len(present) if average_over_present else 1.0
        totals = {param: torch.zeros_like(param) for param in plain.parameters()}
        for other in present:
            (share * plain(data(step, other, 3, WIDTH)).square().mean()).backward()
            for param, total in totals.items():
                total += param.grad
            plain.zero_grad()
        for param, total in totals.items():
            param.grad = total / world
        plain_optim.step()
        plain.zero_grad()
    same_parameters(model, plain, "after all batches: ", 1e-6 if replicas else 0.0)
    return weights


@pytest.mark.parametrize(("world_size", "replicas"), [(3, 0), (4, 2)])
@pytest.mark.parametrize("average_over_present", [False, True], ids=["all", "present"])
def test_ranks_without_batches_step_along_and_add_nothing(world_size, replicas, average_over_present):
    weights = run_ranks(train, world_size, average_over_present, replicas)
    for count, seen in zip(COUNTS, weights, strict=False):
        assert len(seen) == max(COUNTS[:world_size])
        assert [weight > 0 for weight in seen] == [step < count for step in range(len(seen))]
    if average_over_present:
        assert weights[0][0] == 1.0
        assert weights[0][1] == world_size / sum(count > 1 for count in COUNTS[:world_size])


def no_batch_on_one():
    model = fully_shard(seeded(Model()))
    with pytest.raises(ConfigError, match="has no batch at all"):
        next(uneven(model, [data(0, 0, 3, WIDTH)] if dist.get_rank() else []))
    with pytest.raises(ConfigError, match="not sharded"):
        next(uneven(seeded(Model()), []))


def test_a_rank_without_any_batch_is_reported_on_all():
    run_ranks(no_batch_on_one, 2)
