"""One call of ``fully_shard``, parameters on several meshes: experts beside what all ranks share."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common as torch_records
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard

import shardwise
from shardwise import ConfigError, ShardPlacementResult, fully_shard
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from shardwise.trace import record
from tests.ranks.tables import slow

TorchPlacement = getattr(torch_records, "ShardPlacementResult", None)
beside_torch = pytest.mark.skipif(TorchPlacement is None, reason="this torch has one mesh for each call")


class Experts(nn.Module):
    """Each pair of ranks has experts of its own; all ranks share the rest."""

    def __init__(self, width=6):
        super().__init__()
        self.router = nn.Linear(width, width)
        self.experts = nn.Parameter(torch.randn(4, width, width))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x):
        x = self.router(x)
        for expert in self.experts:
            x = x + torch.relu(x @ expert) / 4
        return self.out(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def is_expert(param):
    return param.dim() == 3


def sharded(api_shard, result, info_of, on_root=False):
    """Experts over the inner axis of a mesh of all ranks, in pairs; the rest over all ranks."""
    torch.manual_seed(3)
    model = Model()
    world = dist.get_world_size()
    whole = init_device_mesh("cpu", (world,))
    pairs = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("pair", "expert"))
    info = info_of(pairs)

    def placed(param):
        return result(Shard(1), info) if is_expert(param) else None

    if not on_root:
        for layer in model.layers:
            api_shard(layer, mesh=whole, shard_placement_fn=placed)
    api_shard(model, mesh=whole, shard_placement_fn=placed)
    return model


def seen_in_training(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randn(4 * dist.get_world_size(), 6, generator=torch.Generator().manual_seed(0))
    own = rows[4 * dist.get_rank() :][:4].clone()
    seen = []
    for _ in range(steps):
        loss = model(own).square().mean()
        loss.backward()
        seen.append((loss.detach(), [param.grad.full_tensor() for param in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def experts_of_pairs(mesh):
    return FSDPMeshInfo(mesh["expert"], shard_mesh_dim=0)


def replicated_experts(mesh):
    return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def trains_as_torch_does(info_of, on_root):
    ours = sharded(fully_shard, TorchPlacement, info_of, on_root)
    theirs = sharded(torch_fsdp.fully_shard, TorchPlacement, info_of, on_root)
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert own.placements == other.placements
        assert own.device_mesh == other.device_mesh
        assert torch.equal(own.to_local(), other.to_local())
    for (loss, grads), (other_loss, other_grads) in zip(
        seen_in_training(ours), seen_in_training(theirs), strict=True
    ):
        torch.testing.assert_close(loss, other_loss)
        torch.testing.assert_close(grads, other_grads)


@beside_torch
@pytest.mark.parametrize("info_of", [slow(experts_of_pairs), replicated_experts])
def test_parameters_on_two_meshes_train_as_with_torch(info_of):
    run_ranks(trains_as_torch_does, 4, info_of, False, kind="gloo")


@beside_torch
def test_a_root_may_have_parameters_on_two_meshes():
    run_ranks(trains_as_torch_does, 4, experts_of_pairs, True, kind="gloo")


def trains_as_plain(reshard):
    """With replicated experts both kinds of parameters are averaged over all ranks: as one plain model has it."""
    plain = seeded(Model())
    model = copy.deepcopy(plain)
    pairs = init_device_mesh("cpu", (dist.get_world_size() // 2, 2))
    for layer in (*model.layers, model):
        fully_shard(
            layer,
            reshard_after_forward=reshard,
            shard_placement_fn=lambda p: ShardPlacementResult(None, pairs) if is_expert(p) else None,
        )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    own = rows.chunk(dist.get_world_size())[dist.get_rank()].clone()
    for _ in range(2):
        plain(rows).square().mean().backward()
        with record(model) as recorder:
            model(own).square().mean().backward()
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(param, DTensor)
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    assert all(isinstance(value, DTensor) for value in state.values())
    model.load_state_dict(plain.state_dict())
    model.layers[0].unshard()
    assert torch.equal(model.layers[0].experts, plain.layers[0].experts)
    model.layers[0].reshard()
    return [event.kind for event in recorder.events].count("unshard")


@pytest.mark.parametrize("reshard", [None, True, False, 2])
def test_parameters_on_two_meshes_train_as_a_plain_model(reshard):
    counts = run_ranks(trains_as_plain, 4, reshard, kind="threads")
    # Each layer's two units and the root's one are gathered in forward; resharded layers again in backward.
    assert counts == [5 if reshard is False else 9] * 4


def errors():
    layer = Experts()
    pairs = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pair", "expert"))

    def to_pairs(param):
        return ShardPlacementResult(None, pairs) if is_expert(param) else None

    for wrong in ("a mesh", init_device_mesh("cpu", (1, 1, 2))):
        with pytest.raises(ConfigError, match="mesh"):
            fully_shard(
                layer, shard_placement_fn=lambda param, wrong=wrong: ShardPlacementResult(None, wrong)
            )
        assert type(layer) is Experts
    fully_shard(layer, shard_placement_fn=to_pairs)
    for setter in ("set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook"):
        with pytest.raises(ValueError, match="2 meshes"):
            getattr(layer, setter)(None)


def test_what_fits_one_mesh_only_is_refused():
    run_ranks(errors, 2, kind="threads")


@beside_torch
def test_torchs_record_has_the_same_fields():
    assert list(shardwise.ShardPlacementResult.__dataclass_fields__) == list(
        TorchPlacement.__dataclass_fields__
    )
