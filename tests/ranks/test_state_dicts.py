"""State dicts in any sharding state, loading them, and what refuses to be copied."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardwise import CheckpointError, StateError
from shardwise.testing import run_ranks
from shardwise.testing.workloads import TiedTransformer, seeded
from tests.ranks.models import (
    Layers,
    average_gradients,
    data,
    full,
    is_gathered,
    is_sharded,
    same,
    same_parameters,
    same_shards,
    sgd,
)
from tests.ranks.subject import FSDPModule, beyond_torch, fully_shard, record
from tests.ranks.tables import cases_of, run_cases

WIDTH = 5  # divides by no number of ranks used here


def sharded(reshard=True, build=lambda: Layers(width=WIDTH)):
    model = seeded(build())
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard)
    return fully_shard(model)


def world_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def plain_values(factor=1.0):
    return {name: value * factor for name, value in seeded(Layers(width=WIDTH)).state_dict().items()}


def loss_of(model, step, rank):
    return model(data(step, rank, 2, WIDTH)).square().mean()


def trains_like(model, plain, what, optims=None, steps=2):
    """Both train on; losses and parameters stay bitwise the same."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optims = optims or [sgd(each.parameters()) for each in (model, plain)]
    for step in range(steps):
        loss = loss_of(model, step, rank)
        loss.backward()
        losses = average_gradients(plain, lambda r: loss_of(plain, step, r), world_size)  # noqa: B023
        same(loss.detach(), losses[rank], f"{what}, step {step}: loss")
        for each in optims:
            each.step()
            each.zero_grad()
        same_shards(model, plain, f"{what}, step {step}: ")


# --- reading --------------------------------------------------------------------------------------------------


def check_state(model, values, what):
    """What `state_dict()` gives: shards that own their memory, of these values."""
    state = model.state_dict()
    assert list(state) == list(values), f"{what}: {list(state)}"
    for name, value in state.items():
        assert isinstance(value, DTensor), f"{what}: {name} is {type(value)}"
        local = value.to_local()
        assert local.untyped_storage().nbytes() == local.nbytes, (
            f"{what}: {name} drags its unit's buffer along"
        )
        same(value.full_tensor(), values[name], f"{what}: {name}")
    kept = model.state_dict(keep_vars=True)
    held = {id(param) for param in sharded_parameters(model)}
    assert all(id(value) in held for value in kept.values()), (
        f"{what}: keep_vars does not give the parameters"
    )
    return state


def sharded_parameters(model):
    """The objects that an optimizer made at the start would hold."""
    return model.__dict__["at_the_start"]


def in_any_state(reshard):
    model, plain = sharded(reshard), seeded(Layers(width=WIDTH))
    model.__dict__["at_the_start"] = list(model.parameters())
    values = plain_values()
    rank = dist.get_rank()
    check_state(model, values, "before the first forward")
    handle = model.layers[0].unshard(async_op=True)
    check_state(model, values, "while a gather is under way")
    handle.wait()
    check_state(model, values, "after unshard")
    assert not is_sharded(model.layers[0].in_proj), "reading the state resharded a unit"
    model.layers[0].reshard()

    def inside(module, args):
        check_state(model, values, "inside forward")

    hook = model.layers[1].in_proj.register_forward_pre_hook(inside)
    loss = loss_of(model, 0, rank)
    hook.remove()
    assert not is_sharded(model.first)
    with record(model) as recorder:
        check_state(model, values, "between forward and backward")
        assert recorder.of("unshard", "reshard") == [], "reading the state moved units"
    assert not is_sharded(model.first)
    loss.backward()
    average_gradients(plain, lambda r: loss_of(plain, 0, r), dist.get_world_size())
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        same(full(param.grad), expected.grad, f"gradient of {name}")
    check_state(model, values, "after backward")
    model.set_reshard_after_backward(False)
    loss_of(model, 0, rank).backward()
    assert is_gathered(model.first)
    check_state(model, values, "kept after backward")


@beyond_torch  # there, reading the state reshards
@pytest.mark.parametrize(("reshard", "world_size"), [(True, 3), (False, 3), (2, 4)])
def test_the_state_dict_is_sharded_whatever_state_the_units_are_in(reshard, world_size):
    run_ranks(in_any_state, world_size, reshard)
    run_ranks(in_any_state, world_size, reshard, kind="gloo")


def read_by_one_rank():
    model = sharded()
    rank = dist.get_rank()
    loss = loss_of(model, 0, rank)
    if rank == 0:
        assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    loss.backward()
    trains_like(sharded(), seeded(Layers(width=WIDTH)), "afterwards")


@beyond_torch
def test_one_rank_may_read_its_state_alone_in_the_middle_of_a_step():
    run_ranks(read_by_one_rank, 2, kind="gloo")


def tied():
    """A parameter shown by two units is sharded in the state dict under both names."""
    model = seeded(TiedTransformer(num_layers=1))
    fully_shard(model.embed)
    fully_shard(model.layers[0])
    fully_shard(model)
    model.embed.unshard()
    state = model.state_dict()
    names = [
        name for name, param in model.named_parameters(remove_duplicate=False) if param is model.embed.weight
    ]
    assert len(names) == 2
    for name in names:
        assert isinstance(state[name], DTensor), f"{name} is {type(state[name])}"


@beyond_torch
def test_a_tied_parameter_is_sharded_under_all_its_names():
    run_ranks(tied, 2)


def saved_bytes(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def saved_and_loaded():
    model = sharded()
    trains_like(model, seeded(Layers(width=WIDTH)), "before")
    values = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    saved = saved_bytes(model.state_dict())
    copied = copy.deepcopy(model.state_dict())
    pickled = pickle.loads(pickle.dumps(model.state_dict()))
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    loaded = {
        "loaded": torch.load(io.BytesIO(saved), weights_only=False),
        "loaded weights only": torch.load(io.BytesIO(saved), weights_only=True),
        "deep copy": copied,
        "pickled": pickled,
    }
    for what, state in loaded.items():
        for name, value in values.items():
            same(full(state[name]), value, f"{what}: {name}")
        model.load_state_dict(state)
        for name, param in model.named_parameters():
            same(full(param.detach()), values[name], f"{what}: {name} in the model")


def test_a_state_dict_can_be_saved_pickled_and_copied():
    run_ranks(saved_and_loaded, 2, kind="gloo")


def size_of_one_entry():
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(1024, 512)))
    state = model.state_dict()
    entry = len(saved_bytes(state["0.weight"]))
    assert entry < 16 * 1024, f"saving one small entry takes {entry} bytes"
    assert len(saved_bytes(state)) < state["1.weight"].to_local().nbytes + 64 * 1024


def test_saving_one_entry_does_not_write_the_whole_unit():
    run_ranks(size_of_one_entry, 2, kind="gloo")


# --- loading --------------------------------------------------------------------------------------------------


def halves(state):
    return {name: value.detach() * 0.5 for name, value in state.items()}


def placed_values(placement):
    values = plain_values(0.5).items()
    return {name: distribute_tensor(value, world_mesh(), [placement]) for name, value in values}


LOADS = {
    "shards": lambda model: model.load_state_dict(halves(model.state_dict())),
    "shards, assigned": lambda model: model.load_state_dict(halves(model.state_dict()), assign=True),
    "whole tensors": lambda model: model.load_state_dict(plain_values(0.5)),
    "whole tensors, assigned": lambda model: model.load_state_dict(plain_values(0.5), assign=True),
    "replicated": lambda model: model.load_state_dict(placed_values(Replicate())),
    "replicated, assigned": lambda model: model.load_state_dict(placed_values(Replicate()), assign=True),
    "cut elsewhere, assigned": lambda model: model.load_state_dict(placed_values(Shard(-1)), assign=True),
    "in two parts": lambda model: [
        model.load_state_dict(
            {name: value for name, value in plain_values(0.5).items() if ("layers" in name) is in_layers},
            strict=False,
        )
        for in_layers in (True, False)
    ],
    "by module": lambda model: [
        module.load_state_dict(
            {
                key.removeprefix(prefix): value
                for key, value in plain_values(0.5).items()
                if key.startswith(prefix)
            }
        )
        for prefix, module in [
            ("first.", model.first),
            ("last.", model.last),
            *((f"layers.{index}.", layer) for index, layer in enumerate(model.layers)),
        ]
    ],
}


def loads(how, moment):
    model, plain = sharded(), seeded(Layers(width=WIDTH))
    optim = sgd(model.parameters())
    objects = list(model.parameters())
    if moment != "at the start":
        loss_of(model, 0, 0).backward()
        model.zero_grad()
    if moment == "unsharded":
        for unit in (*model.layers, model):
            unit.unshard()
    elif moment == "kept after a forward":
        with torch.no_grad():
            loss_of(model, 0, 0)
    LOADS[how](model)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(0.5)
    if "assigned" in how:
        optim = sgd(model.parameters())
    else:
        assert all(one is other for one, other in zip(model.parameters(), objects, strict=True))
    trains_like(model, plain, f"{how}, {moment}", [optim, sgd(plain.parameters())])


@beyond_torch  # which takes no whole tensors
@pytest.mark.parametrize("how", LOADS)
def test_what_is_loaded_is_what_the_next_forward_uses(how):
    for moment in ("at the start", "after a step", "unsharded", "kept after a forward"):
        run_ranks(loads, 3, how, moment)


def misfits(model):
    """Each: what is wrong, the state dict, keywords, and words that the error must have."""
    state = {name: value * 3 for name, value in model.state_dict().items()}
    other_mesh = init_device_mesh("cpu", (dist.get_world_size(), 1))
    name = "layers.1.in_proj.weight"
    missing = {key: value for key, value in state.items() if key != name}
    wrong_shape = {**state, name: torch.zeros(3, 3)}
    on_other_mesh = distribute_tensor(torch.zeros(4 * WIDTH, WIDTH), other_mesh, [Replicate(), Replicate()])
    return [
        ("missing", missing, {}, [name, "Missing"]),
        ("extra", {**state, "layers.7.odd": torch.zeros(2)}, {}, ["layers.7.odd", "Unexpected"]),
        ("wrong shape", wrong_shape, {}, [name, "size mismatch", "(3, 3)", f"({4 * WIDTH}, {WIDTH})"]),
        ("wrong shape, not strict", wrong_shape, {"strict": False}, [name, "size mismatch"]),
        ("wrong shape, assigned", wrong_shape, {"assign": True}, [name, "size mismatch"]),
        ("no tensor", {**state, name: 7}, {}, [name, "int"]),
        ("another mesh", {**state, name: on_other_mesh}, {}, [name, "DeviceMesh"]),
        ("all at once", {**missing, "odd": 1, "first.bias": torch.zeros(9)}, {}, [name, "odd", "first.bias"]),
    ]


def does_not_fit(moment):
    model, plain = sharded(), seeded(Layers(width=WIDTH))
    optims = [sgd(each.parameters()) for each in (model, plain)]
    if moment == "unsharded":
        for unit in (*model.layers, model):
            unit.unshard()
    before = list(model.parameters())
    for what, state, keywords, words in misfits(model):
        with pytest.raises(CheckpointError) as caught:
            model.load_state_dict(state, **keywords)
        message = str(caught.value)
        assert isinstance(caught.value, RuntimeError)
        assert caught.value.fix
        for word in words:
            assert word in message, f"{what}: {word!r} is not in: {message}"
        for param, was in zip(model.parameters(), before, strict=True):
            assert param is was, f"{what}: a parameter was replaced"
        for (name, value), expected in zip(model.state_dict().items(), plain.parameters(), strict=True):
            same(full(value), expected.detach(), f"{what}: {name}")
    trains_like(model, plain, moment, optims)


@beyond_torch
def test_a_state_dict_that_does_not_fit_is_refused_whole_and_leaves_the_model_as_it_was():
    run_cases(does_not_fit, 2, cases_of(moment=["at the start", "unsharded"]))


class WithBuffers(Layers):
    """Modules that load in ways of their own, and entries that are no parameters."""

    def __init__(self):
        super().__init__(width=WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("left_out", torch.arange(3.0), persistent=False)
        self.note = "first"

    def forward(self, x):
        return self.norm(super().forward(x))

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state


def with_buffers():
    model = sharded(build=WithBuffers)
    other = seeded(WithBuffers(), 5)
    other.note = "second"
    other.kept += 1
    model.load_state_dict(other.state_dict())
    assert model.note == "second"
    for (name, got), want in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        if isinstance(want, torch.Tensor):
            same(full(got), want, name)
    state = model.state_dict()
    del state["norm.num_batches_tracked"]
    with pytest.raises(RuntimeError, match=r"norm\.num_batches_tracked"):
        model.load_state_dict(state)


@beyond_torch
def test_buffers_and_extra_state_are_loaded_too():
    run_ranks(with_buffers, 2)


def renamed_by_a_hook():
    """A hook of the user's that renames keys as they are loaded keeps working."""
    model, plain = sharded(), seeded(Layers(width=WIDTH))
    old = {key.replace("first", "entry"): value * 0.5 for key, value in plain_values().items()}

    def rename(module, state_dict, prefix, *rest):
        for key in [key for key in state_dict if key.startswith("entry")]:
            state_dict[key.replace("entry", "first")] = state_dict.pop(key)

    model.register_load_state_dict_pre_hook(rename)
    model.load_state_dict(old)
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(0.5)
    same_parameters(model, plain)


@beyond_torch
def test_a_load_hook_of_the_users_may_rename_entries():
    run_ranks(renamed_by_a_hook, 2)


def loaded_inside_forward():
    model, plain = sharded(), seeded(Layers(width=WIDTH))
    optims = [sgd(each.parameters()) for each in (model, plain)]
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    hook = model.layers[1].in_proj.register_forward_pre_hook(lambda *_: model.load_state_dict(state) and None)
    with pytest.raises(StateError, match="in use"):
        loss_of(model, 0, 0)
    hook.remove()
    trains_like(model, plain, "after the refusal", optims)


@beyond_torch
def test_loading_in_the_middle_of_a_forward_is_refused():
    run_ranks(loaded_inside_forward, 2)


# --- copies ---------------------------------------------------------------------------------------------------


def copies_are_refused():
    model, plain = sharded(), seeded(Layers(width=WIDTH))
    trains_like(model, plain, "before", steps=1)
    loss_of(model, 5, dist.get_rank()).backward()
    modules = {
        "the model": model,
        "a unit": model.layers[0],
        "a module around it": nn.Sequential(model),
        "a module inside a unit": model.first,
        "a module inside a layer": model.layers[0].in_proj,
    }
    ways = {"deepcopy": copy.deepcopy, "pickle": saved_bytes}
    for what, module in modules.items():
        for how, act in ways.items():
            with pytest.raises(StateError) as caught:
                act(module)
            message = str(caught.value)
            assert how in message, f"{what}: {message}"
            assert "state_dict" in caught.value.fix, f"{what}, {how}: {message}"
            assert "before fully_shard" in caught.value.fix
    with pytest.raises(StateError, match="share_memory"):
        model.share_memory()
    model.zero_grad()
    trains_like(
        model, plain, "afterwards", [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    )
    assert isinstance(model, FSDPModule)


@beyond_torch
def test_copying_a_sharded_module_is_refused_with_what_to_do_instead():
    run_ranks(copies_are_refused, 2, kind="gloo")


def parameters_and_gradients_copied():
    """Unlike a module, a parameter can be copied: the copy is a DTensor of its own and belongs to no unit."""
    model, plain = sharded(), seeded(Layers(width=WIDTH))
    loss_of(model, 0, dist.get_rank()).backward()
    average_gradients(plain, lambda r: loss_of(plain, 0, r), dist.get_world_size())
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        copied = copy.deepcopy(param)
        loaded = torch.load(io.BytesIO(saved_bytes(param)), weights_only=True)
        with torch.no_grad():
            param.mul_(2)
        for what, value in (("copy", copied), ("loaded", loaded)):
            assert isinstance(value, nn.Parameter)
            same(full(value.detach()), expected.detach(), f"{what} of {name}")
        same(full(copied.grad), expected.grad, f"gradient of the copy of {name}")
        same(full(copy.deepcopy(param.grad)), expected.grad, f"copy of the gradient of {name}")


@beyond_torch  # torch fails to copy the gradients
def test_a_parameter_and_its_gradient_can_be_copied_and_saved():
    run_ranks(parameters_and_gradients_copied, 2, kind="gloo")
