"""Optimizer states of wrapped models whose ranks' optimizers differ: by order, by groups, by what they hold."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import (
    FullyShardedDataParallel,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
)
from shardwise.errors import CheckpointError, ConfigError, RankDisagreement
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import full, same

FSDP = FullyShardedDataParallel
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


def layers(orig, **options):
    """Four layers of one shape: a state under another layer's name fits all the same."""
    model = seeded(nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))))
    inner = [FSDP(layer, use_orig_params=orig, **options) for layer in model]
    return FSDP(nn.Sequential(*inner), use_orig_params=orig, **options)


def plain_layers():
    return seeded(nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))))


def batch(step=0):
    return torch.arange(12.0).view(2, 6) / 10 + step


def step(model, optim, number=0):
    model(batch(number)).square().sum().backward()
    optim.step()
    optim.zero_grad()


def adam(params):
    return torch.optim.AdamW(params, lr=0.02)


def in_other_order(params):
    """The parameters in another order, and other groups, on every rank."""
    params, rank = list(params), dist.get_rank()
    order = params[rank:] + params[:rank]
    groups = [{"params": order[::2]}, {"params": order[1::2]}]
    return groups[::-1] if rank % 2 else groups


def reference(steps=2):
    model = plain_layers()
    optim = adam(model.parameters())
    for number in range(steps):
        step(model, optim, number)
    return FSDP.rekey_optim_state_dict(optim.state_dict(), OptimStateKeyType.PARAM_NAME, model), model


def close_states(got, want, note=""):
    assert list(got) == list(want), note
    for name, values in want.items():
        assert set(got[name]) == set(values)
        for key, value in values.items():
            torch.testing.assert_close(
                full(got[name][key]), value, rtol=1e-4, atol=1e-6, msg=f"{note} {name} {key}"
            )


def orders(orig, strategy):
    want, plain = reference()
    model = layers(orig, sharding_strategy=strategy)
    optim = adam(in_other_order(model.parameters()))
    for number in range(2):
        step(model, optim, number)
    for kind in (FULL, SHARDED):
        with FSDP.state_dict_type(model, kind):
            state = FSDP.optim_state_dict(model, optim)
        close_states(state["state"], want["state"], f"{orig} {kind}")
        # And back, into optimizers that list the parameters in yet another order, on one rank only.
        other = layers(orig, sharding_strategy=strategy)
        other.load_state_dict(model.state_dict())
        params = list(other.parameters())
        other_optim = adam(params[::-1] if dist.get_rank() == 0 else params)
        if dist.get_rank() == 1:
            state["state"] = dict(reversed(state["state"].items()))
        FSDP.optim_state_dict_to_load(other, other_optim, state, load_directly=True)
        step(other, other_optim, 5)
        again = FSDP.full_optim_state_dict(other, other_optim, rank0_only=False)
        on = copy.deepcopy(plain)
        on_optim = adam(on.parameters())
        named = copy.deepcopy(want)
        on_optim.load_state_dict(FSDP.rekey_optim_state_dict(named, OptimStateKeyType.PARAM_ID, on))
        step(on, on_optim, 5)
        expected = FSDP.rekey_optim_state_dict(on_optim.state_dict(), OptimStateKeyType.PARAM_NAME, on)
        close_states(again["state"], expected["state"], f"{orig} {kind} loaded")


@pytest.mark.parametrize("orig", [False, True])
def test_states_go_under_their_own_names_whatever_order_optimizers_have(orig):
    run_ranks(orders, 3, orig, ShardingStrategy.FULL_SHARD)
    run_ranks(orders, 2, orig, ShardingStrategy.NO_SHARD)


def other_groups():
    """A state by names, for a plain optimizer that has its groups the other way round."""
    want, _ = reference()
    model = plain_layers()
    params = dict(model.named_parameters())
    groups = [[name for name in params if name.endswith(kind)] for kind in ("bias", "weight")]
    rates = {"bias": 0.5, "weight": 0.25}
    saved = {
        "state": want["state"],
        "param_groups": [
            {**want["param_groups"][0], "lr": rates[names[0].split(".")[1]], "params": names}
            for names in groups
        ],
    }
    optim = adam([{"params": [params[name] for name in names[::-1]]} for names in groups[::-1]])
    optim.load_state_dict(FSDP.rekey_optim_state_dict(saved, OptimStateKeyType.PARAM_ID, model, optim=optim))
    names = {param: name for name, param in params.items()}
    for group in optim.param_groups:
        for param in group["params"]:
            assert group["lr"] == rates[names[param].split(".")[1]]
            same(optim.state[param]["exp_avg"], want["state"][names[param]]["exp_avg"], names[param])


def test_a_state_by_numbers_stands_as_the_optimizer_lists_its_groups():
    run_ranks(other_groups, 1)


def without_empty_ones():
    """Ranks leave out parameters of which they hold nothing: their peers tell what goes with them."""
    want, _ = reference()

    def grouped(model, with_empty):
        named = list(model.named_parameters())
        groups = [
            {
                "params": [p for name, p in named if name.endswith(kind) and (p.numel() or with_empty)],
                "kind": kind,
            }
            for kind in ("weight", "bias")
        ]
        return adam(groups)

    model = FSDP(plain_layers(), use_orig_params=True)
    optim = grouped(model, with_empty=False)
    assert 0 < sum(len(group["params"]) for group in optim.param_groups) < 8
    for number in range(2):
        step(model, optim, number)
    state = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
    close_states(state["state"], want["state"])
    for group in state["param_groups"]:
        assert sorted(group["params"]) == [f"{number}.{group['kind']}" for number in range(4)]
    other = FSDP(plain_layers(), use_orig_params=True)
    other_optim = grouped(other, with_empty=True)
    FSDP.optim_state_dict_to_load(other, other_optim, state, load_directly=True)
    close_states(FSDP.full_optim_state_dict(other, other_optim, rank0_only=False)["state"], want["state"])


def test_a_rank_need_not_hold_parameters_it_has_no_element_of():
    run_ranks(without_empty_ones, 2)


def disagreements(orig):
    first = dist.get_rank() == 0
    model = layers(orig)
    params = list(model.parameters())
    optim = adam(params)
    step(model, optim)
    # One rank's optimizer has lost a state, has another step count, or another kind of state; or holds less.
    kept = dict(optim.state)
    changed = params[0]

    def refused(match, optim=optim):
        with pytest.raises(RankDisagreement, match=match):
            FSDP.full_optim_state_dict(model, optim)

    if first:
        del optim.state[changed]
    refused("have different states of it: rank 0 .*has no state; rank 1 .*exp_avg")
    optim.state.update(kept)
    before = optim.state[changed]["step"]
    if first:
        optim.state[changed]["step"] = before + 1
    refused("rank 0 of the group has 'step' = 2.0; rank 1 of the group has 'step' = 1.0")
    optim.state[changed]["step"] = before
    if not first:
        optim.state[changed]["exp_avg"] = optim.state[changed]["exp_avg"].double()
    refused("'exp_avg' in torch.float32; rank 1 of the group has 'exp_avg' in torch.float64")
    optim.state[changed]["exp_avg"] = optim.state[changed]["exp_avg"].float()
    smaller = adam(params[1:] if first else params)
    smaller.state.update(
        {param: state for param, state in optim.state.items() if param is not changed or not first}
    )
    refused("rank 0 of the group has no such parameter in its optimizer", smaller)
    strange = adam(nn.Linear(2, 2).parameters()) if first else optim
    with pytest.raises(ConfigError if first else RankDisagreement, match="is not a parameter of the model"):
        FSDP.full_optim_state_dict(model, strange)
    state = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
    assert len(state["state"]) == 8


@pytest.mark.parametrize("orig", [False, True])
def test_ranks_whose_states_differ_all_refuse(orig):
    run_ranks(disagreements, 2, orig)


def given_state_dicts(orig):
    """A state dict that is passed is the one that is given out; what belongs to no parameter goes along."""
    model = layers(orig)
    optim = adam(model.parameters())
    step(model, optim)
    packed = optim.state_dict()
    doubled = {
        "state": {
            number: {key: value * 2 for key, value in values.items()}
            for number, values in packed["state"].items()
        }
        | {"count of all": 7},
        "param_groups": [{**group, "lr": 0.75} for group in packed["param_groups"]],
    }
    own, given = FSDP.optim_state_dict(model, optim), FSDP.optim_state_dict(model, optim, doubled)
    assert given["param_groups"][0]["lr"] == 0.75
    assert given["state"].pop("count of all") == 7
    for name, values in own["state"].items():
        for key, value in values.items():
            same(given["state"][name][key], value * 2, f"{name} {key}")
    loaded = FSDP.optim_state_dict_to_load(
        model, optim, {**given, "state": {**given["state"], "count of all": 7}}
    )
    assert loaded["state"]["count of all"] == 7
    with pytest.raises(ConfigError, match="has groups of"):
        FSDP.optim_state_dict(model, optim, {"state": {}, "param_groups": []})


@pytest.mark.parametrize("orig", [False, True])
def test_a_state_dict_that_is_passed_is_the_one_that_is_given(orig):
    run_ranks(given_state_dicts, 2, orig)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.scale * self.layer(x)


def nadam(params):
    return torch.optim.NAdam(params, lr=0.05)


def counts_beside_scalars(orig):
    """A count without dims beside a parameter without dims: which of the two a state is, other parameters tell."""
    plain = seeded(Scaled())
    plain_optim = nadam(plain.parameters())
    model = FSDP(seeded(Scaled()), use_orig_params=orig)
    optim = nadam(model.parameters())
    for number in range(2):
        step(plain, plain_optim, number)
        step(model, optim, number)
    state = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
    other = FSDP(seeded(Scaled()), use_orig_params=orig)
    other.load_state_dict(model.state_dict())
    other_optim = nadam(other.parameters())
    FSDP.optim_state_dict_to_load(other, other_optim, state, load_directly=True)
    assert all(values["mu_product"].dim() == 0 for values in other_optim.state.values())
    step(plain, plain_optim, 2)
    step(other, other_optim, 2)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("orig", [False, True])
def test_counts_of_a_parameter_without_dims_are_no_elements(orig):
    run_ranks(counts_beside_scalars, 2, orig)


def unlike_ones():
    """What one flat parameter cannot hold is refused, and kept apart with original names."""
    want, _ = reference()
    state = {**want, "state": {name: dict(values) for name, values in want["state"].items()}}
    state["state"]["2.bias"]["step"] = state["state"]["2.bias"]["step"] + 1
    flat, apart = layers(False), layers(True)
    with pytest.raises(CheckpointError, match=r"'step' is not the same(.|\n)*use_orig_params=True"):
        FSDP.shard_full_optim_state_dict(state, flat)
    del state["state"]["2.bias"]
    with pytest.raises(CheckpointError, match=r"'step' is not the same(.|\n)*use_orig_params=True"):
        FSDP.shard_full_optim_state_dict(state, flat)
    assert FSDP.shard_full_optim_state_dict(state, apart)
    names = list(want["state"])
    group = {**want["param_groups"][0]}
    grouped = {
        **want,
        "param_groups": [{**group, "params": names[:3]}, {**group, "lr": 0.5, "params": names[3:]}],
    }
    for model in (flat, apart):
        with pytest.raises(CheckpointError, match=r"lr is 0\.02 and 0\.5"):
            FSDP.shard_full_optim_state_dict(grouped, model)
        alike = {**want, "param_groups": [{**group, "params": names[:4]}, {**group, "params": names[4:]}]}
        assert FSDP.shard_full_optim_state_dict(alike, model)["param_groups"][0]["lr"] == 0.02
        lacking = {**want, "param_groups": [{**group, "params": names[1:]}]}
        with pytest.raises(CheckpointError, match=r"no group for the parameters \['0.weight'\]"):
            FSDP.shard_full_optim_state_dict(lacking, model)
    by_number = {**adam(flat.parameters()).state_dict(), "state": {0: {}}}
    with pytest.raises(ConfigError, match="holds 2 parameters"):
        FSDP.rekey_optim_state_dict(by_number, OptimStateKeyType.PARAM_NAME, flat)


def test_states_that_one_flat_parameter_cannot_hold_are_refused():
    run_ranks(unlike_ones, 2)


def empty_groups(orig):
    """A group without parameters keeps its place and its settings."""
    model = layers(orig)
    params = list(model.parameters())
    optim = adam([{"params": params}, {"params": [], "lr": 0.5}])
    step(model, optim)
    state = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
    other = adam([{"params": [], "lr": 7.0}, {"params": params, "lr": 7.0}])
    FSDP.optim_state_dict_to_load(model, other, state, load_directly=True)
    assert [group["lr"] for group in other.param_groups] == [0.5, 0.02]
    step(model, other)


@pytest.mark.parametrize("orig", [False, True])
def test_empty_groups_have_settings_too(orig):
    run_ranks(empty_groups, 2, orig)


def different_shards():
    model = layers(True)
    optim = adam(model.parameters())
    step(model, optim)
    sharded = FSDP.sharded_optim_state_dict(model, optim)
    if dist.get_rank() == 1:
        del sharded["state"]["1.weight"]["exp_avg"]
    with pytest.raises(RankDisagreement, match=r"ranks load different optimizer states: .*1.weight.*exp_avg"):
        FSDP.flatten_sharded_optim_state_dict(sharded, model, optim)


def test_states_in_dtensors_that_differ_between_ranks_are_refused_by_all():
    run_ranks(different_shards, 2)
