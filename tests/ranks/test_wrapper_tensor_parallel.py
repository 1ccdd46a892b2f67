"""`FullyShardedDataParallel` over tensor parallelism: parameters that are DTensors on another axis of the mesh."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwise import (
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    StateDictType,
)
from shardwise.errors import ConfigError, UnsupportedError
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded

FSDP = FullyShardedDataParallel


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        return x + self.norm(self.down(torch.relu(self.up(x))))


def plain():
    return seeded(nn.Sequential(Block(), Block()))


def parallel(mesh):
    model = plain()
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def mesh_of_both():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def wrapped(mesh, **options):
    return FSDP(parallel(mesh), device_mesh=mesh["dp"], auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def batch(step, data_rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + data_rank))


def train(model, optimizer, steps, max_norm=None):
    """Losses of this rank; with ``max_norm``, norms too."""
    found = []
    for step in range(steps):
        loss = model(batch(step, dist.get_rank() // 2)).square().sum()
        loss.backward()
        found.append(loss.item())
        if max_norm is not None:
            found.append(float(model.clip_grad_norm_(max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def trained_plainly(steps, max_norm=None):
    model = plain()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    found = []
    for step in range(steps):
        losses = [model(batch(step, data_rank)).square().sum() for data_rank in range(2)]
        (sum(losses) / 2).backward()
        found.append(losses[dist.get_rank() // 2].item())
        if max_norm is not None:
            found.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), optimizer.state_dict(), found


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def trains():
    mesh = mesh_of_both()
    state, optim_state, expected = trained_plainly(3, max_norm=1.0)
    strategies = (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD)
    for options in (
        {"use_orig_params": orig, "sharding_strategy": strategy}
        for orig in (False, True)
        for strategy in strategies
    ):
        model = wrapped(mesh, **options)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        close(torch.tensor(train(model, optimizer, 3, max_norm=1.0)), torch.tensor(expected))
        full = model.state_dict()
        assert list(full) == list(state)
        for name, value in full.items():
            assert type(value) is torch.Tensor
            close(value, state[name])
        named = FSDP.optim_state_dict(model, optimizer)["state"]
        for number, name in enumerate(state):
            close(named[name]["exp_avg"], optim_state["state"][number]["exp_avg"])


def beside_torch():
    mesh = mesh_of_both()
    for orig in (False, True):
        losses = []
        for model in (
            wrapped(mesh, use_orig_params=orig),
            TorchFSDP(
                parallel(mesh),
                device_mesh=mesh["dp"],
                auto_wrap_policy=TorchPolicy({Block}),
                use_orig_params=orig,
                device_id=torch.device("cpu"),
            ),
        ):
            losses.append(train(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), 3))
        close(torch.tensor(losses[0]), torch.tensor(losses[1]))


def states():
    mesh = mesh_of_both()
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        for orig in (False, True):
            model = wrapped(mesh, use_orig_params=orig)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            train(model, optimizer, 2)
            other = wrapped(mesh, use_orig_params=not orig)
            with torch.no_grad():
                for param in other.parameters():
                    param.zero_()
            of_other = torch.optim.Adam(other.parameters(), lr=0.01)
            with FSDP.state_dict_type(model, kind), FSDP.state_dict_type(other, kind):
                state = model.state_dict()
                is_sharded = [isinstance(value, DTensor) for value in state.values()]
                assert set(is_sharded) == {kind is StateDictType.SHARDED_STATE_DICT}
                other.load_state_dict(state)
                named = FSDP.optim_state_dict(model, optimizer)
                of_other.load_state_dict(FSDP.optim_state_dict_to_load(other, of_other, named))
            assert train(model, optimizer, 2) == train(other, of_other, 2)
    FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    with pytest.raises(UnsupportedError, match="no place for tensor parallelism"):
        model.state_dict()


def summons():
    mesh = mesh_of_both()
    state = plain().state_dict()
    for orig in (False, True):
        model = wrapped(
            mesh, use_orig_params=orig, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)
        )
        with model.no_sync():
            model(batch(0, 0)).sum().backward()
        model(batch(0, 0)).sum().backward()
        with FSDP.summon_full_params(model, with_grads=True):
            for name, param in model.named_parameters():
                shown = param.full_tensor() if isinstance(param, DTensor) else param
                assert torch.equal(shown.detach(), state[name]), name
                assert param.grad.shape == param.shape
                with torch.no_grad():
                    param.add_(1.0)
        for name, value in model.state_dict().items():
            close(value, state[name] + 1)


def test_a_tensor_parallel_model_trains_clips_and_saves_as_a_plain_one():
    run_ranks(trains, 4, kind="gloo")


def test_it_trains_as_in_torch():
    run_ranks(beside_torch, 4, kind="gloo")


def test_states_go_from_one_tensor_parallel_model_to_another():
    run_ranks(states, 4, kind="gloo")


def test_full_parameters_are_dtensors_of_the_tensor_parallel_mesh():
    run_ranks(summons, 4, kind="gloo")


def refused():
    mesh = mesh_of_both()
    with pytest.raises(ConfigError, match="which is not another axis of the mesh"):
        FSDP(parallel(mesh))
    with pytest.raises(ConfigError, match="which is not another axis of the mesh"):
        FSDP(parallel(mesh), device_mesh=mesh["tp"])


def test_the_mesh_of_data_parallelism_must_be_another_axis():
    run_ranks(refused, 4)
