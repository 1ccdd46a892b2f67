"""What programs written for torch's wrapper bring along: shared modules, forwards while whole, groups."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import (
    CustomPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    StateDictType,
    always_wrap_policy,
    fully_shard,
    register_fsdp_forward_method,
)
from shardwise.errors import StateError
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import Layers, average_gradients, data, full, same
from tests.ranks.wrapped import ONE_AXIS, whole_gradients, wrap

FSDP = FullyShardedDataParallel


def every_option():
    return [
        {"sharding_strategy": strategy, "use_orig_params": orig}
        for strategy, orig in itertools.product(ONE_AXIS, (False, True))
    ]


# --- a module that several wrapped ones hold ------------------------------------------------------------------------


def sharing():
    """The first layer's module is held by the last layer too, and by the root; one of its tensors by a plain module."""
    model = seeded(Layers())
    model.layers[2].out_proj = model.layers[0].out_proj
    model.again = model.layers[0].out_proj
    model.last.bias = model.layers[0].out_proj.bias
    return model


def shares():
    for options in every_option():
        model, plain = sharing(), sharing()
        model = wrap(model, model.layers, **options)
        optims = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, plain)]
        for step in range(2):
            model(data(step, dist.get_rank(), 2, 6)).square().sum().backward()
            losses = lambda rank: plain(data(step, rank, 2, 6)).square().sum()  # noqa: B023, E731
            average_gradients(plain, losses, dist.get_world_size())
            got = whole_gradients(model)
            assert list(got) == [name for name, _ in plain.named_parameters()]
            for name, param in plain.named_parameters():
                same(got[name], param.grad, name, 1e-5)
            for optim in optims:
                optim.step()
                optim.zero_grad()
        for kind in StateDictType:
            with FSDP.state_dict_type(model, kind):
                model.load_state_dict(model.state_dict())
                named = FSDP.optim_state_dict(model, optims[0])
                optims[0].load_state_dict(FSDP.optim_state_dict_to_load(model, optims[0], named))
        state, want = model.state_dict(), plain.state_dict()
        assert list(state) == list(want)
        for name, value in want.items():
            same(state[name], value, name, 1e-5)


def test_a_module_that_several_wrapped_ones_hold_is_sharded_once_and_shown_in_all():
    run_ranks(shares, 2)


# --- whole parameters and forwards ----------------------------------------------------------------------------------


def forwards_while_whole():
    rank = dist.get_rank()
    x = data(0, rank, 2, 6)
    for options in every_option():
        model, plain = seeded(Layers()), seeded(Layers())
        model = wrap(model, model.layers, **options)
        with torch.no_grad():
            want, twice = plain(x), plain.requires_grad_(False).apply(double)(x)
        for trained in (False, True):
            for recurse in (True, False):
                with FSDP.summon_full_params(model, recurse=recurse, writeback=False), torch.no_grad():
                    same(model(x), want, f"{options}, {recurse}, {trained}")
                    same(model.module(x), want, f"{options}, {recurse}, {trained}, the module inside")
            with FSDP.summon_full_params(model, writeback=False), torch.no_grad():
                for param in model.parameters():
                    param.mul_(2)
                same(model(x), twice, "with what is shown")
            with FSDP.summon_full_params(model, writeback=False, rank0_only=True), torch.no_grad():
                if rank == 0:
                    same(model(x), want, "on the first rank alone")
                else:
                    with pytest.raises(StateError, match="only the first rank has them"):
                        model(x)
            same(model(x).detach(), want, "afterwards")
            model(x).sum().backward()
            model.zero_grad()
    return True


def double(module):
    with torch.no_grad():
        for param in module.parameters(recurse=False):
            param.mul_(2)


def test_a_model_that_is_shown_whole_computes_with_what_it_shows():
    run_ranks(forwards_while_whole, 2)


def loses_no_gradient():
    for orig in (False, True):
        model = seeded(Layers())
        model = wrap(model, model.layers, use_orig_params=orig)
        x = data(0, 0, 2, 6)
        with FSDP.summon_full_params(model):
            loss = model(x).sum()
            with pytest.raises(StateError, match="it would be lost"):
                loss.backward()
            # What asks for gradients itself gets them.
            assert len(torch.autograd.grad(model(x).sum(), list(model.parameters()))) == 16
            late = model(x).sum()
        with pytest.raises(StateError, match="it would be lost"):
            late.backward()
        model(x).sum().backward()
        before = whole_gradients(model)
        with FSDP.summon_full_params(model, with_grads=True):
            sum(param.sum() for param in model.parameters()).backward()
        for name, gradient in whole_gradients(model).items():
            same(gradient, before[name] + 1, name)


def test_backward_through_parameters_shown_for_a_while_loses_no_gradient_in_silence():
    run_ranks(loses_no_gradient, 2)


def writes_shards():
    for options in every_option():
        for trains in (False, True):
            model, plain = seeded(Layers()), seeded(Layers())
            model = wrap(model, model.layers, **options)
            with torch.set_grad_enabled(trains):
                model(data(0, 0, 2, 6))
                for each in (model, plain):
                    for param in each.parameters():
                        param.data = param.data * 2
                same(model(data(0, 0, 2, 6)), plain(data(0, 0, 2, 6)), f"{options}, {trains}, replaced")
                with torch.no_grad():
                    for param in (*model.parameters(), *plain.parameters()):
                        param.mul_(0.5)
                same(model(data(0, 0, 2, 6)), plain(data(0, 0, 2, 6)), f"{options}, {trains}, written")


def test_shards_that_were_replaced_or_written_are_seen_where_parameters_were_kept():
    run_ranks(writes_shards, 2)


# --- units that run alone -------------------------------------------------------------------------------------------


def alone():
    x = data(0, dist.get_rank(), 2, 6)
    for api in ("wrapper", "fully_shard"):
        model, plain = seeded(Layers()), seeded(Layers())
        if api == "wrapper":
            model = wrap(model, model.layers)
        else:
            for layer in model.layers:
                fully_shard(layer)
            fully_shard(model)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model.layers[1](torch.ones(2, 9))
            same(full(model(x)).detach(), plain(x).detach(), api)
            model(x).sum().backward()
    half = seeded(Layers())
    half = wrap(half, half.layers, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    for _ in range(2):
        # Before the model around it has run, and after: it is the outermost one that runs.
        assert half.layers[0](x).dtype == torch.bfloat16
        half(x)


class Encoder(Layers):
    def encode(self, x):
        return self.layers[0](self.first(x))


def enters_by_methods():
    x = data(0, dist.get_rank(), 2, 6)
    for options in every_option():
        model, plain = seeded(Encoder()), seeded(Encoder())
        model = wrap(model, model.layers, **options)
        register_fsdp_forward_method(model, "encode")
        for _ in range(2):
            model.encode(x).sum().backward()
            average_gradients(plain, lambda rank: plain.encode(data(0, rank, 2, 6)).sum(), 2)  # noqa: B023
            got = whole_gradients(model)
            same(got["first.weight"], plain.first.weight.grad, f"{options}", 1e-5)
            with FSDP.summon_full_params(model, writeback=False), torch.no_grad():
                same(model.encode(x), plain.encode(x), f"{options}, while whole")
            model.zero_grad()
            plain.zero_grad()
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model.encode(torch.ones(2, 9))
            assert list(model.state_dict()) == list(plain.state_dict())
            model(x).sum().backward()
            model.zero_grad()
    half = wrap(half := seeded(Encoder()), half.layers, mixed_precision=MixedPrecision(torch.bfloat16))
    register_fsdp_forward_method(half, "encode")
    assert half.encode(x).dtype == torch.bfloat16


def test_a_method_of_a_wrapped_module_can_count_as_its_forward():
    run_ranks(enters_by_methods, 2)


def test_a_unit_that_ran_alone_and_raised_keeps_no_model_around_it_from_running():
    run_ranks(alone, 2)


# --- outputs that nobody can look into, or that are parameters ------------------------------------------------------


class Parcel:
    """No container that is known."""

    def __init__(self, content):
        self.content = content


class Hiding(nn.Module):
    """Gives a result out in an object, or keeps it as an attribute; and one of its parameters, or a view of it."""

    def __init__(self, keeps, inner):
        super().__init__()
        self.keeps, self.inner = keeps, inner
        self.place = nn.Parameter(torch.linspace(-1, 1, 60).view(10, 6))

    def forward(self, x):
        result = self.inner(x)
        if self.keeps:
            self.result = result
            return None
        return Parcel(result)


class Giving(Hiding):
    def forward(self, x):
        return self.inner(x), {"all": self.place, "some": self.place[: x.shape[0]]}


class Receiving(nn.Module):
    def __init__(self, keeps):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.hiding, self.giving = Hiding(keeps, nn.Linear(6, 6)), Giving(keeps, nn.Linear(6, 6))

    def forward(self, x):
        parcel = self.hiding(self.first(x))
        result = self.hiding.result if parcel is None else parcel.content
        y, places = self.giving(result)
        return self.last(y * places["all"].sum() + places["some"])


def looks_away(module):
    return Hiding(False, module)


def train_alike(model, plain, get, what):
    optims = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, plain)]
    for step in range(3):
        get(model(data(step, dist.get_rank(), 2, 6))).square().sum().backward()
        loss = lambda rank: get(plain(data(step, rank, 2, 6))).square().sum()  # noqa: B023, E731
        average_gradients(plain, loss, dist.get_world_size())
        for optim in optims:
            optim.step()
            optim.zero_grad()
        with torch.no_grad():
            same(get(model(data(9, 0, 2, 6))), get(plain(data(9, 0, 2, 6))), f"{what}, step {step}", 1e-4)


def hides():
    for keeps in (False, True):
        for options in every_option():
            model, plain = seeded(Receiving(keeps)), seeded(Receiving(keeps))
            model = wrap(model, [model.hiding, model.giving], **options)
            train_alike(model, plain, lambda output: output, f"{options}, {keeps}")
        model, plain = seeded(Receiving(keeps)), seeded(Receiving(keeps))
        for part in (model.hiding, model.giving, model):
            fully_shard(part)
        train_alike(model, plain, full, f"fully_shard, {keeps}")
    for options in every_option():
        model, plain = looks_away(seeded(Layers())), looks_away(seeded(Layers()))
        train_alike(FSDP(model, **options), plain, lambda output: output.content, f"as one, {options}")
    model, plain = fully_shard(looks_away(seeded(Layers()))), looks_away(seeded(Layers()))
    train_alike(model, plain, lambda output: output.content, "as one, fully_shard")


def test_outputs_that_are_hidden_or_parameters_train_as_any_others():
    # In processes: memory that is used after it has gone ends one.
    run_ranks(hides, 2, kind="gloo")


# --- parameters that some ranks use ---------------------------------------------------------------------------------


class Experts(nn.Module):
    """Each rank takes one of them, in the second layer; nobody takes the last."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.shared = nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        return self.experts[self.rank](self.shared(x))


def chooses_experts():
    rank, world = dist.get_rank(), dist.get_world_size()
    plain = seeded(nn.Sequential(nn.Linear(6, 6), Experts(0), nn.Linear(6, 6)))
    for one in range(world):
        plain[1].rank = one
        (plain(data(0, one, 2, 6)).square().sum() / world).backward()
    for strategy in ONE_AXIS:
        model = seeded(nn.Sequential(nn.Linear(6, 6), Experts(rank), nn.Linear(6, 6)))
        model = wrap(model, [model[1]], sharding_strategy=strategy)
        model(data(0, rank, 2, 6)).square().sum().backward()
        got = whole_gradients(model)
        for name, param in plain.named_parameters():
            same(got[name], torch.zeros_like(param) if param.grad is None else param.grad, name, 1e-5)
        named = seeded(nn.Sequential(nn.Linear(6, 6), Experts(rank), nn.Linear(6, 6)))
        named = wrap(named, [named[1]], sharding_strategy=strategy, use_orig_params=True)
        named.set_safe_participation()
        named(data(0, rank, 2, 6)).square().sum().backward()
        for name, gradient in whole_gradients(named).items():
            same(gradient, got[name], name, 1e-6)


def test_ranks_may_use_different_parameters_of_one_flat_parameter():
    run_ranks(chooses_experts, 3)


# --- steps without gradients ----------------------------------------------------------------------------------------


def steps_too_early():
    for options in every_option():
        model = seeded(Layers())
        model = wrap(model, model.layers, **options)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        before = model.state_dict()
        with model.no_sync():
            model(data(0, 0, 2, 6)).sum().backward()
        with pytest.raises(StateError, match="would step without the gradients that were kept back"):
            optim.step()
        for name, value in model.state_dict().items():
            same(value, before[name], name)
        model(data(1, 0, 2, 6)).sum().backward()
        optim.step()
        with model.no_sync():
            model(data(0, 0, 2, 6)).sum().backward()
        model.zero_grad()
        optim.step()


def test_a_step_that_would_leave_out_gradients_of_no_sync_is_refused():
    run_ranks(steps_too_early, 2)


# --- policies -------------------------------------------------------------------------------------------------------


def wraps_all():
    model = FSDP(seeded(Layers()), auto_wrap_policy=always_wrap_policy)
    assert [type(each.module) for each in FSDP.fsdp_modules(model)].count(nn.ModuleList) == 1
    assert len(FSDP.fsdp_modules(model)) == 13
    same(model(data(0, 0, 2, 6)).detach(), seeded(Layers())(data(0, 0, 2, 6)).detach(), "output")
    only = CustomPolicy(lambda module: isinstance(module, (nn.ModuleList, nn.Linear)) and module.training)
    trained = seeded(Layers())
    trained.layers[1].in_proj.eval()
    # The list's own parameters, those of the module in eval mode, are gathered with the model's.
    model = FSDP(trained, auto_wrap_policy=only)
    same(model(data(0, 0, 2, 6)).detach(), seeded(Layers())(data(0, 0, 2, 6)).detach(), "output")


def test_every_module_can_be_wrapped_where_containers_keep_nothing_for_themselves():
    run_ranks(wraps_all, 2)


# --- groups of some ranks -------------------------------------------------------------------------------------------


def first_of_a_group():
    """Two models, each over half of the ranks: each has a first rank."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half, rank = divmod(dist.get_rank(), 2)
    for options in every_option():
        model = FSDP(nn.Linear(3, 2), process_group=groups[half], **options)
        optim = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + half))
        (model(torch.ones(1, 3)) * (1 + half)).sum().backward()
        optim.step()
        configs = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
            assert list(model.state_dict()) == ([] if rank else ["weight", "bias"])
            named = FSDP.optim_state_dict(model, optim)
            assert bool(named) == (rank == 0)
            loaded = FSDP.optim_state_dict_to_load(model, optim, named)
        assert bool(FSDP.full_optim_state_dict(model, optim)) == (rank == 0)
        for taken in (loaded, FSDP.scatter_full_optim_state_dict(named, model, optim=optim)):
            optim.load_state_dict(taken)
            assert optim.param_groups[0]["lr"] == 0.1 * (1 + half), "another group's"
        with FSDP.summon_full_params(model, writeback=False, rank0_only=True):
            assert (isinstance(model.module.weight, nn.Parameter) and model.module.weight.dim() == 2) == (
                rank == 0 or ("NO_SHARD" in str(options) and options["use_orig_params"])
            )
    dist.barrier()


def test_the_first_rank_is_the_first_of_those_that_share_the_model():
    run_ranks(first_of_a_group, 4)
