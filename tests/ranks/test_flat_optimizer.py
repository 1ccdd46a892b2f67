"""`shardwise.optim.flat`: a unit's shards stepped as one tensor, with the results and the state dict of torch's own."""

from __future__ import annotations

import copy
import re
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwise import (
    ConfigError,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    StateError,
    clip_grad_norm_,
    fully_shard,
)
from shardwise.optim import elementwise, flat
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import data, full, same
from tests.rounding import stepped

pytestmark = pytest.mark.arithmetic

WIDTH = 5
BRAIN, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64

OPTIMIZERS = {
    "SGD": (optim.SGD, {"lr": 0.05}),
    "SGD momentum": (optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adam": (optim.Adam, {"lr": 0.02, "weight_decay": 0.01, "maximize": True}),
    "Adam amsgrad": (optim.Adam, {"lr": 0.02, "amsgrad": True, "foreach": True}),
    "AdamW": (optim.AdamW, {"lr": 0.02, "weight_decay": 0.05}),
    "AdamW one by one": (optim.AdamW, {"lr": torch.tensor(0.02), "foreach": False}),
    "Adamax": (optim.Adamax, {"lr": 0.02}),
    "NAdam": (optim.NAdam, {"lr": 0.02}),
    "RAdam": (optim.RAdam, {"lr": 0.02}),
    "RMSprop": (optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Adagrad": (optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    "Adadelta": (optim.Adadelta, {"lr": 0.5}),
    "ASGD": (optim.ASGD, {"lr": 0.05}),
    "without eps": (optim.Adam, {"lr": 0.02, "eps": 0.0}),
}


# Of these torch steps some for plain tensors alone.
OTHERS = {
    "fused SGD": (optim.SGD, {"lr": 0.05, "momentum": 0.9, "fused": True}),
    "fused Adam": (optim.Adam, {"lr": 0.02, "amsgrad": True, "fused": True}),
    "fused AdamW": (optim.AdamW, {"lr": 0.02, "fused": True}),
    "fused Adagrad": (optim.Adagrad, {"lr": 0.05, "fused": True}),
    "Rprop": (optim.Rprop, {"lr": 0.01}),
}


class Layer(nn.Module):
    """Sizes that do not divide by the world, rows that some ranks have none of, a frozen parameter in the middle."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.frozen = nn.Parameter(torch.full((7, 3), 0.5), requires_grad=False)
        self.few_rows = nn.Parameter(torch.full((1, 7), 0.5))
        self.sometimes = nn.Parameter(torch.full((2, 7), 0.5))
        self.down = nn.Linear(7, WIDTH)

    def forward(self, x, uses):
        x = torch.tanh(self.up(x)) * self.few_rows + self.frozen.sum()
        return self.down(x * self.sometimes.sum(0) if uses else x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1))
        self.plain = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x, uses=True):
        for layer in self.layers:
            x = layer(x, uses)
        return x * self.scale + self.plain


def sharded(build=Model, seed=0, **kwargs):
    model = seeded(build(), seed)
    ignored = {model.plain} if hasattr(model, "plain") else set()
    for layer in model.layers:
        fully_shard(layer, **kwargs)
    return fully_shard(model, ignored_params=ignored, **kwargs)


def groups_of(model):
    """Vectors apart from matrices, as for weight decay; what is not sharded by itself, as torch needs it."""
    sharded = [param for param in model.parameters() if param is not model.plain]
    return [
        {"params": [param for param in sharded if param.dim() > 1]},
        {"params": [param for param in sharded if param.dim() == 1], "lr": 0.01, "weight_decay": 0.0},
        {"params": [model.plain]},
    ]


def backward(model, step, uses=True):
    loss = model(data(step, dist.get_rank(), 3, WIDTH), uses).square().mean()
    loss.backward()
    if hasattr(model, "plain"):
        dist.all_reduce(model.plain.grad)
    return loss.detach()


def local(value):
    return value._local_tensor if isinstance(value, DTensor) else value


def same_as(optimizer, other, params, other_params, what, is_filled=False):
    """Parameters and all of their state, bit by bit, as the same kinds of tensors.

    With `is_filled`, torch has made up a state for parameters that had none.
    """
    for index, (param, expected) in enumerate(zip(params, other_params, strict=True)):
        same(local(param.detach()), local(expected.detach()), f"{what}: parameter {index}")
        state, wanted = optimizer.state.get(param, {}), other.state.get(expected, {})
        if not wanted and param.grad is None and is_filled:
            continue
        assert state.keys() == wanted.keys(), f"{what}: state of {index} is {list(state)}, not {list(wanted)}"
        for key, value in wanted.items():
            got = state[key]
            assert type(got) is type(value), f"{what}: {key} of {index} is a {type(got)}"
            if isinstance(value, DTensor):
                assert (got.placements, got.shape) == (value.placements, value.shape)
            if isinstance(value, torch.Tensor):
                same(local(got), local(value), f"{what}: {key} of {index}")
            else:
                assert got == value


def in_step(name, make, options, steps=4, **kwargs):
    """A model stepped flat beside one stepped parameter by parameter."""
    one, other = sharded(**kwargs), sharded(**kwargs)
    ours, torchs = flat(groups_of(one), make, **options), make(groups_of(other), **options)
    for step in range(steps):
        for model in (one, other):
            backward(model, step, uses=step % 3 != 1)
        for model, optimizer in ((one, ours), (other, torchs)):
            optimizer.step()
            # torch's own cannot fill gradients of both kinds, sharded and not, with zeros.
            cleaner = optimizer if optimizer is ours else model
            cleaner.zero_grad(set_to_none=step % 2 == 0)
        same_as(ours, torchs, one.parameters(), other.parameters(), f"{name}, step {step}")
    return one


def every_optimizer():
    for name, (make, options) in OPTIMIZERS.items():
        model = in_step(name, make, options)
        for layer in model.layers:
            assert layer._shardwise_units[0].buffers.shards.view(SINGLE).isfinite().all(), f"{name}: padding"
    return 0 in [local(param).numel() for param in model.parameters()]


def test_every_elementwise_optimizer_steps_as_torch_steps_each_parameter_bit_by_bit():
    assert any(run_ranks(every_optimizer, 3)), "every rank had a row of every parameter"


def beside_the_formula():
    """Each step is taken by copies of the shards, too, and computed with a bound for its roundings."""
    for name, (make, options) in OTHERS.items():
        model = sharded()
        optimizer = flat(model, make, **options)
        params = list(model.parameters())
        for step in range(4):
            backward(model, step, uses=step % 3 != 1)
            copies = [local(param.detach()).clone().requires_grad_() for param in params]
            apart = make(copies, **options)
            for param, copied in zip(params, copies, strict=True):
                copied.grad = None if param.grad is None else local(param.grad).clone()
                if optimizer.state.get(param):
                    state = optimizer.state[param]
                    apart.state[copied] = {key: local(value).clone() for key, value in state.items()}
            fused = "fused" in options
            expected = [step_of(make, apart, copied) if fused else None for copied in copies]
            optimizer.step()
            apart.step()
            optimizer.zero_grad()
            for index, (param, copied) in enumerate(zip(params, copies, strict=True)):
                what = f"{name}, step {step}: parameter {index}"
                assert optimizer.state.get(param, {}).keys() == apart.state.get(copied, {}).keys(), what
                if not fused:
                    same(local(param.detach()), copied.detach(), what)
                    continue
                for kind, it, tensor in (("flat", optimizer, param), ("torch", apart, copied)):
                    holds(expected[index], it.state.get(tensor, {}), tensor, f"{what}, {kind}")


def step_of(make, optimizer, param):
    """What a step will make of a parameter, up to rounding; None where it has no gradient."""
    if param.grad is None:
        return None
    state = optimizer.state.get(param, {})
    count = int(state.get("step", 0)) + 1
    return stepped(make, param, param.grad, state, count, optimizer.defaults)


def holds(expected, state, param, what):
    if expected is None:
        return
    value, made = expected
    assert value.holds(local(param.detach())), what
    for key, wanted in made.items():
        assert wanted.holds(local(state[key])), f"{what}: {key}"


def test_fused_kernels_step_within_the_roundings_of_their_formula():
    run_ranks(beside_the_formula, 3)


def other_units():
    for name, options in {
        "bf16 compute": {"mp_policy": MixedPrecisionPolicy(BRAIN, SINGLE)},
        "bf16 reduce": {"mp_policy": MixedPrecisionPolicy(SINGLE, BRAIN)},
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "other dim": {"shard_placement_fn": lambda param: Shard(param.dim() - 1)},
    }.items():
        in_step(name, optim.AdamW, {"lr": 0.02}, **options)


def several_dtypes():
    def build():
        model = nn.ModuleDict({"layers": nn.ModuleList()})
        model.first, model.second = nn.Linear(4, 6), nn.Linear(6, 4, dtype=DOUBLE)
        model.third = nn.Linear(4, 4)
        model.forward = lambda x, uses: model.third(model.second(model.first(x[:, :4]).double()).float())
        return model

    one, other = sharded(build), sharded(build)
    ours, torchs = flat(one, optim.AdamW, lr=0.1), optim.AdamW(other.parameters(), lr=0.1)
    for step in range(3):
        for model, optimizer in ((one, ours), (other, torchs)):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        same_as(ours, torchs, one.parameters(), other.parameters(), f"several dtypes, step {step}")


def wrapped():
    for shows_originals, num_tensors in ((True, 2), (False, 2)):
        models = []
        for _ in range(2):
            model = seeded(Blocks(5, 7))
            for number, layer in enumerate(model.layers):
                model.layers[number] = FullyShardedDataParallel(layer, use_orig_params=shows_originals)
            models.append(FullyShardedDataParallel(model, use_orig_params=shows_originals))
        one, other = models
        ours, torchs = flat(one, optim.AdamW, lr=0.1), optim.AdamW(other.parameters(), lr=0.1)
        for step in range(4):
            for model, optimizer in ((one, ours), (other, torchs)):
                model(data(step, dist.get_rank(), 2, 5)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=step != 1)
            what = f"wrapped, originals {shows_originals}, step {step}"
            same_as(ours, torchs, one.parameters(), other.parameters(), what)
            if step == 2:
                saved = copy.deepcopy(torchs.state_dict())
                ours.load_state_dict(saved)
        assert sum(map(len, ours._runs)) == num_tensors, what


def units_of_other_kinds():
    wrapped()
    other_units()
    several_dtypes()


def test_units_of_any_precision_placement_or_dtype_are_stepped_the_same():
    run_ranks(units_of_other_kinds, 3)


class Blocks(nn.Module):
    def __init__(self, width=8, hidden=16):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width)) for _ in range(2)
        )

    def forward(self, x, uses=True):
        for layer in self.layers:
            x = layer(x)
        return x


def with_tensor_parallelism():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def build():
        model = seeded(Blocks())
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            fully_shard(layer, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])

    one, other = build(), build()
    ours, torchs = flat(one, optim.AdamW, lr=0.1), optim.AdamW(other.parameters(), lr=0.1)
    for step in range(3):
        for model, optimizer in ((one, ours), (other, torchs)):
            model(data(step, mesh.get_coordinate()[0], 2, 8)).square().mean().backward()
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        same_as(ours, torchs, one.parameters(), other.parameters(), f"tensor parallel, step {step}")
    assert any(len(param.placements) == 2 for param in one.parameters())


def test_parameters_that_are_tensor_parallel_too_are_stepped_the_same():
    run_ranks(with_tensor_parallelism, 4, kind="gloo")


# --- as one tensor ----------------------------------------------------------------------------------------------------


@elementwise
class Watched(optim.SGD):
    """Notes the sizes of what it steps, and in whose memory the gradients are."""

    seen: list[int]
    memory: set[int]

    def step(self, closure=None):
        stepped = [
            param for group in self.param_groups for param in group["params"] if param.grad is not None
        ]
        self.seen = [param.numel() for param in stepped]
        self.memory = {param.grad.untyped_storage()._cdata for param in stepped}
        return super().step(closure)


def without_a_copy(policy):
    model = sharded(partial(Blocks, 5, 7), mp_policy=policy)
    optimizer = flat(model, Watched, lr=0.1)
    model(data(0, 0, 2, 5)).square().mean().backward()
    expected = {param.grad._local_tensor.untyped_storage()._cdata for param in model.parameters()}
    optimizer.step()
    assert len(optimizer.seen) == len(model.layers)
    assert optimizer.memory == expected, "gradients were copied"


def as_one_tensor():
    for policy in ((None, None), (BRAIN, SINGLE), (SINGLE, BRAIN), (BRAIN, None), (None, DOUBLE)):
        without_a_copy(MixedPrecisionPolicy(*policy))
    model = seeded(Blocks())
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = flat(model, Watched, lr=0.1, momentum=0.9)
    assert isinstance(optimizer, Watched)
    storages = []
    for step in range(3):
        model(data(step, 0, 2, 8)).square().mean().backward()
        storages.append(model.layers[0][0].weight.grad._local_tensor.untyped_storage()._cdata)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        # 8, 16, 8*16 and 16*8 elements in a unit of 2 ranks, each where a multiple of 16 is.
        assert optimizer.seen == [140, 140], optimizer.seen
        optimizer.zero_grad()
    assert len(set(storages)) == 1, "a step kept the memory of gradients from being used again"
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert optimizer.seen == [140, 140], "gradients from elsewhere must not split what is stepped together"
    optimizer.zero_grad()
    # Where one parameter has no gradient, its neighbours are stepped without it; its own elements stay.
    model(data(5, 0, 2, 8)).square().mean().backward()
    stays = model.layers[0][0].weight
    before, stays.grad = stays.to_local().clone(), None
    optimizer.step()
    assert sorted(optimizer.seen) in ([12 + 64, 140], [12, 64, 140]), optimizer.seen
    assert torch.equal(stays.to_local(), before)


def test_a_unit_is_stepped_as_one_tensor_and_in_parts_where_gradients_are_missing():
    run_ranks(as_one_tensor, 2)


def in_blocks():
    """Runs of several blocks, whose last one is not whole."""
    build = partial(Blocks, 900, 701)
    one, other = sharded(build), sharded(build)
    ours = flat(one, optim.AdamW, lr=0.1, amsgrad=True)
    torchs = optim.AdamW(other.parameters(), lr=0.1, amsgrad=True)
    for step in range(3):
        for model, optimizer in ((one, ours), (other, torchs)):
            model(data(step, dist.get_rank(), 2, 900)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        same_as(ours, torchs, one.parameters(), other.parameters(), f"in blocks, step {step}")
    return ours._in_blocks is not None and len(ours._in_blocks._blocks)


def test_long_runs_are_stepped_in_blocks_bit_by_bit():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert run_ranks(in_blocks, 2) == [2, 2]
    finally:
        torch.set_num_threads(threads)


# --- around the step --------------------------------------------------------------------------------------------------


def with_scheduler_and_scaler():
    # Whole vectors on every rank, so that fused kernels, too, are the same bit by bit.
    build = partial(Blocks, 32, 32)
    one, other = sharded(build), sharded(build)
    ours = flat(one, optim.AdamW, lr=0.1, fused=True)
    torchs = optim.AdamW(other.parameters(), lr=0.1, fused=True)
    schedulers = [optim.lr_scheduler.CosineAnnealingLR(each, 4) for each in (ours, torchs)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    for step in range(4):
        for model, optimizer, scaler, scheduler in zip(
            (one, other), (ours, torchs), scalers, schedulers, strict=True
        ):
            loss = model(data(step, dist.get_rank(), 3, 32)).square().mean()
            if step == 2:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
        same_as(ours, torchs, one.parameters(), other.parameters(), f"scaled step {step}")
    assert ours.param_groups[0]["lr"] == torchs.param_groups[0]["lr"] < 0.1
    assert all(local(param).isfinite().all() for param in one.parameters())


def inside_backward():
    """One optimizer a parameter, stepped as soon as the gradient is there."""
    one, other = sharded(), sharded()
    torchs = optim.Adam(other.parameters(), lr=0.1)
    each = {param: flat([param], optim.Adam, lr=0.1) for param in one.parameters()}

    def step_now(param):
        each[param].step()
        each[param].zero_grad()

    for param in one.parameters():
        if param.requires_grad and param is not one.plain:
            param.register_post_accumulate_grad_hook(step_now)
    for step in range(3):
        same(backward(one, step), backward(other, step), f"step {step}: loss")
        step_now(one.plain)
        torchs.step()
        torchs.zero_grad()
    for (name, param), expected in zip(one.named_parameters(), other.parameters(), strict=True):
        same(local(param.detach()), local(expected.detach()), f"stepped in hooks: {name}")


def hooks_and_closures():
    model = sharded()
    optimizer = flat(model, optim.SGD, lr=0.1)
    calls = []
    optimizer.register_step_pre_hook(lambda *args: calls.append("before"))
    optimizer.register_step_post_hook(lambda own, *args: calls.append(len(own.param_groups[0]["params"])))
    optim.SGD([torch.zeros(1)], lr=0.1)  # torch now puts hooks around every SGD's step

    def closure():
        calls.append("closure")
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        return backward(model, 0) if hasattr(model, "plain") else of_blocks(model)

    def of_blocks(model):
        loss = model(data(0, 0, 2, 8)).square().mean()
        loss.backward()
        return loss.detach()

    loss = optimizer.step(closure)
    assert calls == ["before", "closure", len(list(model.parameters()))]
    assert optimizer.step(closure) < loss
    # Weights kept unsharded are noticed to be out of date.
    model = sharded(Blocks)
    optimizer = flat(model, optim.SGD, lr=0.1)
    model.set_reshard_after_backward(False)
    losses = [optimizer.step(closure).item() for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 4
    # From a model that shows its full parameters, the sharded ones are taken.
    model.layers[0].unshard()
    assert not any(isinstance(param, DTensor) for param in model.layers[0].parameters())
    again = flat(model, optim.SGD, lr=0.1)
    taken = [param for group in again.param_groups for param in group["params"]]
    assert taken == [param for group in optimizer.param_groups for param in group["params"]]


def around_the_step():
    with_scheduler_and_scaler()
    inside_backward()
    hooks_and_closures()


def test_schedulers_scalers_hooks_and_closures_work_as_with_any_optimizer():
    run_ranks(around_the_step, 2)


# --- in backward ------------------------------------------------------------------------------------------------------


def stepped_in_backward():
    for name, (make, options) in {
        "AdamW": (optim.AdamW, {"lr": 0.02}),
        "SGD": (optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    }.items():
        one, other = sharded(), sharded()
        ours, torchs = (
            flat(groups_of(one), make, in_backward=True, **options),
            make(groups_of(other), **options),
        )
        schedulers = [optim.lr_scheduler.StepLR(each, 2) for each in (ours, torchs)]
        num_early = 0
        for step in range(5):
            for model, optimizer, scheduler in zip((one, other), (ours, torchs), schedulers, strict=True):
                # Two micro-batches in every other step, the first of which is not to be stepped.
                if step % 2:
                    model.set_is_last_backward(False)
                    backward(model, 10 + step, uses=True)
                    model.set_is_last_backward(True)
                backward(model, step, uses=step % 3 != 1)
                if optimizer is ours:
                    num_early += len(ours._backward_steps.stepped)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            same_as(ours, torchs, one.parameters(), other.parameters(), f"{name} in backward, step {step}")
        assert num_early > 5, "nothing was stepped in backward"


def stepped_in_backward_and_again():
    model = sharded(Blocks)
    params = list(model.parameters())
    optimizer = flat(model, optim.SGD, lr=0.1, in_backward=True)

    def once():
        loss = model(data(0, dist.get_rank(), 2, 8)).square().mean()
        loss.backward()
        return loss.item()

    once()
    optimizer.step()
    optimizer.zero_grad()
    once()
    with pytest.raises(StateError, match="got more gradients") as caught:
        once()
    assert "set_is_last_backward" in caught.value.fix
    # As after any step that broke off: gradients are dropped, and the next step is a step again.
    optimizer.zero_grad()
    step = optimizer._backward_steps._take_step
    optimizer._backward_steps._take_step = lambda arrived: (time.sleep(0.05), step(arrived))
    model.set_reshard_after_backward(False)
    losses = []
    for _ in range(3):
        before = [param.to_local().clone() for param in params]
        losses.append(once())
        optimizer.step()  # waits
        for param, was in zip(params, before, strict=True):
            assert not torch.equal(param.to_local(), was)
        optimizer.zero_grad()
    assert len(set(losses)) == 3, f"weights that were kept are out of date: {losses}"

    def broken(*args):
        raise OSError("no such kernel")

    optimizer._backward_steps._take_step = broken
    optimizer.zero_grad()
    once()
    with pytest.raises(OSError, match="no such kernel"):
        optimizer.step()


def early_steps():
    stepped_in_backward()
    stepped_in_backward_and_again()


def test_units_stepped_while_backward_runs_are_stepped_the_same():
    run_ranks(early_steps, 2)


# --- replaced parameters ----------------------------------------------------------------------------------------------


def replaced(how):
    one, other = sharded(), sharded()
    ours, torchs = flat(one, optim.AdamW, lr=0.05), optim.AdamW(other.parameters(), lr=0.05)

    def train(steps):
        for step in steps:
            for model, optimizer in ((one, ours), (other, torchs)):
                backward(model, step, uses=step != 0)
                optimizer.step()
                optimizer.zero_grad()
        same_as(ours, torchs, one.parameters(), other.parameters(), f"{how}, after step {step}")

    train(range(2))
    if how == "assign":
        values = copy.deepcopy(one.state_dict())
        del values["plain"]  # a parameter that is not sharded cannot be followed
        one.load_state_dict(values, assign=True, strict=False)
    else:
        values = {name: value.clone() for name, value in one.state_dict().items()}
        one.to_empty(device="cpu")
        one.load_state_dict(values)
    train(range(2, 5))


def from_meta():
    with torch.device("meta"):
        model = Blocks()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    values = seeded(Blocks()).state_dict()
    model.load_state_dict(values)
    optimizer = flat(model.parameters(), Watched, lr=0.1)
    model(data(0, 0, 2, 8)).square().mean().backward()
    optimizer.step()
    assert optimizer.seen == [140, 140], optimizer.seen


def survives():
    for how in ("assign", "to_empty"):
        replaced(how)
    from_meta()


def test_it_goes_on_with_parameters_that_were_replaced():
    run_ranks(survives, 2)


# --- state dicts ------------------------------------------------------------------------------------------------------


def handed_over(how):
    """A run that changes from one kind to the other and back ends where one of torch's alone ends."""
    torchs, ours = (
        partial(make, lr=0.05, amsgrad=True) for make in (optim.AdamW, partial(_flat, optim.AdamW))
    )
    reference = sharded()
    alone = torchs(groups_of(reference))
    models = [sharded(), sharded(seed=1), sharded(seed=2)]
    optimizers = [make(groups_of(model)) for make, model in zip((ours, torchs, ours), models, strict=True)]
    for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        if number:
            hand_over(how, models[number - 1], optimizers[number - 1], model, optimizer)
        for step in range(2 * number, 2 * number + 2):
            for each, its in ((reference, alone), (model, optimizer)):
                backward(each, step, uses=step != 1)
                its.step()
                its.zero_grad()
        same_as(
            optimizer,
            alone,
            model.parameters(),
            reference.parameters(),
            f"{how}, turn {number}",
            how == "full",
        )


def _flat(make, params, **options):
    return flat(params, make, **options)


def hand_over(how, model, optimizer, to_model, to_optimizer):
    if how == "state_dict":
        to_model.load_state_dict(model.state_dict())
        to_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return
    # Not strict: a parameter that never had a gradient has no state.
    options = StateDictOptions(full_state_dict=how == "full", strict=False)
    states = get_state_dict(model, optimizer, options=options)
    set_state_dict(
        to_model, to_optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=options
    )


def state_of_a_fresh_one():
    """Asking for the state before the first step, as for a first checkpoint, must change nothing."""
    one, other = sharded(), sharded()
    ours, torchs = flat(one, optim.AdamW, lr=0.05), optim.AdamW(other.parameters(), lr=0.05)
    for model, optimizer in ((one, ours), (other, torchs)):
        get_optimizer_state_dict(model, optimizer)
        backward(model, 0)
        optimizer.step()
    same_as(ours, torchs, one.parameters(), other.parameters(), "after a look at the state")


def whole_state():
    """State of the unsharded model is cut to shards."""
    plain, model = seeded(Blocks()), seeded(Blocks())
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    unsharded = optim.AdamW(plain.parameters(), lr=0.05)
    for step in range(2):
        plain(data(step, 0, 2, 8)).square().mean().backward()
        unsharded.step()
        unsharded.zero_grad()
    model.load_state_dict(plain.state_dict())
    ours = flat(model, optim.AdamW, lr=0.05)
    ours.load_state_dict(copy.deepcopy(unsharded.state_dict()))
    for each, optimizer in ((plain, unsharded), (model, ours)):
        each(data(2, 0, 2, 8)).square().mean().backward()
        optimizer.step()
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        # The average over three ranks rounds.
        same(full(param.detach()), expected.detach(), name, 1e-6)
        same(full(ours.state[param]["exp_avg"]), unsharded.state[expected]["exp_avg"], name, 1e-6)


def state_dicts(folder):
    for how in ("state_dict", "sharded", "full"):
        handed_over(how)
    state_of_a_fresh_one()
    whole_state()
    model = sharded()
    model.unused.requires_grad_(False)  # torch's checkpoints want a state of everything that is trained
    optimizer = flat(groups_of(model), optim.AdamW, lr=0.05)
    for step in range(2):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    # What each rank saves is its own shards, and no more.
    torch.save(optimizer.state_dict(), f"{folder}/rank{dist.get_rank()}.pt")
    back = torch.load(f"{folder}/rank{dist.get_rank()}.pt", weights_only=False)
    state = optimizer.state_dict()["state"]
    for index, values in back["state"].items():
        for key, value in values.items():
            same(local(value), local(state[index][key]), f"saved {key}")
            if isinstance(value, DTensor):
                assert local(value).untyped_storage().nbytes() == local(value).nbytes
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optim": states[1]}, checkpoint_id=f"{folder}/dcp")
    return everything(model, optimizer)


def everything(model, optimizer):
    values = {name: full(param.detach()).clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            values[f"{name}: {key}"] = full(value).clone()
    return values


def loaded_elsewhere(folder, values):
    model = sharded(seed=5)
    model.unused.requires_grad_(False)
    optimizer = flat(groups_of(model), optim.AdamW, lr=0.9)
    states = get_state_dict(model, optimizer)
    target = {"model": states[0], "optim": states[1]}
    dcp.load(target, checkpoint_id=f"{folder}/dcp")
    set_state_dict(model, optimizer, model_state_dict=target["model"], optim_state_dict=target["optim"])
    got = everything(model, optimizer)
    for name, value in values.items():
        same(got[name], value, name)
    assert optimizer.param_groups[0]["lr"] == 0.05
    backward(model, 2)
    optimizer.step()
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
    return everything(model, optimizer)


def test_state_dicts_are_per_parameter_and_load_into_either_kind_on_any_number_of_ranks(tmp_path):
    values = run_ranks(state_dicts, 3, str(tmp_path), kind="gloo")[0]
    run_ranks(loaded_elsewhere, 2, str(tmp_path), values, kind="gloo")


# --- what it does not take --------------------------------------------------------------------------------------------


def test_optimizers_that_mix_elements_are_refused_with_the_reason():
    params = [nn.Parameter(torch.ones(2, 2))]
    reasons = {
        optim.LBFGS: "all parameters together",
        optim.Muon: "orthogonal",
        optim.SparseAdam: "sparse",
        optim.Adafactor: "rows and columns",
    }
    for refused, reason in reasons.items():
        with pytest.raises(ConfigError, match=reason) as caught:
            flat(params, refused)
        assert caught.value.fix

    class Unknown(optim.SGD):
        pass

    with pytest.raises(ConfigError, match=re.escape("Unknown is not known")):
        flat(params, Unknown, lr=0.1)
    assert isinstance(flat(params, elementwise(Unknown), lr=0.1), Unknown)
    with pytest.raises(TypeError, match="not a subclass of"):
        flat(params, optim.SGD(params, lr=0.1))
    with pytest.raises(ValueError, match="learning rate"):
        flat(params, optim.AdamW, lr=-1.0)


def others_beside():
    """DTensors that shardwise did not shard are stepped one by one, in the same group."""
    mesh = init_device_mesh("cpu", (2,))
    one, other = sharded(), sharded()

    def foreign():
        value = torch.arange(10.0).reshape(5, 2)
        param = nn.Parameter(distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None))
        param.grad = distribute_tensor(value + 1, mesh, [Shard(1)], src_data_rank=None)
        return param

    params, expected = foreign(), foreign()
    ours = flat([*one.parameters(), params], optim.AdamW, lr=0.1)
    # torch itself cannot step tensors of both kinds in one call.
    torchs = optim.AdamW([*other.parameters(), expected], lr=0.1, foreach=False)
    for step in range(2):
        for model, optimizer in ((one, ours), (other, torchs)):
            backward(model, step)
            optimizer.step()
            model.zero_grad()
    same_as(ours, torchs, [*one.parameters(), params], [*other.parameters(), expected], "foreign")


def test_tensors_that_are_in_no_unit_are_stepped_beside():
    run_ranks(others_beside, 2)


class BesideAnEmptyOne(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.empty = nn.ParameterList([torch.empty(0, 4)])

    def forward(self, x):
        return self.conv(x.unsqueeze(1)).squeeze(1) + self.empty[0].sum(0)


def frozen_beside_an_empty_parameter():
    model = fully_shard(BesideAnEmptyOne())
    optimizer = flat(model.parameters(), torch.optim.AdamW, lr=0.5, weight_decay=0.5)
    model.conv.bias.requires_grad_(False)
    before = model.conv.bias.full_tensor().clone()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return torch.equal(model.conv.bias.full_tensor(), before)


def test_a_frozen_parameter_is_left_alone_where_an_empty_one_starts_at_the_same_place():
    assert run_ranks(frozen_beside_an_empty_parameter, 1) == [True]
