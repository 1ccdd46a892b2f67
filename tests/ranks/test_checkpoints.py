"""Torch's distributed checkpoints and its full, sharded and offloaded state dicts, of models and optimizers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import Layers, data, full, same
from tests.ranks.subject import fully_shard
from tests.ranks.tables import cases_of, run_cases, slow

WIDTH = 5


def build(seed=0, device="cpu"):
    with torch.device(device):
        model = Layers(width=WIDTH)
    if device != "meta":
        seeded(model, seed)
    for unit in (*model.layers, model):
        fully_shard(unit)
    return model


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model, optim, steps):
    for step in steps:
        model(data(step, dist.get_rank(), 2, WIDTH)).square().mean().backward()
        optim.step()
        optim.zero_grad()


def values_of(model, optim):
    """Everything that a checkpoint must bring back, whole and by name."""
    values = {name: full(param.detach()).clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        for key, value in optim.state[param].items():
            values[f"{name}: {key}"] = full(value).clone()
    return values


def check_values(model, optim, values, what):
    got = values_of(model, optim)
    assert set(got) == set(values), f"{what}: {set(got) ^ set(values)}"
    for name, value in values.items():
        same(got[name], value, f"{what}: {name}")


# --- DCP ------------------------------------------------------------------------------------------------------


def save_checkpoint(folder):
    model = build()
    optim = adamw(model)
    train(model, optim, range(2))
    model_state, optim_state = get_state_dict(model, optim)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=folder)
    return values_of(model, optim)


def load_checkpoint(folder, values, moment):
    model = build(seed=9)
    optim = adamw(model)
    if moment == "after a step":
        train(model, optim, range(1))
    elif moment == "after an evaluation":
        with torch.no_grad():
            model(data(0, dist.get_rank(), 2, WIDTH))
    model_state, optim_state = get_state_dict(model, optim)
    dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=folder)
    set_state_dict(model, optim, model_state_dict=model_state, optim_state_dict=optim_state)
    check_values(model, optim, values, moment)
    loss = model(data(0, 0, 2, WIDTH)).square().mean()
    with torch.no_grad():
        plain = seeded(Layers(width=WIDTH))
        for name, param in plain.named_parameters():
            param.copy_(values[name])
        same(loss.detach(), plain(data(0, 0, 2, WIDTH)).square().mean(), f"{moment}: loss")
    loss.backward()
    optim.step()


def test_a_checkpoint_of_4_ranks_is_loaded_on_2_and_3(tmp_path):
    values = run_ranks(save_checkpoint, 4, str(tmp_path), kind="gloo")[0]
    moments = ("at the start", "after a step", "after an evaluation")
    for world_size in (2, 3):
        for moment in moments if world_size == 2 else moments[:1]:
            run_ranks(load_checkpoint, world_size, str(tmp_path), values, moment, kind="gloo")


# --- full, sharded, offloaded -----------------------------------------------------------------------------------

OPTIONS = {
    "sharded": StateDictOptions(),
    "sharded, offloaded": StateDictOptions(cpu_offload=True),
    "full": StateDictOptions(full_state_dict=True),
    "full, offloaded": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "full, from rank 0": StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    "flat optimizer": StateDictOptions(flatten_optimizer_state_dict=True),
}


def there_and_back(how):
    """One model trains on without a stop; the other is made of its state half way. They must not part."""
    options = OPTIONS[how]
    model = build()
    optim = adamw(model)
    train(model, optim, range(2))
    reading = StateDictOptions(
        full_state_dict=options.full_state_dict,
        cpu_offload=options.cpu_offload,
        flatten_optimizer_state_dict=options.flatten_optimizer_state_dict,
    )
    states = (
        get_model_state_dict(model, options=reading),
        get_optimizer_state_dict(model, optim, options=reading),
    )
    offloaded = options.full_state_dict and options.cpu_offload
    if not (offloaded and dist.get_rank() != 0):
        for name, value in states[0].items():
            assert isinstance(value, DTensor) != options.full_state_dict, f"{how}: {name} is {type(value)}"
    # They refer to the optimizer's own tensors, as torch's do.
    states = copy.deepcopy(states)
    if options.broadcast_from_rank0 and dist.get_rank() != 0:
        states = ({}, {})
    if offloaded:
        # torch gives the full state to rank 0 alone; a file would carry it to the others.
        given = [states]
        dist.broadcast_object_list(given, 0)
        states = given[0]

    other = build(seed=9)
    other_optim = adamw(other)
    set_model_state_dict(other, states[0], options=options)
    set_optimizer_state_dict(other, other_optim, states[1], options=options)
    check_values(other, other_optim, values_of(model, optim), how)
    train(model, optim, range(2, 4))
    train(other, other_optim, range(2, 4))
    check_values(other, other_optim, values_of(model, optim), f"{how}, trained on")


SOME = ("sharded", "full, offloaded", "flat optimizer")


@pytest.mark.parametrize("options", [SOME, slow(OPTIONS)], ids=["some", "all"])
def test_training_goes_on_from_a_state_as_if_it_had_never_stopped(options):
    run_cases(there_and_back, 3, cases_of(how=options), kind="gloo")


def between_forward_and_backward():
    """The model's state alone; torch looks optimizer states up by the parameters that the modules show."""
    model = build()
    loss = model(data(0, dist.get_rank(), 2, WIDTH)).square().mean()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    shards = get_model_state_dict(model)
    for name, value in seeded(Layers(width=WIDTH)).state_dict().items():
        same(whole[name], value, name)
        same(full(shards[name]), value, name)
    loss.backward()
    other = build(seed=9)
    loss = other(data(0, dist.get_rank(), 2, WIDTH)).square().mean()
    set_model_state_dict(other, shards)
    # As in a plain model: forward used values that are gone.
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    other.zero_grad()
    same(
        other(data(1, 0, 2, WIDTH)).detach(),
        seeded(Layers(width=WIDTH))(data(1, 0, 2, WIDTH)).detach(),
        "output",
    )


def test_a_models_state_is_read_and_set_between_forward_and_backward():
    run_ranks(between_forward_and_backward, 2, kind="gloo")


def into_meta():
    """A full state dict that rank 0 alone holds fills a model that has no memory yet."""
    source = seeded(Layers(width=WIDTH), 4)
    model = build(device="meta")
    model.to_empty(device="cpu")
    state = (
        {name: value.clone() for name, value in source.state_dict().items()} if dist.get_rank() == 0 else {}
    )
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    for (name, param), expected in zip(model.named_parameters(), source.parameters(), strict=True):
        same(full(param.detach()), expected.detach(), name)
    same(model(data(0, 0, 2, WIDTH)).detach(), source(data(0, 0, 2, WIDTH)).detach(), "output")


def test_a_full_state_dict_of_rank_0_fills_a_model_from_the_meta_device():
    run_ranks(into_meta, 2, kind="gloo")


def optimizer_state_by_torch_save(tmp_folder):
    """The plain way, each rank its own file: `optimizer.state_dict()` through `torch.save`."""
    model = build()
    optim = adamw(model)
    train(model, optim, range(2))
    file = f"{tmp_folder}/{dist.get_rank()}.pt"
    torch.save({"model": model.state_dict(), "optim": optim.state_dict()}, file)
    other = build(seed=9)
    other_optim = adamw(other)
    loaded = torch.load(file, weights_only=True)
    other.load_state_dict(loaded["model"])
    other_optim.load_state_dict(loaded["optim"])
    check_values(other, other_optim, values_of(model, optim), "loaded")
    train(model, optim, range(2, 4))
    train(other, other_optim, range(2, 4))
    check_values(other, other_optim, values_of(model, optim), "trained on")


def test_each_rank_may_save_its_shards_and_optimizer_in_a_file_of_its_own(tmp_path):
    run_ranks(optimizer_state_by_torch_save, 2, str(tmp_path), kind="gloo")
