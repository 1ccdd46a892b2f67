"""`shardwise.optim.whole` on every way to shard: replicas, tensor parallelism, the wrapper, ZeRO, and plain tensors."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon

from shardwise import (
    ConfigError,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    ZeroRedundancyOptimizer,
    fully_shard,
)
from shardwise.optim import mixed, whole
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import average_gradients, data, full, match_plain, same
from tests.ranks.tables import run_cases
from tests.ranks.test_whole_optimizer import Convolutions, Model, chosen, loss_of, matrices, shard
from tests.ranks.whole_classes import Shampoo

pytestmark = pytest.mark.arithmetic


def hybrid(kind):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    match_plain(
        Model, partial(shard, mesh=mesh), loss_of, steps=4, optimizer=chosen(kind, at_once=2), tolerance=1e-6
    )
    model = shard(seeded(Model()), mesh=mesh)
    optimizer = chosen(kind)(model.parameters())
    beside(model, optimizer, kind, lambda step: loss_of(model, step, dist.get_rank()))
    return len([held for held in optimizer.owned_parameters() if held.requires_grad])


def beside(model, optimizer, kind, loss, steps=3):
    """Steps a plain optimizer with the same gradients; values must be equal, bit for bit."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    twins = [nn.Parameter(full(param.detach()).clone()) for param in params]
    plain = chosen(kind)(twins)
    for step in range(steps):
        loss(step).backward()
        if step == 1:
            # From owners to the placements of the parameters, and back.
            optimizer.load_state_dict(optimizer.state_dict())
        for param, twin in zip(params, twins, strict=True):
            twin.grad = None if param.grad is None else full(param.grad).clone()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
        for number, (param, twin) in enumerate(zip(params, twins, strict=True)):
            same(full(param.detach()), twin.detach(), f"step {step}: parameter {number}")


def test_replicas_share_the_work():
    for kind in ("Muon", "Shampoo"):
        owned = run_ranks(hybrid, 4, kind)
        assert sum(owned) == 9
        assert all(owned)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(6)
        self.down = nn.Linear(10, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def with_tensor_parallelism(kind):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = seeded(nn.Sequential(Block(), Block()))
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = whole(
        Muon, [p for b in model for p in (b.up.weight, b.down.weight)], lr=0.02, weight_decay=0.1
    )
    assert all(len(param.placements) == 2 for param in optimizer.param_groups[0]["params"])
    beside(
        model,
        optimizer,
        kind,
        lambda step: model(data(step, mesh.get_coordinate()[0], 2, 6)).square().mean(),
    )


def test_tensor_parallel_matrices_are_whole_too():
    run_ranks(with_tensor_parallelism, 4, "Muon")


def with_settings(**settings):
    model = shard(seeded(Model()), **settings)
    optimizer = chosen("Muon")(model.parameters())
    beside(model, optimizer, "Muon", lambda step: loss_of(model, step, dist.get_rank()))


def test_offload_and_mixed_precision_change_nothing():
    cases = [
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        {"reshard_after_forward": False},
    ]
    run_cases(with_settings, 2, cases)


def convolve():
    model = shard(seeded(Convolutions()))
    optimizer = chosen("Shampoo")(model.parameters())
    beside(
        model,
        optimizer,
        "Shampoo",
        lambda step: model(data(step, dist.get_rank(), 1, 3, 4, 4)).square().mean(),
    )


def test_kernels_that_the_optimizer_reshapes_are_stepped_whole():
    run_ranks(convolve, 2)


# --- the wrapper ------------------------------------------------------------------------------------------------------


def wrap(model, strategy):
    options = {"sharding_strategy": strategy, "use_orig_params": True}
    if strategy is ShardingStrategy.HYBRID_SHARD:
        options["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for number, layer in enumerate(model.layers):
        model.layers[number] = FullyShardedDataParallel(layer, **options)
    return FullyShardedDataParallel(model, **options)


def originals(model):
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        return [
            (param.detach().clone(), None if param.grad is None else param.grad.clone())
            for param in model.parameters()
        ]


def wrapped(strategy, kind):
    shapes = [param.shape for param in Model().parameters()]
    chosen_numbers = [number for number, shape in enumerate(shapes) if len(shape) >= 2]
    model = wrap(seeded(Model()), strategy)
    params = list(model.parameters())
    twins = [nn.Parameter(value) for value, _ in originals(model)]
    picked = {"Muon": (Muon, {"lr": 0.02, "weight_decay": 0.1}), "Shampoo": (Shampoo, {"lr": 0.05})}[kind]
    optimizer = whole(picked[0], [params[number] for number in chosen_numbers], **picked[1])
    plain = picked[0]([twins[number] for number in chosen_numbers], **picked[1])
    for step in range(4):
        loss_of(model, step, dist.get_rank()).backward()
        for twin, (_, gradient) in zip(twins, originals(model), strict=True):
            twin.grad = gradient
        if step == 2:
            # State dicts go through the wrapper's form, too.
            optimizer.load_state_dict(optimizer.state_dict())
            if kind == "Muon":
                saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
                optimizer.load_state_dict(
                    FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, saved)
                )
        for each in (optimizer, plain):
            each.step()
        optimizer.zero_grad()
        for number, (twin, (value, _)) in enumerate(zip(twins, originals(model), strict=True)):
            same(value, twin.detach(), f"step {step}: parameter {number}")


def test_matrices_of_the_wrapper_are_stepped_whole():
    strategies = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
    run_cases(wrapped, 3, [{"strategy": strategy, "kind": "Muon"} for strategy in strategies])
    cases = [
        {"strategy": ShardingStrategy.FULL_SHARD, "kind": "Shampoo"},
        {"strategy": ShardingStrategy.HYBRID_SHARD, "kind": "Muon"},
    ]
    run_cases(wrapped, 4, cases)


def wrapped_flat():
    model = FullyShardedDataParallel(seeded(Model()), use_orig_params=False)
    with pytest.raises(ConfigError, match="use_orig_params=True"):
        whole(torch.optim.SGD, model.parameters())


def test_flat_parameters_are_refused():
    run_ranks(wrapped_flat, 2)


# --- without shards ---------------------------------------------------------------------------------------------------


def replicated(kind):
    model, plain = seeded(Model()), seeded(Model())
    optimizer = whole(Muon, matrices(model.parameters()), lr=0.02, weight_decay=0.1)
    unsharded = Muon(matrices(plain.parameters()), lr=0.02, weight_decay=0.1)
    for step in range(3):
        for each in (model, plain):
            average_gradients(each, lambda rank: loss_of(each, step, rank), dist.get_world_size())  # noqa: B023
        for each in (optimizer, unsharded):
            each.step()
            each.zero_grad()
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            same(param.detach(), expected.detach(), f"step {step}")
    return sum(bool(state) for state in optimizer.state.values())


def test_plain_parameters_are_stepped_by_one_owner_each():
    assert sum(run_ranks(replicated, 3, "Muon")) == 9


def with_zero():
    model, plain = seeded(Model()), seeded(Model())
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = ZeroRedundancyOptimizer(matrices(model.parameters()), Muon, lr=0.02)
    unsharded = Muon(matrices(plain.parameters()), lr=0.02)
    for step in range(3):
        loss_of(ddp, step, dist.get_rank()).backward()
        for param, twin in zip(model.parameters(), plain.parameters(), strict=True):
            twin.grad = None if param.grad is None else param.grad.clone()
        for each in (optimizer, unsharded):
            each.step()
            each.zero_grad()
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            same(param.detach(), expected.detach(), f"step {step}")


def test_zero_steps_whole_matrices_by_itself():
    run_ranks(with_zero, 2, kind="gloo")


# --- several meshes ---------------------------------------------------------------------------------------------------


def with_experts():
    """Each half of the ranks has an expert of its own, the rest of the model is everybody's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "shard"))
    half = mesh["shard"]
    model = seeded(nn.ModuleDict({"expert": nn.Linear(6, 6, bias=False), "all": nn.Linear(6, 6, bias=False)}))
    with torch.no_grad():
        model["expert"].weight.add_(mesh.get_coordinate()[0])
    fully_shard(model["expert"], mesh=half)
    fully_shard(model["all"])
    with pytest.raises(ConfigError, match="one optimizer for the parameters of each mesh"):
        whole(Muon, model.parameters())
    optimizer = mixed([whole(Muon, model[name].parameters(), lr=0.02) for name in model])
    twins = [nn.Parameter(full(param.detach()).clone()) for param in model.parameters()]
    plain = Muon(twins, lr=0.02)
    for step in range(2):
        for name in model:
            model[name](data(step, dist.get_rank(), 2, 6)).square().mean().backward()
        for param, twin in zip(model.parameters(), twins, strict=True):
            twin.grad = full(param.grad).clone()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
        for param, twin in zip(model.parameters(), twins, strict=True):
            same(full(param.detach()), twin.detach(), f"step {step}")


def test_parameters_of_several_meshes_have_an_optimizer_each():
    run_ranks(with_experts, 4)


def of_one_stage():
    """Each half of the ranks trains a stage of its own, on a mesh with replicas that is not all of the world."""
    whole_mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("stage", "replicate", "shard"))
    model = shard(seeded(Model(), dist.get_rank() // 2), mesh=whole_mesh["replicate", "shard"])
    optimizer = chosen("Muon")(model.parameters())
    beside(model, optimizer, "Muon", lambda step: loss_of(model, step, dist.get_rank()), steps=2)


def test_a_mesh_that_is_not_all_of_the_world_has_owners_of_its_own():
    run_ranks(of_one_stage, 4)


# --- on gloo ----------------------------------------------------------------------------------------------------------


def on_gloo():
    match_plain(Model, shard, loss_of, steps=3, optimizer=chosen("Muon", at_once=2))
    model = shard(seeded(Model()))
    inner = matrices(model.layers.parameters())
    rest = [param for param in model.parameters() if param.dim() < 2]
    optimizer = mixed({Muon: inner, AdamW: rest})
    for step in range(2):
        loss_of(model, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_it_works_between_processes():
    run_ranks(on_gloo, 3, kind="gloo")
