"""Tensor parallelism below, sharding above: parameters become DTensors on both axes, and training stays the same."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import shardwise
from shardwise import DataParallelMeshDims, fully_shard
from shardwise.testing import run_ranks


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=8, hidden=16):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(2))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def both_models():
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return plain, model, mesh


def data(mesh, step):
    """Ranks of one tensor-parallel group read the same batch; the data-parallel ones each their own."""
    generator = torch.Generator().manual_seed(step)
    batches = torch.randn(2, 4, 8, generator=generator)
    return batches, batches[mesh["dp"].get_local_rank()]


def trained_beside_plain():
    plain, model, mesh = both_models()
    weight = model.blocks[0].up.weight
    assert weight.device_mesh.ndim == 2
    assert tuple(weight.shape) == (16, 8)
    assert weight.to_local().shape == (4, 8)
    assert weight.placements[1] == Shard(0)
    assert model.blocks[0].down.weight.placements == (Shard(0), Shard(1))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False) for m in (plain, model)]
    worst = 0.0
    for step in range(5):
        batches, own = data(mesh, step)
        losses = [plain(batch).square().mean() for batch in batches]
        (sum(losses) / 2).backward()
        model(own).square().mean().backward()
        for (name, expected), (_, param) in zip(
            plain.named_parameters(), model.named_parameters(), strict=True
        ):
            difference = (param.grad.full_tensor() - expected.grad).abs().max().item()
            assert difference < 1e-6, f"step {step}, gradient of {name}: {difference}"
        norm = shardwise.clip_grad_norm_(model.parameters(), 0.1)
        expected_norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(norm, expected_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, expected), (_, param) in zip(
            plain.named_parameters(), model.named_parameters(), strict=True
        ):
            worst = max(worst, (param.full_tensor() - expected).abs().max().item())
            assert worst < 1e-5, f"step {step}, {name}: {worst}"
    return worst


# Not bitwise: tensor parallelism splits the matrix products themselves, and partial sums round differently.
def test_two_by_two_trains_like_the_plain_model():
    run_ranks(trained_beside_plain, 4, kind="gloo")


def state_round_trip():
    # DTensor keeps the slices of this mesh, and gives them to parameters of a later one.
    earlier = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "dp", "tp"))
    parallelize_module(Model().blocks[0], earlier["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    plain, model, _ = both_models()
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        for name, value in plain.state_dict().items():
            assert torch.equal(full[name], value), name
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(saved)
    for (name, param), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(param.full_tensor(), expected), name


def test_state_dicts_hold_the_full_values_and_load_back():
    run_ranks(state_round_trip, 4, kind="gloo")


def unsharded_shows_the_tensor_parallel_parameter():
    plain, model, mesh = both_models()
    block = model.blocks[0]
    block.unshard()
    weight = block.up.weight
    assert isinstance(weight, DTensor)
    assert weight.device_mesh == mesh["tp"]
    assert torch.equal(weight.full_tensor(), plain.blocks[0].up.weight)
    block.reshard()


def test_while_unsharded_the_module_shows_the_tensor_parallel_parameter():
    run_ranks(unsharded_shows_the_tensor_parallel_parameter, 4, kind="gloo")


def sequence_parallel_norms():
    """A norm whose ranks each see a part of the sequence: its gradient is a sum over the tensor-parallel axis too."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.LayerNorm(8))
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": SequenceParallel(use_local_output=True)})
    fully_shard(model, mesh=mesh["dp"])
    batches = torch.randn(2, 1, 4, 8, generator=torch.Generator().manual_seed(1))
    sum(plain(batch).pow(3).sum() for batch in batches).backward()
    own = batches[mesh["dp"].get_local_rank()].chunk(2, dim=1)[mesh["tp"].get_local_rank()]
    model(own).pow(3).sum().backward()
    for expected, param in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad / 2)


def test_gradients_that_come_as_partial_sums_are_summed_over_the_tensor_parallel_axis():
    run_ranks(sequence_parallel_norms, 4, kind="gloo")


def misplaced_mesh():
    model = nn.Linear(8, 8)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("everyone",))
    parallelize_module(model, other, ColwiseParallel())
    with pytest.raises(shardwise.ConfigError, match="not another axis"):
        fully_shard(model, mesh=mesh["dp"])
    assert type(model) is nn.Linear
    assert model.weight.device_mesh == other


def test_a_tensor_parallel_mesh_apart_from_the_data_parallel_one_is_refused():
    run_ranks(misplaced_mesh, 4, kind="gloo")


def rows_that_do_not_divide(num_rows):
    """What tensor parallelism leaves of ``num_rows`` differs by rank, and is cut again into shards that differ."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, num_rows))
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate())})
    fully_shard(model, mesh=mesh["dp"])
    batches = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    sum(plain(batch).pow(3).sum() for batch in batches).backward()
    model(batches[mesh["dp"].get_local_rank()]).pow(3).sum().backward()
    for expected, param in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), expected)
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad / 2)
    for own, expected in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        own.zero_()
        assert expected.any()
    model.load_state_dict(plain.state_dict())
    for expected, param in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), expected)


def odd_rows():
    for num_rows in (19, 6, 3):
        rows_that_do_not_divide(num_rows)


def test_rows_need_not_divide_on_either_axis():
    run_ranks(odd_rows, 4, kind="gloo")


def on_one_mesh(sizes, dims, tensor_axis):
    """Parameters and activations are DTensors on a mesh of all axes; some of these carry data."""
    plain, names = nn.Linear(6, 10), tuple(sizes)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=names)
    placements = [Shard(0) if axis == tensor_axis else Replicate() for axis in names]
    for param in plain.parameters():
        dist.broadcast(param.data, 0)
    model = copy.deepcopy(plain)
    for name, param in plain.named_parameters():
        setattr(model, name, nn.Parameter(distribute_tensor(param.detach(), mesh, placements)))
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    number, world_size = 0, 1
    for axis in names:
        if axis != tensor_axis:
            number, world_size = number * sizes[axis] + mesh.get_local_rank(axis), world_size * sizes[axis]
    batches = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(1))[:world_size]
    placements = [Replicate() if axis == tensor_axis else Shard(0) for axis in names]
    inputs = DTensor.from_local(batches[number], mesh, placements, run_check=False)
    model(inputs).redistribute(placements=placements).to_local().pow(3).sum().backward()
    sum(plain(batch).pow(3).sum() for batch in batches).backward()
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), expected), name
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad / world_size)


def every_way_to_name_axes():
    on_one_mesh({"dp": 2, "tp": 2}, DataParallelMeshDims(shard="dp"), "tp")
    on_one_mesh({"tp": 2, "dp": 2}, DataParallelMeshDims(shard="dp"), "tp")
    on_one_mesh({"copies": 2, "dp": 2}, DataParallelMeshDims(shard="dp", replicate="copies"), None)
    on_one_mesh({"dp": 2, "cp": 2}, DataParallelMeshDims(shard=("dp", "cp")), None)
    on_one_mesh({"dp": 1, "cp": 2, "tp": 2}, DataParallelMeshDims(shard=("dp", "cp")), "tp")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0), Replicate()]))
    with pytest.raises(shardwise.ConfigError, match="not replicated on the axes"):
        fully_shard(layer, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    assert type(layer) is nn.Linear


def test_parameters_may_lie_on_a_mesh_of_all_axes_of_which_some_carry_data():
    run_ranks(every_way_to_name_axes, 4, kind="gloo")
