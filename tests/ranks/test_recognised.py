"""Libraries that know torch's FSDP take modules sharded with `shardwise.fully_shard` for sharded."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import shardwise
from shardwise import fully_shard
from shardwise.testing import run_ranks
from tests.ranks.models import TwoLayers


def sharded_and_asked():
    model = nn.Sequential(TwoLayers(), TwoLayers(), nn.Linear(8, 8))
    plain = TwoLayers()
    fully_shard(model[0])
    fully_shard(model)
    for module in (model[0], model):
        assert isinstance(module, torch_fsdp.FSDPModule)
        assert isinstance(module, shardwise.FSDPModule)
        for function in (torch_fsdp.fully_shard, fully_shard):
            assert function.state(module) is module_state(module)
    assert isinstance(model[0], TwoLayers)
    assert type(model[0]).__name__ == "FSDPTwoLayers"
    assert type(model).__name__ == "FSDPSequential"
    for module in (model[1], plain):
        assert not isinstance(module, torch_fsdp.FSDPModule)
        assert torch_fsdp.fully_shard.state(module) is None
    # A part of a container is made by its class, and not sharded.
    assert type(model[:1]) is nn.Sequential
    with pytest.raises(shardwise.StateError, match="cannot be copied by deepcopy"):
        copy.deepcopy(model)
    model(torch.ones(2, 8)).sum().backward()
    assert not any("state" in name for name in model.state_dict())


def module_state(module):
    state = torch_fsdp.fully_shard.state(module)
    assert state is not None
    return state


def test_a_sharded_module_is_an_instance_of_torchs_class_and_has_a_state():
    run_ranks(sharded_and_asked, 2)


def subclassed():
    model = fully_shard(TwoLayers())

    class Derived(type(model)):  # type: ignore[misc]
        pass

    assert type(Derived()) is TwoLayers
    members = [nn.Linear(8, 8), nn.ReLU()]
    fully_shard(members)
    assert all(isinstance(member, torch_fsdp.FSDPModule) for member in members)


def test_a_class_derived_from_a_sharded_one_makes_plain_modules():
    run_ranks(subclassed, 2)


def test_no_method_of_torchs_class_is_left_to_do_work():
    """Torch's class is a base for `isinstance` alone: what it offers to users, ours does."""
    offered = {name for name in vars(torch_fsdp.FSDPModule) if not name.startswith("_")}
    assert offered
    assert offered - set(vars(shardwise.FSDPModule)) == set()
