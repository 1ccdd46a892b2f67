"""Wrapped models in the company of other features: checkpointing, compiling, errors, odd parameters, plain parents."""

from __future__ import annotations

import gc
import itertools
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from shardwise import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    ZeroRedundancyOptimizer,
    fully_shard,
)
from shardwise.errors import CheckpointError
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import Layers, TwoLayers, average_gradients, data, same
from tests.ranks.test_compile import one_compilation
from tests.ranks.wrapped import ONE_AXIS, whole_gradients, wrap, wrapped

FSDP = FullyShardedDataParallel


def gradients_match(run, plain, step=0):
    run(data(step, dist.get_rank(), 2, 6)).square().sum().backward()
    average_gradients(plain, lambda rank: plain(data(step, rank, 2, 6)).square().sum(), dist.get_world_size())
    # Compiling puts a module of its own around what is compiled.
    got = whole_gradients(getattr(run, "_orig_mod", run))
    got = {name.replace("_orig_mod.", ""): gradient for name, gradient in got.items()}
    for name, param in plain.named_parameters():
        same(got[name], param.grad, name, 1e-6)


# --- activation checkpointing and torch.compile ---------------------------------------------------------------------


class Recomputed(TwoLayers):
    reentrant = False

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Around(nn.Module):
    """Recomputes a whole wrapper, not the module inside it."""

    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def recomputes():
    for reentrant in (False, True):
        for orig, strategy in ((False, ONE_AXIS[0]), (True, ONE_AXIS[1])):
            options = {"use_orig_params": orig, "sharding_strategy": strategy}
            model = seeded(Layers())
            for index in range(3):
                model.layers[index].__class__ = Recomputed
                model.layers[index].reentrant = reentrant
            gradients_match(wrap(model, model.layers, **options), seeded(Layers()))
            model, plain = seeded(Layers()), seeded(Layers())
            for index in range(3):
                model.layers[index] = Around(FSDP(model.layers[index], **options), reentrant)
                plain.layers[index] = Around(plain.layers[index], reentrant=False)
            gradients_match(FSDP(model, **options), plain)


def test_recomputed_activations_give_the_same_gradients():
    run_ranks(recomputes, 2)


class Buffered(TwoLayers):
    def __init__(self, width=6):
        super().__init__(width)
        self.register_buffer("shift", torch.full((width,), 0.125))

    def forward(self, x):
        return super().forward(x) + self.shift.to(x.dtype)


def wrapped_for_recomputing():
    """torch's own wrappers for it, inside ours and around them: names of states are as if neither were there."""
    for orig, outside in itertools.product((False, True), (False, True)):
        plain, inner = (nn.Sequential(*(seeded(Buffered()) for _ in range(2))) for _ in range(2))
        options = {"use_orig_params": orig, "mixed_precision": MixedPrecision(buffer_dtype=torch.bfloat16)}
        model = wrap(inner, inner, **options)
        if outside:
            for index in range(2):
                inner[index] = checkpoint_wrapper(inner[index])
        else:
            apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Buffered))
        names, values = [name for name, _ in plain.named_parameters()], plain.state_dict()
        with FSDP.summon_full_params(model):
            assert [name for name, _ in model.named_parameters()] == names
        optim = torch.optim.Adam(model.parameters(), lr=0.0)
        gradients_match(model, plain)
        optim.step()
        states = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
        assert list(states["state"]) == names
        optim.load_state_dict(FSDP.optim_state_dict_to_load(model, optim, states))
        for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
            with FSDP.state_dict_type(model, kind):
                state = model.state_dict()
                assert list(state) == list(values)
                assert state["0.shift"].dtype == torch.float32
                with torch.no_grad():
                    for param in model.parameters():
                        param.add_(1.0)
                model.load_state_dict(state)
            for name, value in model.state_dict().items():
                same(value, values[name], name)
        with pytest.raises(CheckpointError, match=r"size mismatch for 1\.in_proj\.weight"):
            model.load_state_dict({**values, "1.in_proj.weight": torch.zeros(3, 3)})


def test_states_do_not_see_torchs_wrappers_for_activation_checkpointing():
    run_ranks(wrapped_for_recomputing, 2)


def compiles():
    """Compiled around wrappers, inside them, and wrapped when compiled already."""
    full_shard, shard_grad_op, no_shard = ONE_AXIS
    backend = {"backend": "eager"}
    for place, strategy, orig in [
        ("around", full_shard, False),
        ("around", shard_grad_op, True),
        ("around", no_shard, True),
        ("inside", full_shard, False),
        ("inside", full_shard, True),
        ("before", shard_grad_op, False),
        ("before", full_shard, True),
    ]:
        model, plain = seeded(Layers()), seeded(Layers())
        options = {"sharding_strategy": strategy, "use_orig_params": orig}
        if place == "before":
            for index in range(3):
                model.layers[index] = FSDP(torch.compile(model.layers[index], **backend), **options)
            model = FSDP(model, **options)
        else:
            model = wrap(model, model.layers, **options)
        with one_compilation():
            if place == "inside":
                for layer in model.layers:
                    layer.module.compile(**backend)
            run = torch.compile(model, **backend) if place == "around" else model
            for step in range(3):
                gradients_match(run, plain, step)
                model.zero_grad()
                plain.zero_grad()
            assert counters["stats"]["calls_captured"] > 0, f"{place}: nothing was compiled"
            breaks = list(counters["graph_break"])
            assert place == "around" or not breaks, (place, breaks)
            assert all("shardwise gathers and reduces here" in each for each in breaks), breaks


def test_compiled_around_and_inside_wrappers_gradients_are_the_same():
    run_ranks(compiles, 2, kind="gloo")


# --- steps that raise -----------------------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError


def breaks():
    for orig in (False, True):
        model, plain = seeded(Layers()), seeded(Layers())
        model = wrap(model, model.layers, use_orig_params=orig)

        def fail(*_):
            raise ZeroDivisionError

        handle = model.layers[1].module.register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            model(data(0, 0, 2, 6))
        handle.remove()
        # The model can be saved as it was before the step, at once.
        for name, value in model.state_dict().items():
            same(value, plain.state_dict()[name], name)
        handle = model.layers[1].module.register_forward_hook(
            lambda module, args, output: Fails.apply(output)
        )
        with pytest.raises(ZeroDivisionError):
            model(data(0, 0, 2, 6)).sum().backward()
        handle.remove()
        with FSDP.summon_full_params(model):
            same(model.first.weight.detach(), plain.first.weight.detach(), "after backward")
        model.zero_grad()
        gradients_match(model, plain)


def test_a_step_that_raised_leaves_the_model_usable_and_savable():
    run_ranks(breaks, 2)


# --- odd parameters -------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A scalar, an empty one, integers, two floating dtypes, one shared by two names."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.table = nn.Parameter(torch.arange(5), requires_grad=False)
        self.wide = nn.Parameter(torch.linspace(0, 1, 37, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.linspace(-1, 1, 35).view(5, 7))
        self.again = self.narrow

    def forward(self, x):
        y = x @ self.narrow + x @ self.again
        return (y.sum() * self.wide.sum() * self.scale) + self.empty.sum() + self.table.sum()


def odd():
    for strategy in ShardingStrategy:
        for orig in (False, True):
            if "HYBRID" in strategy.name:
                continue
            model, plain = FSDP(Odd(), sharding_strategy=strategy, use_orig_params=orig), Odd()
            x = torch.full((1, 5), 1.0 + dist.get_rank())
            model(x).backward()
            average_gradients(
                plain,
                lambda rank: plain(torch.full((1, 5), 1.0 + rank)),  # noqa: B023
                dist.get_world_size(),
            )
            got = whole_gradients(model)
            for name, param in plain.named_parameters():
                if param.grad is not None:
                    assert torch.allclose(got[name], param.grad), (strategy, orig, name)
            state = model.state_dict()
            assert list(state) == list(plain.state_dict())
            assert {name: value.dtype for name, value in state.items()} == {
                name: value.dtype for name, value in plain.state_dict().items()
            }
            model.load_state_dict(state)
            optim = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
            optim.step()
            states = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
            assert states["state"]["scale"]["exp_avg"].shape == ()
            optim.load_state_dict(FSDP.optim_state_dict_to_load(model, optim, states))
            assert all(state["step"] == 1 and state["step"].dim() == 0 for state in optim.state.values())
            again = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
            for name, values in states["state"].items():
                same(again["state"][name]["exp_avg"], values["exp_avg"], name)
            model(x).backward()


def test_scalars_empty_integers_and_several_dtypes_in_one_unit():
    run_ranks(odd, 2)
    run_ranks(odd, 5)


# --- around wrappers ------------------------------------------------------------------------------------------------


def plain_parent():
    for orig in (False, True):
        want = seeded(Layers()).state_dict()
        parent = seeded(Layers())
        parent.layers[0] = FSDP(parent.layers[0], use_orig_params=orig)
        state = parent.state_dict()
        assert list(state) == list(want)
        with torch.no_grad():
            for param in parent.parameters():
                param.zero_()
        found = parent.load_state_dict(want)
        assert not found.missing_keys
        assert not found.unexpected_keys
        for name, value in parent.state_dict().items():
            same(value, want[name], name)
        parent(data(0, 0, 2, 6)).sum().backward()


def test_a_plain_module_around_wrappers_saves_and_loads_them():
    run_ranks(plain_parent, 2)


def save_with_dcp(folder):
    model = wrapped("tied transformer")
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)


def load_with_dcp(folder):
    model = wrapped(
        "tied transformer", use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP
    )
    want = model.state_dict()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
    for name, value in model.state_dict().items():
        same(value, want[name], name)


def test_torchs_checkpoints_move_between_worlds(tmp_path):
    run_ranks(save_with_dcp, 2, tmp_path, kind="gloo")
    run_ranks(load_with_dcp, 4, tmp_path, kind="gloo")


def goes():
    model = wrapped("tied transformer", sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    meshes = {id(unit.mesh) for unit in model._units}
    assert len(meshes) == 1, "each unit has made groups of its own"
    gone = weakref.ref(model.layers[0])
    # One rank still holds its model when the next is made: ranks drop objects when they like, and must not part.
    kept = [model] if dist.get_rank() == 1 else []
    del model
    gc.collect()
    was_kept = gone() is not None
    again = wrapped("tied transformer", sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    assert {id(unit.mesh) for unit in again._units} == meshes
    kept.clear()
    gc.collect()
    return was_kept, gone() is None


def test_a_dropped_model_goes_and_units_share_their_mesh():
    assert run_ranks(goes, 2, kind="gloo") == [(False, True), (True, True)]


def with_a_default_device():
    """Of tensors without memory, so that any that shardwise makes for itself there would fail."""
    model, plain = seeded(nn.Linear(4, 4)), seeded(nn.Linear(4, 4))
    x = torch.ones(2, 4)
    torch.set_default_device("meta")
    try:
        model = FSDP(model, device_id=torch.device("cpu"))
        composed = fully_shard(plain)
        optimizers = [torch.optim.Adam(each.parameters()) for each in (model, composed)]
        zero = ZeroRedundancyOptimizer([nn.Parameter(torch.ones(4, device="cpu"))], torch.optim.SGD, lr=0.1)
        zero.step()
        for _ in range(2):
            for each, optimizer in zip((model, composed), optimizers, strict=True):
                each(x).sum().backward()
                # torch 2.11 counts steps on the default device.
                with nullcontext() if optimizer.state else torch.device("cpu"):
                    optimizer.step()
                optimizer.zero_grad()
        state = FSDP.optim_state_dict(model, optimizers[0])
        FSDP.optim_state_dict_to_load(model, optimizers[0], state, load_directly=True)
        model.load_state_dict(model.state_dict())
        return {value.device.type for value in model.state_dict().values()}
    finally:
        torch.set_default_device(None)


def test_the_programs_default_device_is_for_the_programs_tensors_only():
    assert run_ranks(with_a_default_device, 2, kind="gloo") == [{"cpu"}] * 2
