"""Whole parameters, clipping, and state of models and optimizers, of any kind, from and to any API."""

from __future__ import annotations

import io
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.tensor import DTensor

from shardwise import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    clip_grad_norm_,
    fully_shard,
)
from shardwise.engine.unit.membership import ShardedPlaceholder
from shardwise.errors import CheckpointError, ConfigError, StateError
from shardwise.testing import run_ranks
from shardwise.testing.workloads import WORKLOADS, seeded
from tests.ranks.models import Layers, data, full, same
from tests.ranks.wrapped import ONE_AXIS, device, wrapped

FSDP = FullyShardedDataParallel
FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)
TIED = WORKLOADS["tied transformer"]


def every_option():
    return [
        {"sharding_strategy": strategy, "use_orig_params": orig}
        for strategy, orig in itertools.product(ONE_AXIS, (False, True))
    ]


def same_state(got, want):
    assert list(got) == list(want)
    for name in want:
        same(full(got[name]).cpu(), want[name], name)


def train_step(model, step=0):
    batch = TIED.data(step, 0, dist.get_rank(), device())
    TIED.loss(model(*batch), batch).backward()


# --- whole parameters -----------------------------------------------------------------------------------------------


def summons():
    plain = TIED.model()
    for options in every_option():
        model = wrapped("tied transformer", **options)
        shown = [id(param) for param in model.parameters()]
        with FSDP.summon_full_params(model):
            for name, param in plain.named_parameters():
                same(dict(model.named_parameters())[name].detach().cpu(), param.detach(), name)
            with torch.no_grad():
                model.layers[1].up.weight.fill_(2.0)
                model.head.weight[3:5] = 4.0
        assert [id(param) for param in model.parameters()] == shown
        state = model.state_dict()
        assert state["layers.1.up.weight"].eq(2.0).all()
        assert state["embed.weight"][3:5].eq(4.0).all(), "a tied parameter is one parameter"
        # Not written back, a change is lost; with recurse=False inner wrappers keep their shards.
        with FSDP.summon_full_params(model, writeback=False, recurse=False), torch.no_grad():
            model.norm.weight.zero_()
            assert (
                isinstance(model.layers[0].up.weight, ShardedPlaceholder)
                or model.layers[0].up.weight.dim() == 1
                or (options["sharding_strategy"] is ShardingStrategy.NO_SHARD)
            )
        assert not model.state_dict()["norm.weight"].eq(0).any()
        with FSDP.summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
            shown_now = dict(model.named_parameters())
            is_first = dist.get_rank() == 0
            assert (list(shown_now) == [name for name, _ in plain.named_parameters()]) == (
                is_first or options["use_orig_params"]
            )
            if is_first:
                assert shown_now["layers.0.up.weight"].shape == plain.layers[0].up.weight.shape
            else:
                assert [id(param) for param in shown_now.values()] == shown
        train_step(model)
        with FSDP.summon_full_params(model, with_grads=True):
            model.norm.weight.grad.fill_(5.0)
        with FSDP.summon_full_params(model, with_grads=True, writeback=False):
            assert model.norm.weight.grad.eq(5.0).all()
            assert all(param.grad is not None for param in model.parameters())
        # The whole is what was changed between steps, also where parameters were kept unsharded.
        model.eval()
        with torch.no_grad():
            model(*TIED.data(0, 0, 0, device()))
        with FSDP.summon_full_params(model), torch.no_grad():
            for param in model.parameters():
                param.zero_()
        with torch.no_grad():
            assert model(*TIED.data(0, 0, 0, device())).eq(0).all()
            for param in model.parameters():
                param.fill_(1.0)
            assert not model(*TIED.data(0, 0, 0, device())).eq(0).any(), "stale parameters were used"

        model.apply(lambda module: nn.init.ones_(module.weight) if isinstance(module, nn.LayerNorm) else None)
        assert model.state_dict()["layers.2.norm1.weight"].eq(1).all()


def test_summoned_parameters_are_whole_and_changes_are_written_back():
    run_ranks(summons, 2)
    run_ranks(summons, 3)


def replacements(orig):
    """Parameters that are replaced, whole or as shards; and what does not fit, which changes nothing."""
    model = FSDP(nn.Sequential(FSDP(nn.Linear(4, 3), use_orig_params=orig)), use_orig_params=orig)
    layer = model.module[0].module
    with FSDP.summon_full_params(model):
        layer.weight = nn.Parameter(torch.full((3, 4), 2.0))
        layer.bias.data = torch.full((3,), 1.0)
    assert model(torch.ones(1, 4)).tolist() == [[9.0, 9.0, 9.0]]
    model(torch.ones(1, 4)).sum().backward()
    with FSDP.summon_full_params(model, with_grads=True):
        layer.bias = nn.Parameter(torch.zeros(3))
        layer.bias.grad = torch.full((3,), 7.0)
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        assert layer.bias.grad.tolist() == [7.0, 7.0, 7.0]
    summoned = FSDP.summon_full_params(model)
    with (
        pytest.raises(StateError, match=r"parameter 'bias' is a tensor of shape \(5,\)"),
        summoned,
    ):
        layer.bias = nn.Parameter(layer.weight.detach().fill_(5.0).new_zeros(5))
    summoned = FSDP.summon_full_params(model)
    with pytest.raises(StateError, match="parameter 'weight' is missing after summon_full_params"), summoned:
        del layer.weight
    assert model(torch.ones(1, 4)).tolist() == [[8.0, 8.0, 8.0]]
    kept = [param.data for param in model.parameters()]
    for param in model.parameters():
        param.data = torch.ones(99)
    with pytest.raises(StateError, match=r"shape \(99,\), which cannot take the place of a plain tensor of"):
        model(torch.ones(1, 4))
    for param, values in zip(model.parameters(), kept, strict=True):
        param.data = values.clone()
    assert model(torch.ones(1, 4)).tolist() == [[8.0, 8.0, 8.0]]


@pytest.mark.parametrize("orig", [False, True])
def test_replaced_parameters_are_taken_over_if_they_fit(orig):
    run_ranks(replacements, 2, orig)


def refused_summons():
    model = FSDP(seeded(Layers()))
    with (
        pytest.raises(ConfigError, match="exclude each other"),
        FSDP.summon_full_params(model, rank0_only=True),
    ):
        pass
    with (
        FSDP.summon_full_params(model),
        pytest.raises(StateError, match="already active for unit"),
        FSDP.summon_full_params(model),
    ):
        pass
    caught = []

    def summon(*_):
        try:
            with FSDP.summon_full_params(model):
                pass
        except StateError as error:
            caught.append(str(error))

    handle = model.layers[0].register_forward_pre_hook(summon)
    output = model(data(0, 0, 2, 6))
    handle.remove()
    output.register_hook(summon)
    output.sum().backward()
    assert len(caught) == 2, "summoned in forward or backward"
    assert all("between steps" in message for message in caught)
    model(data(0, 0, 2, 6)).sum().backward()


def test_summoning_in_the_middle_of_a_step_is_refused_and_harms_nothing():
    run_ranks(refused_summons, 2)


# --- clipping -------------------------------------------------------------------------------------------------------


def clips():
    world = dist.get_world_size()
    for options, order in itertools.product(every_option(), (2.0, 1.0, float("inf"))):
        model, plain = seeded(Layers()), seeded(Layers())
        # One strategy for the layers, another for the root, and one layer left alone.
        ignored = model.layers[2]
        for index in range(2):
            model.layers[index] = FSDP(model.layers[index], **options)
        model = FSDP(model, ignored_modules=[ignored], use_orig_params=options["use_orig_params"])
        model.layers[2].to(device())
        model(data(0, 0, 2, 6).to(device())).sum().backward()
        plain(data(0, 0, 2, 6)).sum().backward()
        want = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, order)
        got = clip_grad_norm_(model.parameters(), 1e9, order)
        assert torch.allclose(got.cpu(), want, rtol=1e-5), (options, order, got, want)
        assert torch.equal(model.clip_grad_norm_(0.5, order), got)
        with FSDP.summon_full_params(model, with_grads=True, writeback=False):
            for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert torch.allclose(param.grad.cpu(), expected.grad, rtol=1e-4, atol=1e-6), (
                    name,
                    options,
                    order,
                )
    with pytest.raises(StateError, match="clip_grad_norm_ was called on a wrapper inside another"):
        model.layers[0].clip_grad_norm_(1.0)
    return world


def test_clipping_is_that_of_the_unsharded_model():
    run_ranks(clips, 2)
    run_ranks(clips, 3)


# --- state dicts ----------------------------------------------------------------------------------------------------


def kinds():
    want = TIED.model().state_dict()
    for options in every_option():
        model = wrapped("tied transformer", **options)
        is_sharded = (
            options["sharding_strategy"] is not ShardingStrategy.NO_SHARD and dist.get_world_size() > 1
        )
        same_state(model.state_dict(), want)
        for value in model.state_dict().values():
            assert not isinstance(value, DTensor)
            assert value.untyped_storage().nbytes() == 4 * value.numel(), "a value keeps others' memory"
        with FSDP.state_dict_type(model, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
            state = model.state_dict()
            assert list(state) == (list(want) if dist.get_rank() == 0 else [])
        with FSDP.state_dict_type(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=True)):
            state = model.state_dict()
            same_state(state, want)
            assert isinstance(state["norm.weight"], DTensor) == is_sharded
            held = sum(full_or_local(value).numel() for value in state.values())
            total = sum(value.numel() for value in want.values())
            assert held <= total / (dist.get_world_size() if is_sharded else 1) + 12 * len(state)
        with FSDP.state_dict_type(model, LOCAL):
            local = {name: value.clone() for name, value in model.state_dict().items()}
        if is_sharded:
            shown = {
                name.replace("_fsdp_wrapped_module.", ""): param for name, param in model.named_parameters()
            }
            assert set(shown) <= set(local)
            for name, param in shown.items():
                same(local[name].cpu(), param.detach().cpu(), name)
        else:
            same_state(local, want)
        assert FSDP.get_state_dict_type(model).state_dict_type is FULL
        # Each of them brings a model back, in the middle of training too.
        train_step(model)
        for kind, state in ((FULL, want), (SHARDED, None), (LOCAL, local)):
            other = wrapped("tied transformer", **options)
            with FSDP.state_dict_type(other, kind):
                if state is None:
                    state = other.state_dict()
                with torch.no_grad():
                    for param in other.parameters():
                        param.zero_()
                other.load_state_dict(state)
            same_state(other.state_dict(), want)
        # A saved state is as large as its tensors, and needs nothing of ours to be loaded.
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        assert buffer.tell() < 4 * sum(value.numel() for value in want.values()) + 1000 * len(want)
        buffer.seek(0)
        TIED.model().load_state_dict(torch.load(buffer, weights_only=True))
        before = FSDP.set_state_dict_type(model, LOCAL)
        assert before.state_dict_type is FULL
        assert FSDP.get_state_dict_type(model).state_dict_type is LOCAL


def full_or_local(value):
    return value.to_local() if isinstance(value, DTensor) else value


def test_state_dicts_of_every_kind_are_given_and_taken():
    run_ranks(kinds, 2)
    run_ranks(kinds, 3)


def unfit():
    for options in every_option():
        model = wrapped("tied transformer", **options)
        before = model.state_dict()
        state = {name: value + 1 for name, value in before.items()}
        for change, message in [
            ({"norm.weight": torch.zeros(5)}, "size mismatch for norm.weight"),
            ({"extra": torch.zeros(1)}, 'Unexpected key(s) in state_dict: "extra"'),
            ({"layers.1.up.bias": None}, 'Missing key(s) in state_dict: "layers.1.up.bias"'),
        ]:
            changed = {name: value for name, value in {**state, **change}.items() if value is not None}
            with pytest.raises(CheckpointError) as caught:
                model.load_state_dict(changed)
            assert message in str(caught.value)
            same_state(model.state_dict(), before)
        found = model.load_state_dict(
            {"norm.weight": state["norm.weight"], "extra": torch.zeros(1)}, strict=False
        )
        assert found.unexpected_keys == ["extra"]
        assert set(found.missing_keys) == set(before) - {"norm.weight"}
        assert torch.equal(model.state_dict()["norm.weight"], state["norm.weight"])
        train_step(model)


def test_a_state_dict_that_does_not_fit_loads_nothing():
    run_ranks(unfit, 2)


# --- optimizers and other APIs --------------------------------------------------------------------------------------


def adam(params):
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)


def trained(options, steps=2):
    model = wrapped("tied transformer", **options)
    optim = adam(model.parameters())
    for step in range(steps):
        train_step(model, step)
        optim.step()
        optim.zero_grad()
    return model, optim


def save(path, options):
    """Trains two steps and saves everything; the third step's result is what others must arrive at."""
    model, optim = trained(options)
    state = FSDP.full_optim_state_dict(model, optim)
    saved = model.state_dict()
    if dist.get_rank() == 0:
        names = [name for name, _ in TIED.model().named_parameters()]
        assert sorted(state["state"]) == sorted(names)
        assert set(state["param_groups"][0]["params"]) == set(names)
        torch.save((saved, state), path)
    else:
        assert state == {}


def resume(path, options):
    """One step on from what was saved: the parameters after it, whole."""
    saved, state = torch.load(path, weights_only=True)
    model = wrapped("tied transformer", **options)
    model.load_state_dict(saved)
    optim = adam(model.parameters())
    optim.load_state_dict(FSDP.optim_state_dict_to_load(model, optim, state))
    again = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
    assert list(again["state"]) == list(state["state"]) or set(again["state"]) == set(state["state"])
    for name, values in state["state"].items():
        for key, value in values.items():
            same(again["state"][name][key], value, f"{name} {key}")
    fixed_step(model, optim)
    return model.state_dict()


def fixed_step(model, optim):
    """A step with the same batch on every rank, so that any world must agree."""
    batch = TIED.data(9, 0, 0, next(iter(optim.param_groups[0]["params"])).device)
    TIED.loss(model(*batch), batch).backward()
    optim.step()


def resume_fully_shard(path):
    saved, state = torch.load(path, weights_only=True)
    model = TIED.model()
    for unit in (*TIED.units(model), model):
        fully_shard(unit)
    model.load_state_dict(saved)
    optim = adam(model.parameters())
    # By way of a wrapper of the same model: it gives the state in the DTensors that fully_shard has.
    other = wrapped("tied transformer")
    other_optim = adam(other.parameters())
    FSDP.optim_state_dict_to_load(other, other_optim, state, load_directly=True)
    sharded = FSDP.sharded_optim_state_dict(other, other_optim)
    optim.load_state_dict(FSDP.rekey_optim_state_dict(sharded, OptimStateKeyType.PARAM_ID, model))
    # And back.
    named = FSDP.rekey_optim_state_dict(optim.state_dict(), OptimStateKeyType.PARAM_NAME, model)
    back = wrapped("tied transformer", use_orig_params=True)
    back_optim = adam(back.parameters())
    back_optim.load_state_dict(FSDP.flatten_sharded_optim_state_dict(named, back, back_optim))
    back.load_state_dict(model.state_dict())
    for step_of, optim_of in ((model, optim), (back, back_optim)):
        fixed_step(step_of, optim_of)
    wholes = {name: full(value) for name, value in model.state_dict().items()}
    for name, value in back.state_dict().items():
        same(value, wholes[name], f"back: {name}")
    return wholes


def resume_plain(path):
    saved, state = torch.load(path, weights_only=True)
    model = TIED.model()
    model.load_state_dict(saved)
    optim = adam(model.parameters())
    optim.load_state_dict(FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, model))
    named = FSDP.rekey_optim_state_dict(optim.state_dict(), OptimStateKeyType.PARAM_NAME, model)
    assert set(named["state"]) == set(state["state"])
    fixed_step(model, optim)
    return model.state_dict()


def test_model_and_optimizer_go_from_the_wrapper_to_any_world_and_api_and_back(tmp_path):
    for number, options in enumerate(every_option()):
        path = tmp_path / f"{number}.pt"
        run_ranks(save, 2, path, options)
        want = resume_plain(path)
        others = every_option()
        for world_size, other in ((2, options), (3, others[(number + 3) % 6]), (1, others[(number + 1) % 6])):
            for got in run_ranks(resume, world_size, path, other):
                for name in want:
                    same(got[name], want[name], f"{options} to {other} on {world_size}: {name}", 1e-6)
        if number < 2:
            for got in run_ranks(resume_fully_shard, 2, path):
                for name in want:
                    same(got[name], want[name], f"fully_shard: {name}", 1e-6)


def optimizer_kinds():
    for options in every_option():
        model, optim = trained(options)
        want = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
        for kind in (FULL, SHARDED, LOCAL):
            with FSDP.state_dict_type(model, kind):
                state = FSDP.optim_state_dict(model, optim)
            other, other_optim = trained(options, steps=1)
            for group in other_optim.param_groups:
                group["lr"] = 5.0
            FSDP.optim_state_dict_to_load(other, other_optim, state, load_directly=True)
            assert other_optim.param_groups[0]["lr"] == 0.02
            got = FSDP.full_optim_state_dict(other, other_optim, rank0_only=False)
            for name, values in want["state"].items():
                for key, value in values.items():
                    same(got["state"][name][key], value, f"{options} {kind.name} {name} {key}")
        scattered = FSDP.scatter_full_optim_state_dict(
            want if dist.get_rank() == 0 else None, model, optim=optim
        )
        sharded = FSDP.shard_full_optim_state_dict(want, model, optim=optim)
        for found in (scattered, sharded):
            other, other_optim = trained(options, steps=1)
            other_optim.load_state_dict(found)
            for param, values in optim.state_dict()["state"].items():
                for key, value in values.items():
                    same(other_optim.state_dict()["state"][param][key], value, f"{param} {key}")
        first_only = FullOptimStateDictConfig(rank0_only=True)
        with FSDP.state_dict_type(model, FULL, optim_state_dict_config=first_only):
            state = FSDP.optim_state_dict(model, optim)
            assert bool(state) == (dist.get_rank() == 0)
            sent = FSDP.optim_state_dict_to_load(model, optim, state)
            assert sent["state"].keys() == sharded["state"].keys()
        with pytest.raises(ConfigError, match="is not a parameter of the model"):
            FSDP.full_optim_state_dict(model, adam(nn.Linear(2, 2).parameters()))


def test_optimizer_states_of_every_kind_are_given_and_taken():
    run_ranks(optimizer_kinds, 2)


def optimizer_groups():
    """Groups with settings of their own, parameters of no group, and frozen ones that have no state."""
    workload = WORKLOADS["adapters"]

    def grouped(model, rate):
        params = dict(model.named_parameters())
        groups = [
            {"params": [params[name] for name in params if name.endswith("bias")], "lr": rate},
            {"params": [params[name] for name in params if name.endswith("down.weight")]},
            {"params": [params[name] for name in params if name.endswith("up.weight")], "lr": rate / 2},
        ]
        return torch.optim.AdamW(groups, lr=2 * rate)

    model = wrapped("adapters", use_orig_params=True)
    optim = grouped(model, 0.01)
    batch = workload.data(0, 0, dist.get_rank())
    workload.loss(model(*batch), batch).backward()
    optim.step()
    saved = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
    plain = dict(workload.model().named_parameters())
    stepped = {name for group in saved["param_groups"] for name in group["params"]}
    assert set(saved["state"]) == {name for name in stepped if plain[name].requires_grad} < stepped
    other = wrapped("adapters", use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    other_optim = grouped(other, 7.0)
    other_optim.load_state_dict(FSDP.optim_state_dict_to_load(other, other_optim, saved))
    assert [group["lr"] for group in other_optim.param_groups] == [0.01, 0.02, 0.005]
    again = FSDP.full_optim_state_dict(other, other_optim, rank0_only=False)
    assert again["param_groups"] == saved["param_groups"]
    for name, values in saved["state"].items():
        for key, value in values.items():
            same(again["state"][name][key], value, f"{name} {key}")
    lacking = {**saved, "param_groups": saved["param_groups"][:2]}
    with pytest.raises(CheckpointError, match="has no group for the parameters"):
        FSDP.optim_state_dict_to_load(other, other_optim, lacking)


def test_optimizer_states_keep_their_groups():
    run_ranks(optimizer_groups, 2)


# --- torch's own functions ------------------------------------------------------------------------------------------


def torchs_functions():
    first = dist.get_rank() == 0
    plain = WORKLOADS["adapters"].model()
    want = plain.state_dict()
    trained = [name for name, param in plain.named_parameters() if param.requires_grad]
    whole = torchs.StateDictOptions(full_state_dict=True)
    first_only = torchs.StateDictOptions(full_state_dict=True, cpu_offload=True)
    from_first = torchs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    without_frozen = torchs.StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    for orig in (False, True):
        model = wrapped("adapters", use_orig_params=orig)

        def change(model=model):
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(1.0)

        same_state(torchs.get_model_state_dict(model, options=whole), want)
        given = torchs.get_model_state_dict(model, options=first_only)
        same_state(given, want if first else {})
        sharded = torchs.get_model_state_dict(model)
        assert isinstance(sharded["head.weight"], DTensor)
        same_state(sharded, want)
        for options, state in ((whole, want), (torchs.StateDictOptions(), sharded)):
            change()
            torchs.set_model_state_dict(model, dict(state), options=options)
            same_state(model.state_dict(), want)
        change()
        torchs.set_model_state_dict(model, dict(want) if first else {}, options=from_first)
        same_state(model.state_dict(), want)
        assert sorted(torchs.get_model_state_dict(model, options=without_frozen)) == sorted(trained)


def test_torchs_own_functions_give_and_take_models():
    run_ranks(torchs_functions, 2, kind="gloo")
