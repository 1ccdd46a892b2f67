"""Frozen parameters beside trained ones, and parameters of several dtypes in one unit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from shardwise import MixedPrecisionPolicy, fully_shard
from shardwise.testing import run_ranks
from shardwise.testing.workloads import Adapters, seeded
from tests.ranks.models import (
    GATHER,
    REDUCE,
    Layers,
    Traffic,
    average_gradients,
    counted,
    data,
    full,
    match_plain,
    same,
    same_shard,
    sgd,
)
from tests.ranks.tables import cases_of, run_cases

WIDTH, RANK = 16, 4


class Adapted(nn.Module):
    """A frozen square and two thin matrices beside it, of sizes that leave no padding for two ranks."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class Model(nn.Module):
    def __init__(self, num_layers=3):
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def shard_layers(model, **kwargs):
    for unit in (*model.layers, model):
        fully_shard(unit, **kwargs)
    return model


def tokens(step, rank):
    return torch.randint(0, 19, (2, 6), generator=torch.Generator().manual_seed(100 * step + rank))


# --- what frozen parameters cost ------------------------------------------------------------------------------------


def cost_of_frozen(policy):
    model = shard_layers(seeded(Model()), mp_policy=policy)
    before = {
        name: full(param.detach()).clone() for name, param in model.named_parameters() if "base" in name
    }
    optim = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(3):
        loss = model(data(step, dist.get_rank(), 2, WIDTH)).float().square().sum()
        with Traffic() as traffic:
            loss.backward()
        for name, param in model.named_parameters():
            assert (param.grad is None) == ("base" in name), name
        optim.step()
        optim.zero_grad()
    for name, param in model.named_parameters():
        if name in before:
            same_shard(param.detach(), before[name], f"frozen {name} after steps with weight decay")
            assert param not in optim.state
    return [size for op, _, size in traffic.seen if op == "_reduce_scatter_base_"]


THIN_NUMEL = 2 * WIDTH * RANK


@pytest.mark.parametrize(
    ("policy", "itemsize"),
    [
        (MixedPrecisionPolicy(), 4),
        (MixedPrecisionPolicy(torch.bfloat16), 2),
        (MixedPrecisionPolicy(torch.bfloat16, torch.float32), 4),
    ],
    ids=["float32", "bf16", "bf16 reduced in float32"],
)
def test_only_trained_parameters_are_reduced_and_frozen_ones_never_move(policy, itemsize):
    for reduced in run_ranks(cost_of_frozen, 2, policy, kind="gloo"):
        assert reduced == [THIN_NUMEL * itemsize] * 3


def full_gradients_of_frozen():
    """Backward makes no full gradient for a frozen parameter: its unsharded form asks for none."""
    model = shard_layers(seeded(Model()))
    asked = []

    def look(module, args):
        asked.extend((name, param.requires_grad) for name, param in module.named_parameters())

    for layer in model.layers:
        layer.register_forward_pre_hook(look)
    model(data(0, dist.get_rank(), 2, WIDTH)).sum().backward()
    return asked


def test_a_frozen_parameter_asks_autograd_for_no_gradient():
    for asked in run_ranks(full_gradients_of_frozen, 2, kind="gloo"):
        assert asked == [("base.weight", False), ("down.weight", True), ("up.weight", True)] * 3


def frozen_unit():
    model = seeded(Layers())
    model.layers[1].requires_grad_(False)
    shard_layers(model)
    loss = model(data(0, dist.get_rank(), 2, 6)).sum()
    with CommDebugMode() as backward:
        loss.backward()
    assert all(param.grad is None for param in model.layers[1].parameters())
    return counted(backward)


def test_a_unit_that_is_frozen_through_and_through_is_gathered_but_not_reduced():
    for counts in run_ranks(frozen_unit, 2, kind="gloo"):
        assert counts == {GATHER: 3, REDUCE: 3}


# --- what is trained changes between steps --------------------------------------------------------------------------

SCHEDULES = {
    "one parameter": [{"layers.1.in_proj.weight"}, set(), {"layers.1.in_proj.bias"}, set()],
    "a unit, then another": [{"layers.0"}, {"layers.2"}, {"layers.0", "layers.2"}, set()],
    "all but the last": [{"first", "layers"}, set(), {"first", "layers"}],
    "the root": [set(), {"first", "last"}, {"first"}, {"last"}, set()],
    "all but one bias": [{"first", "layers", "last.weight"}, set()],
}


def flipped(schedule, reshard, tolerance):
    """Which parameters are frozen changes from step to step; the plain model's change along."""

    def loss_of(model, step, rank):
        for name, param in model.named_parameters():
            frozen = schedule[step % len(schedule)]
            param.requires_grad_(not any(name == f or name.startswith(f"{f}.") for f in frozen))
        return model(data(step, rank, 2, 6)).square().sum()

    def shard(model):
        shard_layers(model, reshard_after_forward=reshard)

    match_plain(Layers, shard, loss_of, steps=2 * len(schedule), tolerance=tolerance)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("reshard", [True, False])
def test_parameters_may_be_frozen_and_thawed_between_steps(name, reshard):
    run_ranks(flipped, 2, SCHEDULES[name], reshard, 0.0, kind="gloo")


@pytest.mark.parametrize("name", SCHEDULES)
def test_parameters_may_be_frozen_and_thawed_with_four_ranks_and_with_threads(name):
    run_ranks(flipped, 4, SCHEDULES[name], True, 0.0, kind="gloo")
    run_ranks(flipped, 2, SCHEDULES[name], True, 0.0)


def all_frozen_for_a_step():
    """A frozen model still passes gradients on to its inputs, and is trained again afterwards."""
    model, plain = shard_layers(seeded(Layers())), seeded(Layers())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optims = [sgd(model.parameters()), sgd(plain.parameters())]
    for step, trains in enumerate((True, False, False, True)):
        inputs = [data(step, r, 2, 6).requires_grad_() for r in range(world_size)]
        for module in (model, plain):
            module.requires_grad_(trains)
        with CommDebugMode() as mode:
            x = inputs[rank].detach().clone().requires_grad_()
            model(x).square().sum().backward()
        assert counted(mode) == {GATHER: 7, **({REDUCE: 4} if trains else {})}
        (want,) = torch.autograd.grad(plain(inputs[rank]).square().sum(), inputs[rank])
        same(x.grad, want, f"step {step}: gradient of the input")
        if trains:
            average_gradients(plain, lambda r: plain(inputs[r]).square().sum(), world_size)  # noqa: B023
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert (param.grad is None) == (expected.grad is None)
        for optim in optims:
            optim.step()
            optim.zero_grad()
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            same_shard(param.detach(), expected.detach(), f"step {step}: {name}")


def test_a_model_may_be_frozen_as_a_whole_for_some_steps():
    run_ranks(all_frozen_for_a_step, 2, kind="gloo")


def flips_of_parameters_that_are_shown_whole():
    """After unshard, users see unsharded parameters: what they freeze or thaw there must hold for the shards."""
    model, plain = shard_layers(seeded(Layers())), seeded(Layers())
    shards = list(model.layers[0].parameters())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step, trains in enumerate((True, False, True)):
        model.layers[0].unshard()
        for module in (model, plain):
            module.layers[0].requires_grad_(trains)
        if step == 1:
            model.layers[0].reshard()
            assert [shard.requires_grad for shard in shards] == [False] * 4
        for param in (*model.parameters(), *plain.parameters(), *shards):
            param.grad = None
        model(data(step, rank, 2, 6)).sum().backward()
        average_gradients(plain, lambda r: plain(data(step, r, 2, 6)).sum(), world_size)  # noqa: B023
        assert [shard.requires_grad for shard in shards] == [trains] * 4
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (param.grad is None) == (expected.grad is None), f"step {step}: {name}"
            if expected.grad is not None:
                same_shard(param.grad, expected.grad, f"step {step}: {name}")


def test_parameters_may_be_frozen_and_thawed_while_they_are_unsharded():
    run_ranks(flips_of_parameters_that_are_shown_whole, 2, kind="gloo")


def embedding_frozen_for_a_while():
    def shard(model):
        shard_layers(model)

    def loss_of(model, step, rank):
        model.embed.weight.requires_grad_(step % 3 == 0)
        return torch.nn.functional.cross_entropy(
            model(tokens(step, rank)).flatten(0, 1), tokens(step, rank).flatten()
        )

    match_plain(Adapters, shard, loss_of, steps=6)


def test_the_first_parameters_may_be_thawed_so_that_later_units_inputs_need_grad():
    run_ranks(embedding_frozen_for_a_while, 2, kind="gloo")


def frozen_between_micro_batches():
    """Gradients that were put by stay, though their parameter is frozen before they are reduced."""
    model, plain = shard_layers(seeded(Layers())), seeded(Layers())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model.set_requires_gradient_sync(False)
    model(data(0, rank, 2, 6)).sum().backward()
    average_gradients(plain, lambda r: plain(data(0, r, 2, 6)).sum(), world_size)
    model.set_requires_gradient_sync(True)
    for module in (model, plain):
        module.layers[1].in_proj.weight.requires_grad_(False)
    model(data(1, rank, 2, 6)).sum().backward()
    average_gradients(plain, lambda r: plain(data(1, r, 2, 6)).sum(), world_size)
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        if param.requires_grad:
            # To the last digits: micro-batches are added up before ranks here, after them in the plain model.
            same_shard(param.grad, expected.grad, name, 1e-6)
    return model.layers[1].in_proj.weight.grad is None


def test_freezing_between_micro_batches_leaves_the_others_gradients_right():
    run_ranks(frozen_between_micro_batches, 2, kind="gloo")


# --- several dtypes in one unit -------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Weights of three dtypes, a frozen integer and a frozen float16 one."""

    def __init__(self):
        super().__init__()
        self.single = nn.Linear(5, 7)
        self.brain = nn.Linear(7, 3, dtype=torch.bfloat16)
        self.wide = nn.Linear(3, 5, dtype=torch.float64)
        self.order = nn.Parameter(torch.zeros(5, dtype=torch.long), requires_grad=False)
        self.shift = nn.Parameter(torch.zeros(7, dtype=torch.float16), requires_grad=False)

    def forward(self, x):
        x = torch.tanh(self.single(x) + self.shift)
        x = torch.tanh(self.brain(x.bfloat16()))
        return self.wide(x.double())[..., self.order.remainder(5)]


def mixed(wrapped):
    def build():
        return Mixed() if not wrapped else nn.Sequential(Mixed(), nn.Linear(5, 5, dtype=torch.float64))

    def shard(model):
        if wrapped:
            fully_shard(model[0])
        fully_shard(model)

    def loss_of(model, step, rank):
        return model(data(step, rank, 3, 5)).square().sum()

    model = match_plain(build, shard, loss_of, steps=5)
    inner = model[0] if wrapped else model
    assert inner.order.dtype == torch.long
    assert inner.shift.dtype == torch.float16
    assert inner.brain.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["gloo", "threads"])
def test_parameters_of_several_dtypes_train_in_one_unit(kind):
    run_cases(mixed, 2, cases_of(wrapped=[True, False]), kind=kind)


def mixed_under_a_policy():
    model = fully_shard(seeded(Mixed()), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    seen = {}
    model.register_forward_pre_hook(
        lambda m, args: seen.update({n: p.dtype for n, p in m.named_parameters()})
    )
    with pytest.raises(RuntimeError, match="dtype"):
        model(data(0, 0, 3, 5))  # this model casts to bfloat16 by hand
    return seen


def test_a_param_dtype_holds_for_all_floating_parameters_and_no_integers():
    for seen in run_ranks(mixed_under_a_policy, 2, kind="gloo"):
        assert {name for name, dtype in seen.items() if dtype != torch.float32} == {"order"}
        assert seen["order"] == torch.long


def accumulated_dtypes():
    """Micro-batches without sync add up in each parameter's own dtype."""
    model, plain = fully_shard(seeded(Mixed())), seeded(Mixed())
    rank = dist.get_rank()
    held = [{} for _ in range(2)]
    for micro_batch in range(3):
        model.set_requires_gradient_sync(micro_batch == 2)
        model(data(micro_batch, rank, 3, 5)).square().sum().backward()
        for r in range(2):
            plain.zero_grad()
            plain(data(micro_batch, r, 3, 5)).square().sum().backward()
            for name, param in plain.named_parameters():
                if param.grad is not None:
                    held[r][name] = held[r][name] + param.grad if name in held[r] else param.grad
    for name, param in model.named_parameters():
        if param.requires_grad:
            same_shard(param.grad, (held[0][name] + held[1][name]) / 2, name)


def test_micro_batches_of_several_dtypes_add_up():
    run_ranks(accumulated_dtypes, 2, kind="gloo")
