"""Sharded modules in models that torch's ``replicate`` or ``DistributedDataParallel`` trains."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.functional import relu
from torch.nn.parallel import DistributedDataParallel

from shardwise.testing import run_ranks
from tests.ranks.side_by_side import device
from tests.ranks.subject import FSDPModule, fully_shard


def seeded():
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(4, 5), nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 5)), nn.Linear(5, 3)
    )


def assert_trains_as_plain(run, model, plain):
    """Trains ``run``, which is or contains ``model``, on this rank's rows and ``plain`` on all rows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2, foreach=False) for m in (model, plain)]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randn(2 * world, 4, generator=generator, device="cpu").to(device())
        run(rows[2 * rank : 2 * rank + 2].clone()).square().mean().backward()
        plain(rows).square().mean().backward()
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            gradient = param.grad.full_tensor() if isinstance(param, DTensor) else param.grad
            # Sums over ranks and over rows round differently.
            torch.testing.assert_close(gradient, expected.grad, msg=lambda text, name=name: f"{name}: {text}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def replicated_around_a_sharded_part():
    model, plain = seeded(), seeded()
    fully_shard(model[1])
    replicate(model)
    assert_trains_as_plain(model, model, plain)
    assert [isinstance(param, DTensor) for param in model.parameters()] == [False] * 2 + [True] * 4 + [
        False
    ] * 2


def ddp_around_a_sharded_part():
    model, plain = seeded(), seeded()
    fully_shard(model[1])
    sharded = [name for name, _ in model.named_parameters() if name.startswith("1.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sharded)
    assert_trains_as_plain(DistributedDataParallel(model), model, plain)


def sharded_around_a_replicated_part():
    model, plain = seeded(), seeded()
    replicate(model[1])
    fully_shard(model)
    assert_trains_as_plain(model, model, plain)
    assert [isinstance(param, DTensor) for param in model.parameters()] == [True] * 2 + [False] * 4 + [
        True
    ] * 2


def a_sharded_module_is_not_replicated():
    model = seeded()
    fully_shard(model)
    with pytest.raises(RuntimeError, match="fully_shard"):
        replicate(model)


@pytest.mark.parametrize(
    "body",
    [
        replicated_around_a_sharded_part,
        ddp_around_a_sharded_part,
        sharded_around_a_replicated_part,
        a_sharded_module_is_not_replicated,
    ],
)
def test_models_that_are_sharded_in_part_and_replicated_in_part_train(body):
    run_ranks(body, 2, kind="gloo")


class Mlp(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.grow, self.shrink = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x):
        return self.shrink(relu(self.grow(x)))


class SummedOverRanks(nn.Module):
    def __init__(self, dim, mesh):
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(torch.randn(dim, dim))

    def forward(self, x):
        y = relu(x @ self.weight)
        return y, dist.all_reduce(y, group=self.mesh.get_group(), async_op=True)


class Mlps(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.all = nn.ModuleList(Mlp(dim) for _ in range(3))

    def forward(self, inputs, works):
        outputs = []
        for mlp, x, work in zip(self.all, inputs, works, strict=True):
            work.wait()
            outputs.append(mlp(x))
        return sum(outputs)


class GathersAhead(nn.Module):
    """Gathers each MLP's parameters while its input is being summed over ranks."""

    def __init__(self, dim, mesh):
        super().__init__()
        self.sums = nn.ModuleList(SummedOverRanks(dim, mesh) for _ in range(3))
        self.mlps = Mlps(dim)

    def forward(self, x):
        summed = []
        for part, mlp in zip(self.sums, self.mlps.all, strict=True):
            summed.append(part(x))
            if isinstance(mlp, FSDPModule):
                mlp.unshard(async_op=True)
        ys, works = zip(*summed, strict=True)
        return self.mlps(ys, works)


def trained_with_gathers_ahead():
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    torch.manual_seed(42)
    model = GathersAhead(8, mesh)
    plain = replicate(copy.deepcopy(model))
    for mlp in model.mlps.all:
        fully_shard(mlp, mesh=mesh, reshard_after_forward=False)
    fully_shard(model.mlps, mesh=mesh)
    replicate(model.to(device()))
    optimizers = [
        torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True),
        torch.optim.Adam(plain.parameters(), lr=1e-2),
    ]
    torch.manual_seed(42 + dist.get_rank())
    for _ in range(5):
        x = torch.randn(2, 8)
        losses = []
        for member, optimizer in zip((model, plain), optimizers, strict=True):
            losses.append(member(x).sum())
            losses[-1].backward()
            with implicit_replication():
                optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(losses[0], losses[1])


def test_a_replicated_model_gathers_its_sharded_parts_ahead():
    run_ranks(trained_with_gathers_ahead, 2, kind="gloo")
