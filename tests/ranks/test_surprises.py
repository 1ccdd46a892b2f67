"""Programs that do what nobody expects of them between and inside steps: the plain model's numbers, or an error.

Each runs on a plain model and on a sharded one, on the same data on every rank, so that averages over ranks change
nothing and the two must agree to the bit.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import shardwise
from shardwise import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    RankDisagreement,
    StateError,
    fully_shard,
    trace,
)
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import is_gathered, is_sharded

WIDTH = 8


def inputs(rows=4):
    return torch.arange(float(rows * WIDTH)).view(rows, WIDTH) / 16 - 1


def whole(tensor):
    return None if tensor is None else tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def wrapped(module):
    return FullyShardedDataParallel(module, use_orig_params=True)


def shard_children(model, **options):
    for child in model.children():
        fully_shard(child, **options)
    return fully_shard(model, **options)


def twice(program, *shardings, world_size=2, kind="threads"):
    """Runs ``program(sharding)`` on every rank, first with None for a plain model; all must return the same."""
    run_ranks(compare, world_size, program, shardings, kind=kind)


def compare(program, shardings):
    plain = program(None)
    for sharding in shardings:
        results, expected = program(sharding), plain
        if len(results) < len(expected):
            # Of the wrapper's flat shards, losses are compared, which are scalars.
            expected = [result for result in expected if result.dim() == 0]
        assert len(results) == len(expected)
        for number, (result, wanted) in enumerate(zip(results, expected, strict=True)):
            is_same = torch.equal(result, wanted) if isinstance(wanted, torch.Tensor) else result == wanted
            assert is_same, f"{sharding.__name__}: result {number} is {result}, of the plain model {wanted}"


def train(model, optimizer, *batches, **arguments):
    losses = []
    for x in batches:
        loss = model(x, **arguments).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def sgd_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


# --- exceptions -------------------------------------------------------------------------------------------------------


class Fallback(nn.Module):
    """Takes its second layer where the first one raises."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, fails=False):
        try:
            return self.first(x[:, :3] if fails else x)
        except RuntimeError:
            return self.second(x)


def falls_back(sharding):
    model = seeded(seeded(Fallback()))
    model = sharding(model) if sharding else model
    optimizer = sgd_of(model)
    results = []
    for fails in (True, False, True, False, False):
        results += train(model, optimizer, inputs(), fails=fails)
    with torch.no_grad():
        model(inputs(), fails=True)
    return results + train(model, optimizer, inputs(), inputs())


def wrap_children(model):
    for name, child in list(model.named_children()):
        setattr(model, name, wrapped(child))
    return wrapped(model)


@pytest.mark.parametrize("reshard", [True, False])
def test_a_unit_whose_exception_the_model_catches_goes_on_with_fresh_weights(reshard):
    def sharded(model):
        return shard_children(model, reshard_after_forward=reshard)

    twice(falls_back, sharded, wrap_children)


def test_a_unit_whose_exception_was_caught_is_freed_when_the_step_ends():
    def on_a_rank():
        model = shard_children(seeded(Fallback()))
        model(inputs(), fails=True).sum().backward()
        assert not is_gathered(model.first)
        with torch.no_grad():
            model(inputs(), fails=True)
        assert not is_gathered(model.first)

    run_ranks(on_a_rank, 2)


def raises_alone(sharding):
    model = seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    model = sharding(model) if sharding else model
    optimizer = sgd_of(model)
    model(inputs()).sum().backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError):
        model[0](torch.ones(4, 3))
    return train(model[0], optimizer, inputs(), inputs(), inputs()) + train(model, optimizer, inputs())


def test_a_unit_that_raised_when_called_alone_goes_on_with_fresh_weights():
    twice(raises_alone, shard_children, wrap_children)


def model_raises(sharding):
    """After an exception of the whole model's, a unit of it is used alone."""
    model = seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    model = sharding(model) if sharding else model
    optimizer = sgd_of(model)
    with pytest.raises(RuntimeError):
        model(torch.ones(4, 3))
    return train(model[1], optimizer, inputs(), inputs()) + train(model, optimizer, inputs())


def test_a_unit_may_be_called_alone_after_the_model_raised():
    twice(model_raises, shard_children)


def hook_raises(sharding):
    model = seeded(seeded(Fallback()))
    model = sharding(model) if sharding else model
    optimizer = sgd_of(model)
    calls = []

    def hook(module, args, output):
        calls.append(output)
        if len(calls) == 1:
            raise RuntimeError("the first time")

    model.first.register_forward_hook(hook)
    return train(model, optimizer, inputs(), inputs(), inputs())


def test_a_forward_hook_that_raises_leaves_the_unit_in_order():
    twice(hook_raises, shard_children)


def held_over_an_exception(loads, sharding):
    model = seeded(nn.Linear(WIDTH, WIDTH))
    model = sharding(model) if sharding else model
    sync = model.set_requires_gradient_sync if sharding else lambda is_on: None
    sync(False)
    model(inputs()).square().mean().backward()
    with pytest.raises(RuntimeError):
        model(torch.ones(4, 3))
    if loads:
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    sync(True)
    model(inputs() * 2).square().mean().backward()
    return [whole(param.grad) for param in model.parameters()]


@pytest.mark.parametrize("loads", [False, True])
def test_gradients_stashed_without_sync_outlive_a_forward_that_raises(loads):
    twice(partial(held_over_an_exception, loads), fully_shard)


# --- calls ------------------------------------------------------------------------------------------------------------


class Tree(nn.Module):
    def __init__(self):
        super().__init__()
        self.leaf = nn.Linear(WIDTH, WIDTH)
        self.join = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, depth=2):
        if depth == 0:
            return torch.tanh(self.leaf(x))
        return torch.tanh(self.join(self(x, depth - 1) + self(-x, depth - 1)))


class Top(nn.Module):
    def __init__(self):
        super().__init__()
        self.tree = Tree()
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.out(self.tree(x))


def gradients_and_losses(model, optimizer=None):
    optimizer = optimizer or sgd_of(model)
    params = [] if isinstance(model, FullyShardedDataParallel) else optimizer.param_groups[0]["params"]
    results = []
    for _ in range(3):
        loss = model(inputs()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        results += [loss.detach(), *(whole(param.grad) for param in params)]
        optimizer.step()
    return results


@pytest.mark.parametrize("make", [Top, Tree])
def test_a_unit_that_calls_itself_trains_as_ever(make):
    def program(sharding):
        model = seeded(make())
        return gradients_and_losses(sharding(model) if sharding else model)

    def children_as_one(model):
        fully_shard([*model.children()])
        return fully_shard(model)

    shardings = [fully_shard, wrapped] if make is Tree else [shard_children, wrap_children, children_as_one]
    twice(program, *shardings)


class LeavesAux(nn.Module):
    """Leaves a loss beside its output: as an attribute, or in a list that it was given."""

    def __init__(self, where):
        super().__init__()
        self.main = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.where = where
        self.aux = None

    def forward(self, x, found):
        y = torch.tanh(self.main(x))
        aux = self.second(torch.tanh(self.gate(x))).square().mean()
        if self.where == "list":
            found.append(aux)
        elif self.where == "global":
            _FOUND.append(aux)
        else:
            self.aux = aux
        return y


_FOUND: list[torch.Tensor] = []


class SumsAux(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.blocks = nn.ModuleList(LeavesAux(where) for _ in range(3))

    def forward(self, x):
        found = [x.sum()]
        _FOUND.clear()
        for block in self.blocks:
            x = block(x, found)
        aux = [block.aux for block in self.blocks if block.aux is not None]
        return torch.stack([x.square().mean(), *found[1:], *aux, *_FOUND])


def shard_blocks(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


@pytest.mark.parametrize("where", ["attribute", "list"])
def test_backward_may_come_to_a_unit_by_what_forward_left_beside_its_output(where):
    def program(sharding):
        model = seeded(SumsAux(where))
        return gradients_and_losses(sharding(model) if sharding else model)

    twice(program, shard_blocks)


def leaves_it_in_a_global():
    model = shard_blocks(seeded(SumsAux("global")))
    with pytest.raises(StateError, match="before its weights were gathered"):
        model(inputs()).sum().backward()


def test_backward_by_a_tensor_that_nothing_could_find_is_refused():
    # Not as threads: they would share the list.
    run_ranks(leaves_it_in_a_global, 2, kind="gloo")


# --- containers -------------------------------------------------------------------------------------------------------


@dataclass
class Record:
    value: torch.Tensor
    seen: int = 0


class WritesToInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, values, named, record):
        values.append(self.layer(values[0]))
        named["sum"] = values[-1] + named["x"]
        record.seen += 1
        record.value = named["sum"] * 2
        return record.value


@pytest.mark.parametrize("precision", [None, torch.float64])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_unit_writes_to_the_very_containers_it_is_given(precision, needs_grad):
    def on_a_rank():
        model = seeded(seeded(WritesToInputs()))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=precision))
        x = inputs().requires_grad_(needs_grad)
        values, named, record = [x], {"x": x}, Record(x)
        output = model(values, named, record)
        assert len(values) == 2
        assert values[0] is x
        assert named["x"] is x
        assert "sum" in named
        assert record.seen == 1
        assert record.value is output
        values[1].sum().backward()
        assert model.layer.weight.grad is not None

    run_ranks(on_a_rank, 2)


# --- parameters -------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(10, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 10, bias=False)

    def forward(self, indices):
        return self.head(self.middle(self.emb(indices)))


def ties_later(when):
    def program(sharding):
        model = seeded(seeded(Tied()))
        model = sharding(model) if sharding else model
        tokens = torch.arange(4)
        optimizer = sgd_of(model)
        if when == "gathered":
            model(tokens)
        elif when == "after a step":
            model(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.head.weight = model.emb.weight
        results = []
        for _ in range(3):
            loss = model(tokens).square().mean()
            loss.backward()
            results += [loss.detach(), whole(model.emb.weight.grad)]
            optimizer.step()
            optimizer.zero_grad()
        return [*results, whole(model.state_dict()["head.weight"]), len(list(model.parameters()))]

    return program


@pytest.mark.parametrize("when", ["at once", "gathered", "after a step"])
@pytest.mark.parametrize("sharding", [fully_shard, shard_children])
def test_weights_tied_after_sharding_get_both_gradients(when, sharding):
    twice(ties_later(when), sharding)


def test_weights_of_a_wrapper_tied_to_an_inner_one_are_summoned_before_any_forward():
    def on_a_rank():
        model = seeded(Pair())
        model.second = wrapped(model.second)
        model = wrapped(model)
        model.second.module.weight = model.first.weight
        with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
            assert model.second.weight is model.first.weight
            model.first.weight.fill_(2.0)
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            assert model.second.weight.eq(2.0).all()

    run_ranks(on_a_rank, 2)


def test_weights_of_a_wrapper_that_were_tied_later_are_summoned_and_saved_with_their_state():
    def on_a_rank():
        plain, model = seeded(seeded(Tied())), wrap_children(seeded(seeded(Tied())))
        results = []
        for each in (plain, model):
            getattr(each.head, "module", each.head).weight = each.emb.weight
            state = each.state_dict()  # before any forward
            assert torch.equal(state["head.weight"], state["emb.weight"])
            optimizer = torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.5)
            for _ in range(3):
                each(torch.arange(4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append((each, optimizer))
        # The optimizer of a plain model counts its parameters.
        momenta = [state["momentum_buffer"] for state in results[0][1].state.values()]
        saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        assert [*saved["state"]] == ["emb.weight", "middle.weight", "middle.bias"]
        for own, wanted in zip(saved["state"].values(), momenta, strict=True):
            assert torch.equal(own["momentum_buffer"], wanted)
        optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, saved))
        with FullyShardedDataParallel.summon_full_params(model):
            assert model.head.weight is model.emb.weight
            assert torch.equal(model.head.weight, plain.head.weight)
        state = model.state_dict()
        assert torch.equal(state["head.weight"], plain.head.weight)
        assert torch.equal(state["emb.weight"], plain.emb.weight)

    run_ranks(on_a_rank, 2)


@pytest.mark.parametrize("whose", ["first", "second"])
def test_weights_are_tied_though_a_part_of_the_model_was_converted_since(whose):
    def program(sharding):
        model = seeded(Pair())
        model = sharding(model) if sharding else model
        model.second.weight = model.first.weight
        getattr(model, whose).cpu()
        return gradients_and_losses(model)

    twice(program, fully_shard, shard_children)


def test_a_unit_that_was_tied_to_another_is_laid_out_once_and_not_in_every_forward():
    def on_a_rank():
        model = fully_shard(seeded(Tied()))
        model.head.weight = model.emb.weight
        model(torch.arange(4)).sum().backward()
        memory = model._shardwise_units[0].buffers
        model(torch.arange(4)).sum().backward()
        assert model._shardwise_units[0].buffers is memory

    run_ranks(on_a_rank, 2)


def test_a_parameter_replaced_while_it_is_gathered_is_refused():
    def on_a_rank():
        model = fully_shard(nn.Linear(WIDTH, WIDTH))
        model.unshard()
        model.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        with pytest.raises(StateError, match="'weight' was replaced"):
            model.state_dict()
        with pytest.raises(StateError, match="'weight' was replaced"):
            model.reshard()

    run_ranks(on_a_rank, 2)


def frozen_while_accumulating(sharding):
    model = seeded(nn.Linear(WIDTH, WIDTH))
    model = sharding(model) if sharding else model
    results = []
    for thaws in (False, True):
        for number in range(3):
            if sharding:
                model.set_requires_gradient_sync(number == 2)
            model.weight.requires_grad_((number == 0) != thaws)
            model.bias.requires_grad_(True)
            model(inputs() * (number + 1)).sum().backward()
        results += [whole(param.grad) for param in model.parameters()]
        for param in model.parameters():
            param.grad = None
    for param in model.parameters():
        param.requires_grad_(True)
    model(inputs()).sum().backward()
    return results + [whole(param.grad) for param in model.parameters()]


def test_a_parameter_frozen_between_micro_batches_is_given_what_it_holds():
    twice(frozen_while_accumulating, fully_shard)


def frozen_before_the_all_reduce(sharding):
    model = seeded(nn.Linear(WIDTH, WIDTH))
    model = sharding(model) if sharding else model
    results = []
    for _ in range(2):
        for number in range(2):
            if sharding:
                model.set_requires_all_reduce(number == 1)
            model.weight.requires_grad_(number == 0)
            model(inputs() * (number + 1)).sum().backward()
        results += [whole(param.grad) for param in model.parameters()]
        model.zero_grad()
    return results


def test_a_parameter_frozen_before_the_all_reduce_is_given_its_sum():
    def hybrid(model):
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))

    twice(frozen_before_the_all_reduce, hybrid, world_size=4)


def assigns_data(sharding):
    model = seeded(nn.Linear(WIDTH, WIDTH))
    model = sharding(model) if sharding else model
    model.weight.data = torch.full((WIDTH, WIDTH), 0.25)
    model.bias.data = model.bias.data * 2
    return [model(inputs()).detach(), *(whole(param.detach().clone()) for param in model.parameters())]


def test_data_assigned_to_a_sharded_parameter_is_its_value():
    twice(assigns_data, fully_shard)


def test_data_of_another_shape_is_refused():
    def on_a_rank():
        model = fully_shard(nn.Linear(WIDTH, WIDTH))
        with pytest.raises(ValueError, match="cannot take data of shape"):
            model.weight.data = torch.ones(3, 3)

    run_ranks(on_a_rank, 2)


def hooks_a_gradient(sharding):
    model = seeded(nn.Linear(WIDTH, WIDTH))
    model = sharding(model) if sharding else model
    seen = []
    model.weight.register_hook(lambda gradient: seen.append(1) or gradient * 2)
    results = []
    for _ in range(2):
        model(inputs()).square().mean().backward()
        results.append(whole(model.weight.grad).clone())
    return [*results, len(seen)]


def test_a_gradient_hook_on_a_shard_sees_and_changes_the_gradient():
    twice(hooks_a_gradient, fully_shard)


def test_a_gradient_hook_on_an_exact_sum_is_refused():
    def on_a_rank():
        model = fully_shard(seeded(nn.Linear(WIDTH, WIDTH)), exact=True)
        model.weight.register_hook(lambda gradient: gradient * 2)
        with pytest.raises(StateError, match="'weight' has a gradient hook"):
            model(inputs()).sum().backward()

    run_ranks(on_a_rank, 2)


# --- optimizers and gradients -----------------------------------------------------------------------------------------


def looks_before_it_steps(foreach, fused=False):
    def program(sharding):
        model = seeded(nn.Linear(WIDTH, WIDTH))
        model = sharding(model) if sharding else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.125, foreach=foreach, fused=fused)
        results = []
        for _ in range(4):
            loss = model(inputs()).square().mean()
            loss.backward()
            model(inputs())
            optimizer.step()
            optimizer.zero_grad()
            results.append(loss.detach())
        return results

    return program


@pytest.mark.parametrize(("foreach", "fused"), [(False, False), (True, False), (False, True)])
def test_weights_kept_from_before_a_step_are_not_used_after_it(foreach, fused):
    def kept_after_backward(model):
        fully_shard(model).set_reshard_after_backward(False)
        return model

    def kept_after_forward(model):
        return fully_shard(model, reshard_after_forward=False)

    twice(looks_before_it_steps(foreach, fused), fully_shard, kept_after_forward, kept_after_backward)


@pytest.mark.parametrize("looks_first", [False, True])
def test_a_kept_teacher_notices_foreach_writes_to_its_shards(looks_first):
    def program(sharding):
        teacher = seeded(nn.Linear(WIDTH, WIDTH))
        teacher = sharding(teacher) if sharding else teacher
        params = list(teacher.parameters())
        results = []
        for _ in range(3):
            with torch.no_grad():
                results.append(teacher(inputs()))
                torch._foreach_mul_(list(teacher.parameters()) if looks_first else params, 0.5)
                torch._foreach_add_(params, [param.detach() for param in params])
                torch._foreach_lerp_(params, [torch.zeros_like(param) for param in params], 0.25)
        return results

    def kept(model):
        return fully_shard(model, reshard_after_forward=False)

    twice(program, kept)


def zeroes_between(zero):
    def program(sharding):
        model = seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
        model = sharding(model) if sharding else model
        optimizer = sgd_of(model)
        params = list(model.parameters())
        results = []
        for _ in range(3):
            loss = model(inputs()).square().mean()
            zero(model, optimizer)
            loss.backward()
            results += [whole(param.grad).clone() for param in params]
        return results

    return program


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("whose", ["model's", "optimizer's", "outer module's"])
def test_zero_grad_between_forward_and_backward_reaches_every_shard(whose, set_to_none):
    def zero(model, optimizer):
        owner = {"model's": model, "optimizer's": optimizer, "outer module's": nn.ModuleList([model])}[whose]
        owner.zero_grad(set_to_none=set_to_none)

    twice(zeroes_between(zero), shard_children)


def zeroes_held(zero, defer):
    def program(sharding):
        model = seeded(nn.Linear(WIDTH, WIDTH))
        model = sharding(model) if sharding else model
        optimizer = sgd_of(model)
        if sharding:
            getattr(model, defer)(False)
        model(inputs() * 3).square().mean().backward()
        zero(model, optimizer)
        if sharding:
            getattr(model, defer)(True)
        model(inputs()).square().mean().backward()
        return [whole(param.grad) for param in model.parameters()]

    return program


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("whose", ["model", "optimizer"])
def test_zero_grad_reaches_what_is_held_without_sync(whose, set_to_none):
    def zero(model, optimizer):
        (model if whose == "model" else optimizer).zero_grad(set_to_none=set_to_none)

    def hybrid(model):
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))

    twice(zeroes_held(zero, "set_requires_gradient_sync"), fully_shard)
    twice(zeroes_held(zero, "set_requires_all_reduce"), hybrid, world_size=4)


def test_clipping_reaches_the_shards_of_units_that_are_kept():
    def program(sharding):
        model = seeded(nn.Linear(WIDTH, WIDTH))
        model = sharding(model) if sharding else model
        model(inputs()).sum().backward()
        norm = shardwise.clip_grad_norm_(model.parameters(), 0.125)
        return [norm.item() > 1, [whole(param.grad).norm().item() < 0.13 for param in model.parameters()]]

    def kept(model):
        fully_shard(model).set_reshard_after_backward(False)
        return model

    twice(program, kept)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_frozen_unit_without_inputs_to_train_is_sharded_when_the_step_has_ended():
    def on_a_rank():
        model = seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
        model[0].requires_grad_(False)
        shard_children(model, reshard_after_forward=False)
        model(inputs()).sum().backward()
        assert not any(map(is_gathered, model))
        assert all(map(is_sharded, model))

    run_ranks(on_a_rank, 2)


def test_units_that_no_backward_came_to_are_sharded_when_the_step_has_ended():
    def on_a_rank():
        model = shard_children(seeded(Fallback()), reshard_after_forward=False)
        model.second(inputs())
        model(inputs()).sum().backward()
        assert not is_gathered(model.second)

    run_ranks(on_a_rank, 2)


@pytest.mark.parametrize("kept", ["parameter", "module"])
def test_whoever_keeps_one_part_of_a_model_does_not_keep_the_memory_of_all(kept):
    def on_a_rank():
        model = shard_children(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))))
        model(inputs()).sum().backward()
        others = [weakref.ref(child._shardwise_units[0].buffers) for child in [*model][1:]]
        part = next(model[0].parameters()) if kept == "parameter" else model[0]
        del model
        gc.collect()
        assert [memory() for memory in others] == [None, None, None]
        assert part is not None

    run_ranks(on_a_rank, 1)


# --- what surrounds a forward -----------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.layer(x))


def saving_products():
    def policy(context, op, *args, **kwargs):
        saved = op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Checkpointed(nn.Module):
    def __init__(self, whole_of_it):
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        self.whole_of_it = whole_of_it

    def forward(self, x):
        if self.whole_of_it:
            return checkpoint(self.run, x, use_reentrant=False, context_fn=saving_products)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=saving_products)
        return x

    def run(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("whole_of_it", [False, True])
def test_selective_checkpointing_around_units(whole_of_it):
    def program(sharding):
        model = seeded(Checkpointed(whole_of_it))
        return gradients_and_losses(sharding(model) if sharding else model)

    twice(program, shard_blocks)


TRANSFORMS = {
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).square().sum())(x),
    "vjp": lambda model, x: torch.func.vjp(model, x)[1](torch.ones_like(x))[0],
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda model, x: torch.func.jacrev(lambda x: model(x).sum(0))(x),
    "jacfwd": lambda model, x: torch.func.jacfwd(lambda x: model(x).sum(0))(x),
    "hessian": lambda model, x: torch.func.hessian(lambda x: model(x).square().sum())(x),
    "vmap": lambda model, x: torch.func.vmap(model)(x),
}


def transforms(transform, sharding):
    model = seeded(nn.Sequential(*(Residual() for _ in range(3))))
    model = sharding(model) if sharding else model
    optimizer = sgd_of(model)
    results = [TRANSFORMS[transform](model, inputs(2)).detach()]
    results += gradients_and_losses(model, optimizer)
    return [*results, TRANSFORMS[transform](model, inputs(2)).detach()]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_torch_func_go_through_sharded_models(transform):
    # Not as threads: torch.func, too, has state that threads share.
    twice(partial(transforms, transform), shard_children, kind="gloo")


def mutates_saved(sharding):
    model = seeded(nn.Sequential(*(Residual() for _ in range(3))))
    model = sharding(model) if sharding else model
    results = []
    for _ in range(2):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            output = model(inputs())
            loss = output.square().mean()
            output.mul_(2)
            loss.backward()
        results += [whole(param.grad).clone() for param in model.parameters()]
    return results


def test_saved_tensors_may_be_written_to_where_autograd_allows_it():
    twice(mutates_saved, shard_children, kind="gloo")


def test_training_after_an_evaluation_in_inference_mode_that_saw_new_parameters_trained():
    def program(sharding):
        model = seeded(nn.Linear(WIDTH, WIDTH))
        model.bias.requires_grad_(False)
        model = sharding(model) if sharding else model
        model.bias.requires_grad_(True)
        with torch.inference_mode():
            model(inputs())
        return gradients_and_losses(model)

    twice(program, fully_shard)


def writes_to_what_is_shown(sharding):
    model = seeded(nn.Linear(WIDTH, WIDTH))
    model = sharding(model) if sharding else model
    results = []
    for _ in range(2):
        results.append(model(inputs()).detach())
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
    return [*results, model(inputs()).detach()]


def test_what_is_written_to_gathered_parameters_between_steps_is_kept():
    twice(writes_to_what_is_shown, fully_shard, shard_children)


def test_writing_to_gathered_parameters_of_another_dtype_is_refused():
    def on_a_rank():
        model = fully_shard(
            seeded(nn.Linear(WIDTH, WIDTH)), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        )
        model(inputs())
        with torch.no_grad():
            model.weight.mul_(0.5)
        with pytest.raises(StateError, match="was written to while it was gathered"):
            model.reshard()

    run_ranks(on_a_rank, 2)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_kept_unit_is_shown_whole_when_checkpointing_runs_it_again(use_reentrant):
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return checkpoint(self.block, x.requires_grad_(), use_reentrant=use_reentrant)

    def program(sharding):
        model = seeded(Again())
        return gradients_and_losses(sharding(model) if sharding else model)

    def kept(model):
        return shard_children(model, reshard_after_forward=False)

    twice(program, kept)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_a_flat_optimizer_reaches_what_is_held(set_to_none):
    def zero(model, optimizer):
        if isinstance(model, shardwise.FSDPModule):
            optimizer = shardwise.optim.flat(model.parameters(), torch.optim.SGD, lr=0.5)
        optimizer.zero_grad(set_to_none)

    twice(zeroes_held(zero, "set_requires_gradient_sync"), fully_shard)


class Bare(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.weight = nn.Parameter(torch.full((rows, WIDTH), 0.5))

    def forward(self, x):
        return x + self.weight.sum(0)


def test_a_flat_optimizer_steps_beside_parameters_without_elements():
    def program(sharding):
        model = nn.Sequential(Bare(1), Bare(0))
        model = sharding(model) if sharding else model
        make = shardwise.optim.flat if sharding else lambda params, cls, **options: cls(params, **options)
        results = gradients_and_losses(model, make(model.parameters(), torch.optim.SGD, lr=0.5, momentum=0.5))
        # Of the empty one there is no gradient to compare: whether it is there, or None, is its shape's business.
        return [result for result in results if result is not None and result.numel()]

    twice(program, fully_shard)


def test_after_a_forward_that_raised_the_model_shows_its_shards():
    def on_a_rank():
        model = shard_children(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(3, 3), nn.Linear(3, 3)))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(inputs())
        assert all(map(is_sharded, model))
        assert not any(map(is_gathered, model))

    run_ranks(on_a_rank, 2)


def replaces_after_an_evaluation(sharding):
    model = seeded(nn.Linear(WIDTH, WIDTH))
    model = sharding(model) if sharding else model
    results = []
    for resharded in (False, True):
        with torch.inference_mode():
            model(inputs())
        model.weight = nn.Parameter(model.weight.detach() * 0.5)
        if sharding and resharded:
            model.reshard()
        results += [model(inputs()).detach()]
    return results


def test_converting_gathered_parameters_is_refused():
    def on_a_rank():
        model = fully_shard(seeded(Pair()))
        model.unshard()
        model.first.double()
        with pytest.raises(StateError, match="written to while it was gathered"):
            model.reshard()

    run_ranks(on_a_rank, 2)


def test_a_parameter_replaced_after_an_evaluation_is_the_new_one():
    def kept(model):
        return fully_shard(model, reshard_after_forward=False)

    twice(replaces_after_an_evaluation, kept)


def test_half_after_sharding_keeps_what_the_policy_computes_in():
    def on_a_rank():
        model = seeded(nn.Linear(WIDTH, WIDTH))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
        model.half()
        output = model(inputs())
        assert output.dtype is torch.float32
        output.sum().backward()
        assert model.weight.dtype is model.weight.grad.dtype is torch.float16

    run_ranks(on_a_rank, 2)


def test_data_assigned_to_a_gathered_parameter_is_its_value():
    def program(sharding):
        model = seeded(nn.Linear(WIDTH, WIDTH))
        model = sharding(model) if sharding else model
        optimizer, results = sgd_of(model), []
        for _ in range(2):
            results.append(model(inputs()).detach())
            model.weight.data = model.weight.data * 0.5
        return [*results, model(inputs()).detach(), *gradients_and_losses(model, optimizer)]

    twice(program, fully_shard)


def test_a_parameter_replaced_while_a_kept_unit_shows_it_whole_is_refused():
    def on_a_rank():
        model = fully_shard(seeded(nn.Linear(WIDTH, WIDTH)), reshard_after_forward=False)
        model(inputs())
        model.weight = nn.Parameter(model.weight.detach() * 0.5)
        with torch.no_grad(), pytest.raises(StateError, match="'weight' was replaced"):
            model(inputs())

    run_ranks(on_a_rank, 2)


def test_a_state_dict_holds_what_was_written_to_gathered_parameters():
    def program(sharding):
        model = seeded(nn.Linear(WIDTH, WIDTH))
        model = sharding(model) if sharding else model
        model(inputs())
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
        return [whole(value).clone() for value in model.state_dict().values()]

    twice(program, fully_shard)


def test_parameters_replaced_while_sums_wait_for_replicas_are_refused():
    def on_a_rank():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        model = fully_shard(seeded(nn.Linear(WIDTH, WIDTH)), mesh=mesh)
        model.set_requires_all_reduce(False)
        model(inputs()).sum().backward()
        model.weight = nn.Parameter(model.weight.detach() * 2)
        with pytest.raises(StateError, match="still wait to be summed over replicas"):
            model(inputs())

    run_ranks(on_a_rank, 2)


@pytest.mark.parametrize("then", ["evaluation", "second forward", "retain_graph"])
def test_data_assigned_to_a_gathered_parameter_is_there_for_every_backward_that_follows(then):
    def program(sharding):
        model = seeded(nn.Linear(WIDTH, WIDTH))
        model = sharding(model) if sharding else model
        model(inputs())
        model.weight.data = model.weight.data * 0.5
        losses = [model(inputs()).square().mean()]
        if then == "evaluation":
            with torch.inference_mode():
                model(inputs())
        elif then == "second forward":
            losses.append(model(inputs() * 2).square().mean())
        else:
            losses[0].backward(retain_graph=True)
        for loss in losses:
            loss.backward()
        return [*(whole(param.grad) for param in model.parameters()), *(loss.detach() for loss in losses)]

    twice(program, fully_shard)


def test_what_is_written_after_a_backward_that_raised_is_kept():
    def fail(gradient):
        raise RuntimeError("in backward")

    def program(sharding):
        model = seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
        model = sharding(model) if sharding else model
        optimizer = sgd_of(model)
        hidden = model[0](inputs())
        hidden.register_hook(fail)
        with pytest.raises(RuntimeError, match="in backward"):
            model[1](hidden).sum().backward()
        hidden = model(inputs())
        hidden.register_hook(fail)
        with pytest.raises(RuntimeError, match="in backward"):
            hidden.sum().backward()
        model.zero_grad()
        model[0].weight.data = model[0].weight.data * 0.5
        with torch.no_grad():
            model[1].weight.mul_(0.25)
        return gradients_and_losses(model, optimizer)

    def reaches_the_inner(model):
        return shard_children(model, reshard_after_forward=False)

    twice(program, shard_children, reaches_the_inner)


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_unit_of_two_modules_of_which_one_raised_is_in_order_afterwards(hook):
    def fail(*_):
        raise RuntimeError("in a hook")

    def program(sharding):
        model = seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
        if sharding:
            fully_shard([*model])
            fully_shard(model)
        handle = getattr(model[0], hook)(fail)
        with pytest.raises(RuntimeError, match="in a hook"):
            model(inputs())
        handle.remove()
        model[0].bias.data = model[0].bias.data * 0.5
        model[1].weight.requires_grad_(False)
        return gradients_and_losses(model)

    twice(program, fully_shard)


class Borrows(nn.Module):
    """Uses its first layer's weight again, before a layer whose gradients come first."""

    def __init__(self):
        super().__init__()
        self.first, self.third = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.third(torch.tanh(self.second(x) + self.second(-x)))


def test_weights_tied_to_another_unit_stay_until_backward_has_passed_them():
    def inner_alone(model):
        fully_shard(model.first)
        return fully_shard(model)

    def program(sharding):
        model = seeded(Borrows())
        return gradients_and_losses(sharding(model) if sharding else model)

    twice(program, inner_alone)


def test_a_unit_tied_to_another_may_be_called_alone_before_the_model_has_run():
    def inner_alone(model):
        fully_shard(model.third)
        return fully_shard(model)

    def program(sharding):
        model = seeded(Borrows())
        model = sharding(model) if sharding else model
        model.third.weight = model.first.weight
        model.third(inputs()).square().mean().backward()
        return [whole(param.grad) for param in (model.first.weight, model.third.bias)]

    twice(program, inner_alone)


def test_reentrant_checkpoints_inside_a_unit_do_not_end_its_backward():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = self.norm(x)
            for _ in range(3):
                x = torch.tanh(checkpoint(self.linear, x, use_reentrant=True))
            return x

    def program(sharding):
        model = seeded(Twice())
        return gradients_and_losses(sharding(model) if sharding else model)

    twice(program, fully_shard)


def test_foreach_kernels_on_shards_may_run_on_many_threads_with_any_operands():
    def program(sharding):
        torch.manual_seed(0)
        model = seeded(nn.Linear(WIDTH, WIDTH))
        model = sharding(model) if sharding else model
        teacher = [param.detach().clone() for param in model.parameters()]
        results = []
        for _ in range(40):
            with torch.no_grad():
                results.append(model(inputs()))
                params = list(model.parameters())
                torch._foreach_lerp_(teacher, [param.detach() for param in params], 0.25)
                # One number for all of them, and operands that are placed otherwise.
                torch._foreach_mul_(params, params[0].detach().square().sum().clamp(0.5, 0.75))
                torch._foreach_add_(params, [replicated(param) for param in teacher], alpha=0.125)
        return results

    def kept(model):
        return fully_shard(model, reshard_after_forward=False)

    twice(program, kept)


def replicated(tensor):
    return tensor.redistribute(placements=[Replicate()]) if isinstance(tensor, DTensor) else tensor


def test_a_step_without_sums_that_wait_for_replicas_is_refused():
    def on_a_rank():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        model = fully_shard(seeded(nn.Linear(WIDTH, WIDTH)), mesh=mesh)
        optimizer = sgd_of(model)
        model.set_requires_all_reduce(False)
        model(inputs()).sum().backward()
        with pytest.raises(StateError, match="would step without the gradients that were kept back"):
            optimizer.step()
        model.set_requires_all_reduce(True)
        model(inputs()).sum().backward()
        optimizer.step()

    run_ranks(on_a_rank, 2)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class StoresAndRaises(nn.Linear):
    def forward(self, x):
        self.stored = super().forward(x).sin()
        raise ValueError("cannot do it")


class SecondIfFirstRaises(Pair):
    def __init__(self):
        super().__init__()
        self.first = StoresAndRaises(WIDTH, WIDTH)

    def forward(self, x):
        try:
            return self.first(x)
        except ValueError:
            return self.second(torch.tanh(x))


class FirstOfAConstant(Pair):
    def forward(self, x):
        return self.first(inputs()) + self.second(torch.tanh(x))


class FirstWithoutGrad(Pair):
    def forward(self, x):
        with torch.no_grad():
            scale = self.first(x).mean()
        return self.second(torch.tanh(x)) * scale


class FirstOfAnotherInput(Pair):
    def forward(self, x):
        return self.first(inputs().requires_grad_()) + self.second(torch.tanh(x))


def shard_pair(model):
    fully_shard([model.first, model.second])
    return fully_shard(model)


@pytest.mark.parametrize(
    "make", [Pair, SecondIfFirstRaises, FirstOfAConstant, FirstWithoutGrad, FirstOfAnotherInput]
)
def test_second_derivatives_pass_whichever_modules_of_a_unit_ran(make):
    def program(sharding):
        model = seeded(make())
        model = sharding(model) if sharding else model
        results = []
        for _ in range(2):
            x = inputs().requires_grad_()
            loss = model(x).square().mean()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + slope.square().sum()).backward()
            results += [loss.detach(), slope.detach(), x.grad]
            results += [whole(param.grad) for param in model.second.parameters()]
            model.zero_grad()
        return results

    twice(program, shard_pair)


def test_backward_may_start_from_what_a_module_stored_before_it_raised():
    def program(sharding):
        model = seeded(SecondIfFirstRaises())
        model = sharding(model) if sharding else model
        optimizer = sgd_of(model)
        results = []
        for _ in range(3):
            loss = model(inputs()).square().mean() + model.first.stored.square().mean()
            loss.backward()
            results += [loss.detach(), *(whole(param.grad) for param in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        return results

    twice(program, shard_pair)


def test_a_tie_leaves_what_was_replaced_in_the_unit_it_is_tied_to():
    def shard_first(model):
        fully_shard(model.first)
        return fully_shard(model)

    def program(sharding):
        model = seeded(Pair())
        model = sharding(model) if sharding else model
        with torch.no_grad():
            model.first.bias = nn.Parameter(model.first.bias * 0.5)
        model.second.weight = model.first.weight
        return gradients_and_losses(model)

    twice(program, shard_first)


@pytest.mark.parametrize("how", ["one of them", "all of them"])
def test_weights_that_are_untied_after_sharding_are_refused(how):
    def on_a_rank():
        model = fully_shard(seeded(Tied()))
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        model.head.weight = model.emb.weight
        before = model(torch.arange(4)).detach()
        model.reshard()
        if how == "one of them":
            model.head.weight = nn.Parameter(model.emb.weight.detach() * 2)
        else:
            model.load_state_dict(saved, assign=True)
        with pytest.raises(StateError, match="several names, and they were given different parameters"):
            model(torch.arange(4))
        model.head.weight = model.emb.weight
        assert torch.equal(model(torch.arange(4)), before)

    run_ranks(on_a_rank, 2)


@pytest.mark.parametrize("change", ["write", "data", "freeze"])
@pytest.mark.parametrize("with_grad", [False, True])
def test_what_was_done_to_gathered_weights_stays_when_a_step_keeps_them(change, with_grad):
    def kept(model):
        model = fully_shard(model, reshard_after_forward=False)
        model.set_reshard_after_backward(False)
        return model

    def program(sharding):
        model = seeded(nn.Linear(WIDTH, WIDTH))
        model = sharding(model) if sharding else model
        results = []
        for _ in range(2):
            if sharding:
                model.unshard()
            if change == "write":
                with torch.no_grad():
                    model.weight.mul_(1.5)
            elif change == "data":
                model.weight.data = model.weight.data * 1.5
            else:
                model.bias.requires_grad_(False)
            with torch.set_grad_enabled(with_grad):
                loss = model(inputs()).square().mean()
            if with_grad:
                loss.backward()
            if sharding:
                assert all(isinstance(param, DTensor) for param in model.parameters())
            results += [loss.detach(), *(whole(param.detach().clone()) for param in model.parameters())]
            results += [torch.tensor(param.requires_grad) for param in model.parameters()]
        return results

    twice(program, kept)


class CallsItselfTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, depth=1):
        return torch.tanh(self.linear(self(x, depth - 1) + self(-x, depth - 1) if depth else x))


def test_a_recursive_module_of_an_outermost_unit_of_several_is_freed_after_its_forward():
    def on_a_rank():
        first, second = seeded(CallsItselfTwice()), seeded(nn.Linear(WIDTH, WIDTH))
        fully_shard([first, second])
        with torch.no_grad():
            first(inputs())
        assert is_sharded(first.linear)
        assert is_sharded(second)

    run_ranks(on_a_rank, 2)


class OtherPath(Pair):
    """Runs its first module by another path than the one whose weight the second module shows, too."""

    def __init__(self):
        super().__init__()
        self.first = nn.ModuleDict({"used": nn.Linear(WIDTH, WIDTH), "tied": nn.Linear(WIDTH, WIDTH)})
        self.first.forward = self.first["used"].forward
        self.second.weight = self.first["tied"].weight


def test_a_tied_weight_that_only_the_other_unit_uses_gets_its_gradient():
    def program(sharding):
        model = seeded(OtherPath())
        return gradients_and_losses(sharding(model) if sharding else model)

    twice(program, shard_children)


@pytest.mark.parametrize("together", [True, False])
def test_a_new_parameter_given_two_names_at_once_gets_both_gradients(together):
    def program(sharding):
        model = seeded(Pair())
        model = sharding(model) if sharding else model
        with torch.no_grad():
            model.first.weight = nn.Parameter(model.first.weight * 0.5)
        model.second.weight = model.first.weight
        return gradients_and_losses(model)

    twice(program, fully_shard if together else shard_children)


def test_sums_that_wait_for_replicas_stay_when_gathered_weights_are_given_other_memory():
    def on_a_rank():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        gradients = []
        for moves in (False, True):
            model = fully_shard(seeded(nn.Linear(WIDTH, WIDTH)), mesh=mesh)
            model.set_requires_all_reduce(False)
            model(inputs()).sum().backward()
            model.set_requires_all_reduce(True)
            model.unshard()
            if moves:
                model.weight.data = model.weight.data.clone()
            model.reshard()
            model(inputs()).sum().backward()
            gradients.append(model.weight.grad.full_tensor())
        assert torch.equal(*gradients)

    run_ranks(on_a_rank, 2)


def test_a_state_dict_may_be_loaded_after_a_backward_that_raised():
    def program(sharding):
        model = seeded(Pair())
        model = sharding(model) if sharding else model
        saved = {name: whole(value).clone() for name, value in model.state_dict().items()}

        def fail(gradient):
            raise ValueError("in backward")

        output = model.first(inputs())
        output.register_hook(fail)
        with pytest.raises(ValueError, match="in backward"):
            output.sum().backward()
        model.load_state_dict({name: 2 * value for name, value in saved.items()})
        return [whole(value) for value in model.state_dict().values()]

    twice(program, shard_children)


def test_a_recursive_module_of_a_unit_of_several_trains_on_fresh_weights():
    def shard_both(model):
        fully_shard([model.first, model.second])
        return fully_shard(model)

    def program(sharding):
        model = Pair()
        model.second = CallsItselfTwice()
        model = seeded(model)
        model = sharding(model) if sharding else model
        return gradients_and_losses(model)

    twice(program, shard_both)


def test_a_gathered_parameter_that_was_freed_can_be_printed():
    def on_a_rank():
        model = fully_shard(nn.Linear(WIDTH, WIDTH))
        model(inputs())
        model.unshard()
        kept = [model.weight, model.weight.data, model.weight[0]]
        assert "<freed>" not in repr(kept)
        model.reshard()
        for freed in kept:  # reading one would end the process
            assert f"<freed>, size={tuple(freed.shape)}" in repr(freed)
        assert (
            "<freed>"
            not in f"{torch.zeros(2)} {torch.zeros(0)} {torch.zeros(2, device='meta')} {model.weight}"
        )

    run_ranks(on_a_rank, 2)


@pytest.mark.parametrize("sharding", [fully_shard, FullyShardedDataParallel, wrapped])
@pytest.mark.parametrize("names", ["of the model", "of the plain model"])
def test_functional_call_on_a_sharded_model_is_refused_and_changes_nothing(sharding, names):
    def on_a_rank():
        plain = seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
        values = {name: value.detach() * 2 for name, value in plain.named_parameters()}
        expected = gradients_and_losses(plain)
        model = sharding(seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))))
        if names == "of the model":
            values = {name: value.detach() * 2 for name, value in model.named_parameters()}
        with pytest.raises(StateError, match="functional_call cannot give parameter"):
            torch.func.functional_call(model, values, (inputs(),))
        losses = [loss for loss in gradients_and_losses(model) if loss.dim() == 0]
        assert losses == [loss for loss in expected if loss.dim() == 0]

    run_ranks(on_a_rank, 2)


def test_functional_call_may_swap_what_is_not_sharded():
    def on_a_rank():
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))
        fully_shard(model[0])
        swapped = {"1.weight": torch.zeros(WIDTH, WIDTH)}
        assert not torch.func.functional_call(model, swapped, (inputs(),)).any()
        assert model(inputs()).any()

    run_ranks(on_a_rank, 1)


def test_freezing_a_gathered_parameter_and_thawing_its_shard_happen_in_their_order():
    def program(sharding):
        model = seeded(Pair())
        model = sharding(model) if sharding else model
        optimizer = sgd_of(model)
        model(inputs())  # no backward: modules of the outermost wrapper show gathered parameters
        model.first.weight.requires_grad_(False)
        model.requires_grad_(True)  # the wrapper's parameters are always shards
        return gradients_and_losses(model, optimizer)

    twice(program, wrapped, fully_shard)


@pytest.mark.parametrize("with_grad", [False, True])
def test_what_is_written_to_data_of_shards_is_used_by_units_that_are_kept(with_grad):
    def program(sharding):
        model = seeded(Pair())
        model = sharding(model) if sharding else model
        params, results = list(model.parameters()), []
        data = [param.data for param in params]
        with torch.set_grad_enabled(with_grad):
            for write in (lambda param, data: param.data.mul_(0.5), lambda param, data: data.mul_(0.5)):
                results.append(model(inputs()).detach())
                list(map(write, params, data))
            results.append(model(inputs()).detach())
        return results

    def kept(model):
        return shard_children(model, reshard_after_forward=False)

    twice(program, kept)


def test_data_of_gathered_parameters_is_written_to_in_vain_as_in_torch():
    def on_a_rank():
        model = fully_shard(seeded(Pair()))
        before = whole(model.first.weight).clone()
        model.unshard()
        model.first.weight.data.mul_(2)
        model.reshard()
        assert torch.equal(whole(model.first.weight), before)

    run_ranks(on_a_rank, 2)


# --- weights written to while a graph needs them ----------------------------------------------------------------------


def scale_by_half(model, optimizer, saved):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def step_on(model, optimizer, saved):
    model(inputs()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def load_saved(model, optimizer, saved):
    model.load_state_dict(saved)


def scale_local_by_half(model, optimizer, saved):
    with torch.no_grad():
        for param in model.parameters():
            (param.to_local() if isinstance(param, DTensor) else param).mul_(0.5)


def differentiates_after(write, optimizer_class):
    def program(sharding):
        model = seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
        model = sharding(model) if sharding else model
        optimizer = optimizer_class(model.parameters())
        saved = {name: value.detach().clone() for name, value in model.state_dict().items()}
        loss = model(inputs()).square().mean()
        write(model, optimizer, saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()
        return train(model, optimizer, inputs(), inputs())

    return program


@pytest.mark.parametrize("write", [scale_by_half, step_on, load_saved])
@pytest.mark.parametrize("foreach", [False, True])
def test_a_backward_that_needs_weights_of_before_a_write_is_refused_as_autograd_does(write, foreach):
    def kept(model):
        return shard_children(model, reshard_after_forward=False)

    program = differentiates_after(write, partial(torch.optim.SGD, lr=0.5, foreach=foreach))
    twice(program, shard_children, kept, wrap_children, wrapped)


def test_a_backward_that_needs_weights_of_before_a_write_to_local_tensors_is_refused():
    def kept(model):
        return shard_children(model, reshard_after_forward=False)

    twice(differentiates_after(scale_local_by_half, partial(torch.optim.SGD, lr=0.5)), shard_children, kept)


def test_a_backward_follows_a_write_to_gathered_weights_that_came_before_its_forward():
    def program(sharding):
        model = seeded(nn.Linear(WIDTH, WIDTH))
        model = sharding(model) if sharding else model
        if sharding:
            model.unshard()
        with torch.no_grad():
            model.weight.mul_(0.5)
        loss = model(inputs().requires_grad_()).square().mean()
        model(inputs(2)).sum().backward()
        loss.backward()
        return [loss.detach(), whole(model.weight.grad)]

    twice(program, fully_shard)


def test_a_backward_may_follow_a_step_of_weights_that_it_does_not_need():
    """One optimizer for all, as for a generator that waits while its discriminator is trained."""

    def units_without_a_model_around(model):
        for child in model.children():
            fully_shard(child)
        return model

    def program(sharding):
        model = seeded(Pair())
        model = sharding(model) if sharding else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
        made = model.first(inputs())
        model.second(made.detach()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.second(made).square().mean().backward()
        return gradients_and_losses(model, optimizer)

    twice(program, units_without_a_model_around)


@pytest.mark.parametrize("width", [WIDTH, 1])
def test_data_written_to_flat_shards_after_an_evaluation_is_used(width):
    """A moving average of the weights is put in their place for an evaluation, and they are put back by ``data``.

    With a width of 1, the second of two ranks has no elements.
    """

    def program(sharding):
        model = seeded(
            nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))
        )
        model = sharding(model) if sharding else model
        results = []
        for with_grad in (False, True):
            with torch.set_grad_enabled(with_grad):
                results.append(model(inputs()[:, :width]).detach().sum())
            for number, param in enumerate(model.parameters()):
                if number:
                    param.data = param.data * 0.5
                else:
                    param.data.mul_(0.5)
            loss = model(inputs()[:, :width]).square().mean()
            loss.backward()
            model.zero_grad()
            results.append(loss.detach())
        return results

    def kept(model):
        for name, child in list(model.named_children()):
            setattr(model, name, kept_flat(child))
        return kept_flat(model)

    twice(program, kept, wrap_children, kept_flat, wrapped)


def kept_flat(module):
    return FullyShardedDataParallel(
        module, use_orig_params=True, sharding_strategy=shardwise.ShardingStrategy.SHARD_GRAD_OP
    )


def test_gradients_of_gathered_parameters_may_be_asked_for():
    def program(sharding):
        model = seeded(Pair())
        model = sharding(model) if sharding else model
        loss = model(inputs()).square().mean()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    def kept(model):
        return shard_children(model, reshard_after_forward=False)

    twice(program, kept)


def wrap_children_late(model):
    late = partial(
        FullyShardedDataParallel,
        use_orig_params=True,
        backward_prefetch=shardwise.BackwardPrefetch.BACKWARD_POST,
    )
    for name, child in list(model.named_children()):
        setattr(model, name, late(child))
    return late(model)


def test_a_late_prefetch_gathers_nothing_that_backward_has_passed():
    """The outermost unit's backward ends after all others, where its inputs need gradients: here, on one rank."""

    def on_a_rank():
        model = wrap_children_late(seeded(Pair()))
        for needs_grad in (False, torch.distributed.get_rank() == 0):
            with trace.record(model) as recorder:
                model(inputs().requires_grad_(needs_grad)).sum().backward()
        gathered = [phase for _, _, phase in recorder.of(trace.UNSHARD)]
        assert gathered.count(trace.IN_PRE_BACKWARD) == 2

    run_ranks(on_a_rank, 2)


def test_a_parameter_thawed_as_a_shard_and_then_frozen_where_a_module_shows_it_is_frozen():
    def program(sharding):
        model = seeded(Pair())
        model.requires_grad_(False)
        model = sharding(model) if sharding else model
        model(inputs())  # no backward: modules of the outermost wrapper show gathered parameters
        model.requires_grad_(True)  # the wrapper's parameters are always shards
        model.first.weight.requires_grad_(False)
        return train(model, sgd_of(model), inputs(), inputs(), inputs())

    twice(program, wrapped)


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def shard_third(model):
    fully_shard(model.third)
    return fully_shard(model)


def test_a_weight_that_loses_its_own_name_to_a_tie_keeps_the_name_that_was_tied_to_it_before():
    def program(sharding):
        model = seeded(Chain())
        model = sharding(model) if sharding else model
        model.third.weight = model.second.weight
        model.second.weight = model.first.weight
        return gradients_and_losses(model)

    twice(program, shard_third, fully_shard)


@pytest.mark.parametrize("first", ["unshard", "call"])
def test_two_ties_in_a_row_are_followed_though_the_inner_unit_was_used_alone_first(first):
    def program(sharding):
        model = seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH), Pair(), nn.Linear(WIDTH, WIDTH)))
        if sharding:
            fully_shard(model[1])
            fully_shard(model)
        model[0].weight = model[1].first.weight
        model[1].first.weight = model[1].second.weight
        if first == "call":
            with torch.no_grad():
                model[1](inputs())
        elif sharding:
            model[1].unshard()
            model[1].reshard()
        return gradients_and_losses(model)

    twice(program, fully_shard)


def test_a_unit_that_kept_a_part_is_tied_away_whole():
    def keep_parts(model):
        fully_shard(model.third, reshard_after_forward=2)
        return fully_shard(model)

    def program(sharding):
        model = seeded(Chain())
        model = sharding(model) if sharding else model
        model.third.weight = model.first.weight
        loss = model(inputs()).square().mean()
        model(inputs(2))
        loss.backward()
        return [loss.detach(), *gradients_and_losses(model)]

    twice(program, keep_parts, world_size=4)


def test_what_is_written_after_a_unit_raised_by_itself_reaches_the_part_that_it_keeps():
    def keep_parts(model):
        fully_shard(model.second, reshard_after_forward=2)
        return fully_shard(model)

    def program(sharding):
        model = seeded(Pair())
        model = sharding(model) if sharding else model
        optimizer = sgd_of(model)
        results = gradients_and_losses(model, optimizer)
        with pytest.raises(RuntimeError):
            model.second(inputs()[:, 1:])
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
        return [*results, *gradients_and_losses(model, optimizer)]

    twice(program, keep_parts, world_size=4)


def test_a_wrapper_gives_a_parameter_once_that_was_tied_while_it_was_gathered():
    def program(sharding):
        model = seeded(Pair())
        model = sharding(model) if sharding else model
        model(inputs())
        model.second.requires_grad_(True)
        (model.second.module if sharding else model.second).weight = model.first.weight
        return train(model, sgd_of(model), inputs(), inputs())

    def wrap_second(model):
        model.second = wrapped(model.second)
        return wrapped(model)

    twice(program, wrap_second, world_size=1)


def test_inputs_that_need_gradients_on_one_rank_alone_raise_on_every_rank_and_training_goes_on():
    """With them, the first unit's backward ends in another place, so gradients are reduced in another order."""

    def on_a_rank():
        model = seeded(Pair())
        fully_shard(model.first)
        fully_shard(model)
        optimizer = sgd_of(model)
        with pytest.raises(RankDisagreement, match="inputs that need gradients alike"):
            train(model, optimizer, inputs().requires_grad_(torch.distributed.get_rank() == 0))
        optimizer.zero_grad()
        return [torch.stack(gradients_and_losses(model)[::5])]

    plain = torch.stack(gradients_and_losses(seeded(Pair()))[::5])
    for losses in run_ranks(on_a_rank, 2):
        assert torch.equal(*losses, plain)
