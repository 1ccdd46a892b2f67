"""State dicts of `FullyShardedDataParallel` side by side with torch's FSDP1: keys, shapes, values and errors."""

from __future__ import annotations

import contextlib
import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
import torch.distributed.fsdp as torchs
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, load, save
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType
from torch.distributed.optim import _NamedOptimizer
from torch.distributed.tensor import DTensor

import shardwise
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from shardwise.torch_internals import ShardedTensor
from tests.ranks.side_by_side import device, failures, same
from tests.ranks.tables import cases_of, slow

pytestmark = pytest.mark.filterwarnings("ignore")


class OnDevice:
    """torch's class needs to be told that it is on a CPU."""

    def __call__(self, module, **options):
        return torchs.FullyShardedDataParallel(module, device_id=device(), **options)

    def __getattr__(self, name):
        return getattr(torchs.FullyShardedDataParallel, name)


def library(package, wrapper, **more):
    kinds = package.StateDictType
    return SimpleNamespace(
        FSDP=wrapper,
        FULL=kinds.FULL_STATE_DICT,
        SHARDED=kinds.SHARDED_STATE_DICT,
        LOCAL=kinds.LOCAL_STATE_DICT,
        **{name: getattr(package, name) for name in dir(package) if name.endswith(("Config", "Strategy"))},
        **more,
    )


TORCHS = library(torchs, OnDevice(), OptimStateKeyType=OptimStateKeyType)
OURS = library(shardwise, shardwise.FullyShardedDataParallel, OptimStateKeyType=shardwise.OptimStateKeyType)


class Block(nn.Module):
    def __init__(self, size_in, size_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size_in, size_out))
        self.bias = nn.Parameter(torch.randn(size_out))

    def forward(self, x):
        return torch.relu(x @ self.weight + self.bias)


class Nested(nn.Module):
    """Wrapped parts inside wrapped and plain ones; no size can be divided by the number of ranks."""

    def __init__(self):
        super().__init__()
        self.first = Block(5, 3)
        self.second = Block(3, 7)
        self.third = nn.Sequential(Block(7, 9), Block(9, 9), Block(9, 5))
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return self.third(self.second(self.first(x))) + self.bias


def nested(lib, is_wrapped=False, **options):
    model = seeded(Nested())
    model.second = lib.FSDP(model.second, **options)
    model.third[1] = lib.FSDP(model.third[1], **options)
    model.third = lib.FSDP(model.third, **options)
    return lib.FSDP(model, **options) if is_wrapped else model


def step(model, *optims):
    x = torch.arange(20.0).view(4, 5).sin()
    model(x).square().mean().backward()
    for optim in optims:
        optim.step()
    model.zero_grad()


def groups_of(model, reverses=False):
    """Two groups; with ``reverses``, in another order on every other rank."""
    params = list(model.parameters())
    groups = [params[::2], params[1::2]]
    if reverses and dist.get_rank() % 2:
        groups = [group[::-1] for group in groups]
    return [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.9}]


def trained(lib, reverses=False, **options):
    model = nested(lib, **options)
    optim = torch.optim.Adam(groups_of(model, reverses), lr=0.01)
    for _ in range(2):
        step(model, optim)
    return model, optim


def fresh(lib, reverses=False, **options):
    model = nested(lib, **options)
    return model, torch.optim.Adam(groups_of(model, reverses), lr=7.0)


def described(value):
    """What must be the same: sharded tensors by their shapes, flat shards by their kind, others by their values."""
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        return "sharded", tuple(value.size()), tuple(shards[0].tensor.shape) if shards else "none"
    if isinstance(value, DTensor):
        local = value.to_local()
        return "sharded", tuple(value.shape), tuple(local.shape) if local.numel() else "none"
    if isinstance(value, torch.Tensor):
        values = "flat" if value.dim() == 1 else [round(each, 4) for each in value.flatten().tolist()]
        return str(value.dtype), values
    if isinstance(value, dict):
        return {key: described(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [described(each) for each in value]
    return value


def to_load(state, use_orig_params):
    """A state to load. Which parameters a rank has no elements of depends on how the library aligns them."""
    if not use_orig_params:
        return state
    own = {tuple(sorted(values)) for values in state["state"].values() if isinstance(values, dict)}
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return {**state, "state": set().union(*of_ranks)}


# --- states of optimizers -------------------------------------------------------------------------------------------


def full_in_any_order(lib):
    model, optim = trained(lib, reverses=True)
    return lib.FSDP.full_optim_state_dict(model, optim, rank0_only=False)


def full_on_first(lib):
    return lib.FSDP.full_optim_state_dict(*trained(lib))


def sharded(lib):
    model, optim = trained(lib, use_orig_params=True)
    with lib.FSDP.state_dict_type(model, lib.SHARDED):
        return lib.FSDP.optim_state_dict(model, optim), lib.FSDP.sharded_optim_state_dict(model, optim)


def shard_full(lib):
    full = full_in_any_order(lib)
    model, optim = fresh(lib, reverses=True)
    return [
        lib.FSDP.shard_full_optim_state_dict(full, model, optim=optim),
        lib.FSDP.shard_full_optim_state_dict(full, model, optim_input=groups_of(model, reverses=True)),
        lib.FSDP.scatter_full_optim_state_dict(full if dist.get_rank() == 0 else None, model, optim=optim),
        lib.FSDP.optim_state_dict_to_load(model, optim, full),
    ]


def flatten_sharded(lib):
    saved = lib.FSDP.sharded_optim_state_dict(*trained(lib))
    model, optim = fresh(lib, reverses=True)
    return lib.FSDP.flatten_sharded_optim_state_dict(saved, model, optim)


def without_groups(lib, use_orig_params):
    model, optim = trained(lib, use_orig_params=use_orig_params)
    lib.FSDP.set_state_dict_type(model, lib.FULL, None, lib.FullOptimStateDictConfig(offload_to_cpu=False))
    own = optim.state_dict()
    del own["param_groups"]
    saved = lib.FSDP.optim_state_dict(model, optim, own)
    loaded = lib.FSDP.optim_state_dict_to_load(*fresh(lib, use_orig_params=use_orig_params), saved)
    return saved, to_load(loaded, use_orig_params)


def with_other_values(lib, use_orig_params):
    """States that are no tensors, are None, or belong to no parameter."""
    model, optim = trained(lib, use_orig_params=use_orig_params)
    lib.FSDP.set_state_dict_type(model, lib.FULL, None, lib.FullOptimStateDictConfig(offload_to_cpu=False))
    for state in optim.state.values():
        state.update(nothing=None, count=3)
    own = optim.state_dict()
    own["state"] |= {"of all": torch.ones(3), "other": {"a": 1}}
    saved = lib.FSDP.optim_state_dict(model, optim, own)
    loaded = lib.FSDP.optim_state_dict_to_load(*fresh(lib, use_orig_params=use_orig_params), saved)
    return saved, to_load(loaded, use_orig_params)


def no_states_yet(lib):
    model, optim = fresh(lib, use_orig_params=True)
    saved = lib.FSDP.optim_state_dict(model, optim)
    return saved, lib.FSDP.optim_state_dict_to_load(model, optim, saved)


def several_optimizers(lib, use_orig_params):
    """One optimizer for wrapped parts, another for the rest; asked of the whole model and of a part."""
    model = nested(lib, is_wrapped=True, use_orig_params=use_orig_params)
    inner = {id(param) for part in (model.second, model.third) for param in part.parameters()}
    adam = torch.optim.Adam([param for param in model.parameters() if id(param) in inner], lr=0.01)
    sgd = torch.optim.SGD(
        [param for param in model.parameters() if id(param) not in inner], lr=0.1, momentum=0.9
    )
    third = torch.optim.Adam(model.third.parameters(), lr=0.01)
    step(model, adam, sgd)
    step(model, third)
    found = []
    for part, optim in ((model, adam), (model, sgd), (model.third, third)):
        with lib.FSDP.state_dict_type(part, lib.SHARDED):
            saved = lib.FSDP.optim_state_dict(part, optim)
            loaded = lib.FSDP.optim_state_dict_to_load(part, optim, copy.copy(saved))
            found += [saved, to_load(loaded, use_orig_params)]
    return found


def rekeyed(lib):
    plain = seeded(Nested())
    optim = torch.optim.Adam(groups_of(plain), lr=0.01)
    step(plain, optim)
    own, kinds = optim.state_dict(), lib.OptimStateKeyType
    named = lib.FSDP.rekey_optim_state_dict(own, kinds.PARAM_NAME, plain, optim=optim)
    assert lib.FSDP.rekey_optim_state_dict(named, kinds.PARAM_NAME, plain, optim=optim) is named
    for group in named["param_groups"]:
        group["params"].sort()
    return named, lib.FSDP.rekey_optim_state_dict(named, kinds.PARAM_ID, plain, optim=optim)["state"]


def loaded_and_stepped(lib, use_orig_params):
    """A loaded optimizer has the states that it would have had, and goes on as the other."""
    model, optim = trained(lib, use_orig_params=use_orig_params)
    with lib.FSDP.state_dict_type(model, lib.SHARDED):
        saved = lib.FSDP.optim_state_dict(model, optim)
    other, other_optim = fresh(lib, use_orig_params=use_orig_params)
    other.load_state_dict(model.state_dict())
    with lib.FSDP.state_dict_type(other, lib.SHARDED):
        lib.FSDP.optim_state_dict_to_load(other, other_optim, saved, load_directly=True)
    states = other_optim.state_dict()
    step(other, other_optim)
    return to_load(states, use_orig_params), other.state_dict()


BOTH_FORMS = [{"use_orig_params": False}, {"use_orig_params": True}]
OPTIMIZERS = [
    (full_in_any_order, [{}]),
    (full_on_first, [{}]),
    (sharded, [{}]),
    (shard_full, [{}]),
    (flatten_sharded, [{}]),
    (without_groups, BOTH_FORMS),
    (with_other_values, BOTH_FORMS),
    (no_states_yet, [{}]),
    (several_optimizers, BOTH_FORMS),
    (rekeyed, [{}]),
    (loaded_and_stepped, BOTH_FORMS),
]


# --- states of models -----------------------------------------------------------------------------------------------


def of_every_kind(lib, use_orig_params):
    model = nested(lib, is_wrapped=True, use_orig_params=use_orig_params)
    found = [model.state_dict(), model.state_dict(prefix="a.")]
    with lib.FSDP.state_dict_type(model, lib.SHARDED, lib.ShardedStateDictConfig(offload_to_cpu=True)):
        found.append(model.state_dict())
    assert lib.FSDP.get_state_dict_type(model).state_dict_type is lib.FULL
    return found


def with_a_mesh(lib):
    model = nested(
        lib, is_wrapped=True, device_mesh=init_device_mesh(device().type, (dist.get_world_size(),))
    )
    lib.FSDP.set_state_dict_type(model, lib.SHARDED)
    state, settings = model.state_dict(), lib.FSDP.get_state_dict_type(model)
    uses = settings.state_dict_config._use_dtensor, settings.optim_state_dict_config._use_dtensor
    return state, uses, {str(type(value)) for value in state.values()}


def nothing_sharded(lib):
    """Whatever kind is set, state dicts are full where nothing is sharded."""
    model = nested(lib, is_wrapped=True, sharding_strategy=lib.ShardingStrategy.NO_SHARD)
    found = []
    for kind in (lib.FULL, lib.SHARDED, lib.LOCAL):
        lib.FSDP.set_state_dict_type(model, kind)
        found.append(model.state_dict())
        model.load_state_dict(found[-1])
    return found


def incomplete(lib):
    model = nested(lib, is_wrapped=True)
    state = model.state_dict()
    del state["second.weight"]
    result = model.load_state_dict({**state, "unknown": torch.ones(1)}, strict=False)
    return list(result.missing_keys), list(result.unexpected_keys)


class Renaming(Block):
    """Takes what an older version of it saved."""

    def __init__(self):
        super().__init__(5, 5)
        self.register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(module, state, prefix, *_):
        if f"{prefix}both" in state:
            both = state.pop(f"{prefix}both")
            state[f"{prefix}weight"], state[f"{prefix}bias"] = both[:5], both[5]


class Transposing(Block):
    def __init__(self):
        super().__init__(5, 5)

    def _load_from_state_dict(self, state, prefix, *args):
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t() * 2
        super()._load_from_state_dict(state, prefix, *args)


class Scaling(Block):
    def __init__(self):
        super().__init__(5, 5)
        self.register_load_state_dict_post_hook(self.scale)

    @staticmethod
    def scale(module, _):
        module.weight.data /= module.weight.detach()[0].sum()


def loaded_in_ways_of_their_own(lib, use_orig_params, wraps_part):
    """Modules that change what they load see full values and full parameters."""
    parts = seeded(nn.Sequential(Renaming(), Transposing(), Scaling(), Block(5, 5)))
    if wraps_part:
        parts = nn.Sequential(*(lib.FSDP(part, use_orig_params=use_orig_params) for part in parts))
    model = lib.FSDP(parts, use_orig_params=use_orig_params)
    state = {name: value + 1 for name, value in model.state_dict().items() if not name.startswith("0.")}
    state["0.both"] = torch.arange(30.0).view(6, 5)
    result = model.load_state_dict(state)
    step(model)
    return list(result.missing_keys), list(result.unexpected_keys), model.state_dict()


class NamedTwice(nn.Module):
    """One module under two names, and a weight that two modules share."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.again = self.first
        self.first.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        return self.again(self.second(self.first(x)))


def under_two_names(lib, wraps_part, use_orig_params):
    model = seeded(NamedTwice())
    if wraps_part:
        model.second.weight = nn.Parameter(model.first.weight.detach().clone())
        model.first = model.again = lib.FSDP(model.first, use_orig_params=use_orig_params)
    model = lib.FSDP(model, use_orig_params=use_orig_params)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for kind in (lib.FULL, lib.SHARDED, lib.LOCAL)[: 2 if use_orig_params else 3]:
        with lib.FSDP.state_dict_type(model, kind):
            state = model.state_dict()
            step(model, optim)
            # Back to the values of before the step.
            found.append((kind.name, list(state), str(model.load_state_dict(state))))
        found.append(model.state_dict())
    return found


MODELS = [
    (of_every_kind, BOTH_FORMS),
    (under_two_names, cases_of(use_orig_params=[False, True], wraps_part=[False, True])),
    (with_a_mesh, [{}]),
    (nothing_sharded, [{}]),
    (incomplete, [{}]),
    (loaded_in_ways_of_their_own, cases_of(use_orig_params=[False, True], wraps_part=[False, True])),
]


# --- torch.distributed.checkpoint.state_dict ------------------------------------------------------------------------


def asked_with(lib, use_orig_params, **options):
    model = nested(lib, is_wrapped=True, use_orig_params=use_orig_params)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optim)
    options = StateDictOptions(**options)
    states = dcp.get_state_dict(model, optim, options=options)
    found = described(states)
    other = nested(lib, is_wrapped=True, use_orig_params=use_orig_params)
    other_optim = torch.optim.AdamW(other.parameters(), lr=7.0)
    with torch.no_grad():
        for param in other.parameters():
            param.add_(1.0)
    model_state, optim_state = states
    result = dcp.set_state_dict(
        other, other_optim, model_state_dict=model_state, optim_state_dict=optim_state, options=options
    )
    step(model, optim)
    step(other, other_optim)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    return found, list(result.missing_keys), other_optim.param_groups[0]["lr"]


def asked_around(lib, use_orig_params):
    """Of a plain model with wrapped parts, for several optimizers, before the first step."""
    model = nested(lib, use_orig_params=use_orig_params)
    model.second.requires_grad_(False)
    third = [*model.third.parameters()]
    optims = [
        torch.optim.Adam(third, lr=0.1),
        torch.optim.SGD([*model.first.parameters(), model.bias], lr=0.2, momentum=0.9),
    ]
    state = dcp.get_optimizer_state_dict(model, optims)
    saved = described(state)
    for optim in optims:
        optim.param_groups[0]["lr"] = 9.0
    dcp.set_optimizer_state_dict(model, optims, state)
    trained_only = dcp.get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    return saved, [optim.param_groups[0]["lr"] for optim in optims], list(trained_only)


def form_and(**options):
    return [{**form, **options} for form in BOTH_FORMS]


FUNCTIONS = [
    (asked_with, form_and() + form_and(full_state_dict=True) + form_and(flatten_optimizer_state_dict=True)),
    (asked_around, BOTH_FORMS),
]


def beside_torch(tables):
    for case, all_options in tables:
        for options in all_options:
            want, got = described(case(TORCHS, **options)), described(case(OURS, **options))
            assert same(got, want), f"{case.__name__} {options}: {got} instead of {want}"


def all_tables():
    """What goes wrong in all tables, one after another on the same ranks."""
    tables = [*OPTIMIZERS, *MODELS, *FUNCTIONS]
    return failures((partial(beside_torch, [each]), each[0].__name__) for each in tables)


@pytest.mark.parametrize("tables", [OPTIMIZERS, MODELS, FUNCTIONS], ids=["optimizers", "models", "functions"])
def test_states_have_torchs_keys_shapes_and_values(tables):
    run_ranks(beside_torch, 2, tables, kind="gloo")


# --- what torch does not do on a CPU, or does differently -----------------------------------------------------------


def from_first_rank(use_orig_params, is_hybrid):
    options = {"use_orig_params": use_orig_params}
    if is_hybrid:
        mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
        options |= {"device_mesh": mesh, "sharding_strategy": OURS.ShardingStrategy.HYBRID_SHARD}
    model = nested(OURS, is_wrapped=True, **options)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optim)
    first_only = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optim_state = dcp.get_state_dict(model, optim, options=first_only)
    assert (not model_state and not optim_state) == (dist.get_rank() != 0)
    other = nested(OURS, is_wrapped=True, **options)
    other_optim = torch.optim.AdamW(other.parameters(), lr=7.0)
    with torch.no_grad():
        for param in other.parameters():
            param.add_(1.0)
    broadcasts = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dcp.set_model_state_dict(other, model_state, options=broadcasts)
    dcp.set_optimizer_state_dict(other, other_optim, optim_state, options=broadcasts)
    step(model, optim)
    step(other, other_optim)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    partial = dcp.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    del partial["third.0.weight"]
    lenient = StateDictOptions(full_state_dict=True, strict=False)
    assert dcp.set_model_state_dict(other, partial, options=lenient).missing_keys == ["third.0.weight"]


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_torchs_functions_send_the_first_ranks_state_to_all(use_orig_params):
    run_ranks(from_first_rank, 2, use_orig_params, False, kind="gloo")


@pytest.mark.slow
def test_torchs_functions_send_the_first_ranks_state_to_all_replicas():
    run_ranks(from_first_rank, 4, True, True, kind="gloo")


def of_torchs_wrapper(use_orig_params):
    """What torch's FSDP saved as ShardedTensors is gone on with."""
    states = []
    for lib in (TORCHS, OURS):
        model, optim = trained(TORCHS, use_orig_params=use_orig_params)
        with TORCHS.FSDP.state_dict_type(model, TORCHS.SHARDED):
            model_state, optim_state = model.state_dict(), TORCHS.FSDP.optim_state_dict(model, optim)
        assert isinstance(model_state["second.weight"], ShardedTensor)
        other, other_optim = fresh(lib, use_orig_params=use_orig_params)
        with torch.no_grad():
            for param in other.parameters():
                param.add_(1.0)
        with lib.FSDP.state_dict_type(other, lib.SHARDED):
            other.load_state_dict(model_state)
            lib.FSDP.optim_state_dict_to_load(other, other_optim, optim_state, load_directly=True)
        step(other, other_optim)
        states.append(other.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [slow(2), 3])
def test_sharded_checkpoints_of_torchs_wrapper_are_taken(world_size):
    for use_orig_params in (False, True):
        run_ranks(of_torchs_wrapper, world_size, use_orig_params, kind="gloo")


def on_ranks_without_elements():
    """Some ranks have no element of any parameter, so that their optimizers have no states."""
    model = OURS.FSDP(seeded(nn.Sequential(nn.Linear(4, 4))), use_orig_params=True)
    optim = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.ones(2, 4)).sum().backward()
    optim.step()
    want = model.state_dict()
    model_state, optim_state = dcp.get_state_dict(model, optim)
    assert list(optim_state["state"]) == ["0.weight", "0.bias"]
    dcp.set_state_dict(model, optim, model_state_dict=model_state, optim_state_dict=optim_state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, want[name]), name
    model(torch.ones(2, 4)).sum().backward()
    optim.step()
    return not any(param.numel() for param in model.parameters())


def test_torchs_functions_work_where_some_ranks_have_no_elements():
    assert any(run_ranks(on_ranks_without_elements, 4))


def through_files_as_lightning(path, use_orig_params):
    """Sharded optimizer states that torch reads from a checkpoint by itself are ShardedTensors."""
    model, optim = trained(OURS, use_orig_params=use_orig_params)
    want = OURS.FSDP.full_optim_state_dict(model, optim, rank0_only=False)
    OURS.FSDP.set_state_dict_type(model, OURS.SHARDED)
    saved = {"model": model.state_dict(), "optimizer_0": OURS.FSDP.optim_state_dict(model, optim)}
    save(saved, checkpoint_id=path)
    other, other_optim = fresh(OURS, use_orig_params=use_orig_params)
    OURS.FSDP.set_state_dict_type(other, OURS.SHARDED)
    state = {"model": other.state_dict()}
    load(state, checkpoint_id=path)
    other.load_state_dict(state["model"])
    read = load_sharded_optimizer_state_dict(
        model_state_dict=state["model"], optimizer_key="optimizer_0", storage_reader=FileSystemReader(path)
    )["optimizer_0"]
    assert isinstance(read["state"]["second.weight"]["exp_avg"], ShardedTensor)
    OURS.FSDP.optim_state_dict_to_load(other, other_optim, read, load_directly=True)
    again = OURS.FSDP.full_optim_state_dict(other, other_optim, rank0_only=False)
    assert described(again) == described(want)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_optimizer_states_that_torch_reads_from_checkpoints_are_taken(tmp_path, use_orig_params):
    run_ranks(through_files_as_lightning, 2, tmp_path, use_orig_params, kind="gloo")


class NotYetLoaded:
    """A tensor that is read from its file when it is first used, as Lightning makes them."""

    def __init__(self, tensor):
        self.tensor, self.shape = tensor, tensor.shape

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func(*(arg.tensor if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))


def lazily_loaded(use_orig_params):
    model, optim = trained(OURS, use_orig_params=use_orig_params)
    want, saved = model.state_dict(), OURS.FSDP.optim_state_dict(model, optim)
    lazy = {
        name: {key: NotYetLoaded(value) for key, value in state.items()}
        for name, state in saved["state"].items()
    }
    other, other_optim = fresh(OURS, use_orig_params=use_orig_params)
    other.load_state_dict({name: NotYetLoaded(value + 1) for name, value in want.items()})
    OURS.FSDP.optim_state_dict_to_load(other, other_optim, {**saved, "state": lazy}, load_directly=True)
    for name, value in other.state_dict().items():
        assert torch.equal(value, want[name] + 1), name
    again = OURS.FSDP.optim_state_dict(other, other_optim)
    for name, state in saved["state"].items():
        assert all(torch.equal(again["state"][name][key], value) for key, value in state.items()), name


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_tensors_that_are_read_when_used_are_taken(use_orig_params):
    run_ranks(lazily_loaded, 2, use_orig_params)


def loaded_while_summoned(use_orig_params):
    model = nested(OURS, is_wrapped=True, use_orig_params=use_orig_params)
    state = {name: value + 1 for name, value in model.state_dict().items()}
    with OURS.FSDP.summon_full_params(model):
        model.load_state_dict(state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_what_is_loaded_while_parameters_are_summoned_is_written_back(use_orig_params):
    run_ranks(loaded_while_summoned, 2, use_orig_params)


def loaded_sharded_in_ways_of_their_own(use_orig_params):
    """DTensors are given to such modules as full tensors, too."""
    parts = seeded(nn.Sequential(Transposing(), Block(5, 5)))
    model = OURS.FSDP(parts, use_orig_params=use_orig_params)
    want = model.state_dict()
    want["0.weight"] = want["0.weight"].t() * 2
    with OURS.FSDP.state_dict_type(model, OURS.SHARDED):
        model.load_state_dict(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(value, want[name]), name


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_modules_with_a_loading_of_their_own_get_full_tensors(use_orig_params):
    run_ranks(loaded_sharded_in_ways_of_their_own, 2, use_orig_params)


def named_optimizers(use_orig_params):
    """An optimizer whose state dict has names as keys saves what any other saves, and loads it."""

    def trained_with(make_optim, num_steps):
        model = nested(OURS, is_wrapped=True, use_orig_params=use_orig_params)
        optim = make_optim(model)
        for _ in range(num_steps):
            step(model, optim)
        return model, optim

    def by_name(model):
        groups = [{"params": model.parameters()}]
        return _NamedOptimizer(model.named_parameters(), torch.optim.Adam, groups, model, lr=0.01)

    plain = trained_with(lambda model: torch.optim.Adam(model.parameters(), lr=0.01), 2)
    want = OURS.FSDP.optim_state_dict(*plain)
    model, optim = trained_with(by_name, 2)
    saved = OURS.FSDP.optim_state_dict(model, optim, optim.state_dict())
    assert described(saved["state"]) == described(want["state"])
    other, other_optim = trained_with(by_name, 1)
    other.load_state_dict(model.state_dict())
    state = OURS.FSDP.optim_state_dict_to_load(other, other_optim, saved, is_named_optimizer=True)
    assert set(state["state"]) == {name for name, param in other.named_parameters() if param.numel()}
    assert set(state["param_groups"][0]["params"]) >= set(state["state"])
    other_optim.load_state_dict(state)
    step(model, optim)
    step(other, other_optim)
    assert described(other.state_dict()) == described(model.state_dict())


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_optimizers_with_names_as_keys_are_saved_and_loaded(use_orig_params):
    run_ranks(named_optimizers, 2, use_orig_params)


def other_config(lib, model, optim):
    with lib.FSDP.state_dict_type(model, lib.FULL, lib.LocalStateDictConfig()):
        pass


def other_optim_config(lib, model, optim):
    lib.FSDP.set_state_dict_type(model, lib.SHARDED, None, lib.FullOptimStateDictConfig())


def different_kinds(lib, model, optim):
    lib.FSDP.set_state_dict_type(model.second, lib.SHARDED)
    lib.FSDP.get_state_dict_type(model)


def different_kinds_before(lib, model, optim):
    lib.FSDP.set_state_dict_type(model.second, lib.SHARDED)
    lib.FSDP.set_state_dict_type(model, lib.FULL)


def no_states(lib, model, optim):
    lib.FSDP.optim_state_dict_to_load(model, optim, {"param_groups": []})


def mixed_keys(lib, model, optim):
    plain = Nested()
    state = {"state": {0: {}, "bias": {}}, "param_groups": []}
    lib.FSDP.rekey_optim_state_dict(state, lib.OptimStateKeyType.PARAM_ID, plain)


def no_key_type(lib, model, optim):
    lib.FSDP.rekey_optim_state_dict({"state": {}, "param_groups": []}, "names", Nested())


def empty_input(lib, model, optim):
    lib.FSDP.shard_full_optim_state_dict({"state": {}, "param_groups": []}, model, optim_input=[])


def mixed_input(lib, model, optim):
    given = [nn.Parameter(torch.ones(1)), {"params": []}]
    lib.FSDP.shard_full_optim_state_dict({"state": {}, "param_groups": []}, model, optim_input=given)


def changed_states(lib, model, optim, change):
    saved = lib.FSDP.full_optim_state_dict(model, optim, rank0_only=False)
    change(saved["state"]["second.bias"])
    lib.FSDP.optim_state_dict_to_load(model, optim, saved)


def other_shape(lib, model, optim):
    changed_states(lib, model, optim, lambda state: state.update(exp_avg=torch.zeros(8)))


def other_dtype(lib, model, optim):
    changed_states(lib, model, optim, lambda state: state.update(exp_avg=state["exp_avg"].double()))


def other_count(lib, model, optim):
    changed_states(lib, model, optim, lambda state: state.update(step=state["step"] + 1))


def other_type(lib, model, optim):
    changed_states(lib, model, optim, lambda state: state.update(exp_avg=3.0))


def other_names(lib, model, optim):
    changed_states(lib, model, optim, lambda state: state.pop("exp_avg"))


def fewer_parameters(lib, model, optim):
    """Rank 1 has no state of a parameter that is not sharded."""
    if dist.get_rank() == 1:
        del optim.state[model.bias]
    lib.FSDP.full_optim_state_dict(model, optim)


MISUSES = [
    (other_config, RuntimeError),
    (other_optim_config, RuntimeError),
    (different_kinds, AssertionError),
    (different_kinds_before, AssertionError),
    (no_states, ValueError),
    (mixed_keys, ValueError),
    (no_key_type, AssertionError),
    (empty_input, ValueError),
    (mixed_input, TypeError),
    (other_shape, ValueError),
    (other_dtype, ValueError),
    (other_count, ValueError),
    (other_type, ValueError),
    (other_names, ValueError),
    (fewer_parameters, RuntimeError),
]


def misused():
    for misuse, kind in MISUSES:
        for lib in (TORCHS, OURS):
            model, optim = trained(lib)
            with pytest.raises(kind) as caught:
                misuse(lib, model, optim)
            assert lib is TORCHS or isinstance(caught.value, shardwise.ShardwiseError), misuse.__name__


def test_misuses_raise_torchs_kinds_of_errors():
    run_ranks(misused, 2, kind="gloo")


def warned():
    model, optim = trained(OURS)
    full = OURS.FSDP.full_optim_state_dict(model, optim, rank0_only=False)
    for call in (
        lambda given: OURS.FSDP.full_optim_state_dict(model, optim, given),
        lambda given: OURS.FSDP.shard_full_optim_state_dict(full, model, given),
        lambda given: OURS.FSDP.scatter_full_optim_state_dict(full, model, given),
        lambda given: OURS.FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_NAME, model, given),
    ):
        with pytest.warns(FutureWarning, match="`optim_input` argument is deprecated"):
            call(groups_of(model))
    own = optim.state_dict()
    own["state"]["of all"] = 7
    with pytest.warns(UserWarning, match=r"\['of all'\] belong to no parameter"):
        OURS.FSDP.optim_state_dict(model, optim, own)
    whole = nested(OURS, is_wrapped=True, sharding_strategy=shardwise.ShardingStrategy.NO_SHARD)
    for kind in (OURS.SHARDED, OURS.LOCAL):
        OURS.FSDP.set_state_dict_type(whole, kind)
        with pytest.warns(UserWarning, match="NO_SHARD.* full tensors will be returned"):
            whole.state_dict()
    assert {each._state_dict_type for each in OURS.FSDP.fsdp_modules(whole)} == {OURS.LOCAL}


def test_what_torch_warns_of_is_warned_of():
    run_ranks(warned, 2, kind="gloo")


def kept_settings():
    """The functions of torch leave what is set as it was, after errors too."""
    model = nested(OURS, is_wrapped=True)
    OURS.FSDP.set_state_dict_type(model, OURS.LOCAL)
    dcp.get_model_state_dict(model)
    with contextlib.suppress(RuntimeError):
        dcp.set_model_state_dict(model, {"unknown": torch.ones(1)})
    assert OURS.FSDP.get_state_dict_type(model).state_dict_type is OURS.LOCAL


def test_torchs_functions_keep_what_is_set():
    run_ranks(kept_settings, 2)
