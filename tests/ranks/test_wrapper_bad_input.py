"""What cannot work is refused with what, where and a fix, and the model is as it was."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import (
    CustomPolicy,
    FullOptimStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from shardwise.errors import ConfigError, ConfigTypeError, StateError
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import Layers, TwoLayers, data

FSDP = FullyShardedDataParallel


def refusals():
    mesh = init_device_mesh("cpu", (2,))
    return [
        ({"auto_wrap_policy": CustomPolicy(lambda m: 3)}, "returned 3 for a"),
        (
            {"auto_wrap_policy": CustomPolicy(lambda m: {"speed": 1} if isinstance(m, TwoLayers) else False)},
            r"unknown options \['speed'\]",
        ),
        ({"auto_wrap_policy": 17}, "auto_wrap_policy is 17"),
        ({"sharding_strategy": "full"}, "'full' is not a ShardingStrategy"),
        ({"backward_prefetch": 1}, "1 is not a BackwardPrefetch"),
        ({"mixed_precision": torch.bfloat16}, "is not a MixedPrecision"),
        ({"mixed_precision": MixedPrecision(param_dtype=torch.int8)}, "not a floating-point dtype"),
        ({"cpu_offload": True}, "True is not a CPUOffload"),
        ({"process_group": 3}, "process_group is a int"),
        ({"device_mesh": 3}, "int"),
        ({"device_mesh": mesh, "process_group": dist.group.WORLD}, "both process_group and device_mesh"),
        ({"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}, "device mesh has 1 axes"),
        (
            {"process_group": dist.group.WORLD, "sharding_strategy": ShardingStrategy.HYBRID_SHARD},
            "needs two groups",
        ),
        ({"ignored_modules": [3]}, "a int cannot be ignored"),
        ({"ignored_modules": [], "ignored_states": []}, "both ignored_modules and ignored_states"),
        ({"device_id": torch.device("meta")}, "is the meta device"),
    ]


def refused():
    for options, message in refusals():
        model = seeded(Layers())
        before = {name: (param, param.detach().clone()) for name, param in model.named_parameters()}
        with pytest.raises(ConfigError, match=message) as caught:
            FSDP(model, **options)
        assert "FullyShardedDataParallel" in str(caught.value) or "Policy" in str(caught.value), options
        assert "fix:" in str(caught.value)
        for name, param in model.named_parameters():
            assert param is before[name][0]
            assert torch.equal(param, before[name][1])
        assert not any(isinstance(module, FSDP) for module in model.modules())
    for model, message in [
        ("model", "was given a str"),
        (fully_shard(nn.Linear(2, 2)), "sharded by fully_shard already"),
    ]:
        with pytest.raises(ConfigError, match=message):
            FSDP(model)
    model = FSDP(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="whose '0' is wrapped already"):
        FSDP(nn.Sequential(model, nn.Linear(2, 2)), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    with pytest.raises(ConfigError, match="a wrapped Linear is to be ignored"):
        FSDP(nn.Sequential(model), ignored_modules=[model])
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].weight = nn.Parameter(torch.eye(2).to_sparse())
    with pytest.raises(ConfigError, match="is sparse"):
        FSDP(model)
    with torch.device("meta"):
        without_reset = nn.Sequential(nn.Linear(2, 2))
        without_reset.weight = nn.Parameter(torch.empty(2))
    with pytest.raises(ConfigError, match="no reset_parameters"):
        FSDP(without_reset)
    with pytest.raises(ConfigError, match="on the meta device after param_init_fn"):
        FSDP(without_reset, param_init_fn=lambda module: None)


def test_options_that_cannot_work_are_refused_and_change_nothing():
    run_ranks(refused, 2)


def tied_in_two_dtypes():
    def tied():
        model = seeded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)))
        model[1].weight = model[0].weight
        return model

    as_bf16 = MixedPrecision(param_dtype=torch.bfloat16)
    model = tied()
    of_second = CustomPolicy(lambda m: {"mixed_precision": as_bf16} if m is model[1] else False)
    for options in (
        {"auto_wrap_policy": of_second},
        {"auto_wrap_policy": of_second, "use_orig_params": True},
    ):
        with pytest.raises(
            ConfigError, match=r"computes in torch\.bfloat16; this wrapper would compute in torch\.float32"
        ):
            FSDP(model, **options)
        assert not any(isinstance(module, FSDP) for module in model.modules())
    for use_orig_params in (False, True):
        by_hand = tied()
        by_hand[0] = FSDP(by_hand[0], mixed_precision=as_bf16, use_orig_params=use_orig_params)
        with pytest.raises(ConfigError, match="parameter 'weight' of a Linear is tied"):
            FSDP(by_hand[1], use_orig_params=use_orig_params)
        # Alike, or stored in the other's dtype, they are one.
        alike = FSDP(by_hand, mixed_precision=as_bf16, use_orig_params=use_orig_params)
        alike(torch.ones(2, 4)).sum().backward()
    stored = tied().bfloat16()
    stored[0] = FSDP(stored[0], mixed_precision=as_bf16)
    FSDP(stored)(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()


def test_a_parameter_tied_across_wrappers_has_one_dtype():
    run_ranks(tied_in_two_dtypes, 2)


def refused_later():
    model = FSDP(nn.Linear(4, 4))
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(StateError, match="cannot be copied"):
            copying(model)
    with pytest.raises(ConfigTypeError, match=r"ShardedStateDictConfig\(.*\) is not a FullStateDictConfig"):
        FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, ShardedStateDictConfig())
    with pytest.raises(ConfigTypeError, match="is not a LocalOptimStateDictConfig"):
        FSDP.set_state_dict_type(
            model, StateDictType.LOCAL_STATE_DICT, optim_state_dict_config=FullOptimStateDictConfig()
        )
    with pytest.raises(ConfigTypeError, match="is not a StateDictType"):
        FSDP.set_state_dict_type(model, "full")
    pair = nn.Sequential(FSDP(nn.Linear(2, 2)), FSDP(nn.Linear(2, 2)))
    FSDP.set_state_dict_type(pair[0], StateDictType.LOCAL_STATE_DICT)
    with pytest.raises(StateError, match="different kinds of state dict"):
        FSDP.get_state_dict_type(pair)
    # A parameter that is not this rank's shard cannot take a shard's place.
    model = FSDP(nn.Linear(4, 4), use_orig_params=True)
    kept = model.module.weight
    model.module.weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(StateError, match="parameter 'weight' was replaced"):
        model(data(0, 0, 2, 4))
    model.module.weight = kept
    model(data(0, 0, 2, 4)).sum().backward()


def test_calls_that_cannot_work_are_refused():
    run_ranks(refused_later, 2)
