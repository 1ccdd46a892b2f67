"""Gradients are right whatever a model does with its modules, outputs and inputs."""

from __future__ import annotations

import collections
import dataclasses
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import StateError
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import (
    DoubleLinear,
    Layers,
    average_gradients,
    data,
    full,
    match_plain,
    same,
    same_shard,
)
from tests.ranks.subject import TORCH_IS_THE_SUBJECT, MixedPrecisionPolicy, beyond_torch, fully_shard, record
from tests.ranks.tables import cases_of, run_cases

RESHARDS = [True, False, 2]


def units(*names, reshard=True):
    """A function that shards these submodules, then the root."""

    def shard(model):
        for name in names:
            fully_shard(model.get_submodule(name), reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)

    return shard


def alternate(step):
    return step % 2 == 1


def unused_output(reshard):
    def loss_of(model, step, rank):
        first, second = model(data(step, rank, 2, 7))
        return (first * second).mean() if step < 3 else first.square().mean()

    match_plain(partial(DoubleLinear, 7), units("lin1", reshard=reshard), loss_of, set_to_none=alternate)


def test_an_output_may_be_left_out_of_the_loss():
    run_cases(unused_output, 2, cases_of(reshard=RESHARDS), kind="gloo")


def unused_module(reshard):
    build = partial(DoubleLinear, 7, use_second=False)
    model = match_plain(
        build,
        units("lin1", "lin2", reshard=reshard),
        lambda model, step, rank: model(data(step, rank, 2, 7)).square().mean(),
        set_to_none=alternate,
    )
    assert model.lin2.weight.grad is None
    assert model.lin2.bias.grad is None
    assert isinstance(model.lin2.weight, DTensor)


def test_a_module_may_go_unused_and_its_gradients_stay_none():
    run_cases(unused_module, 2, cases_of(reshard=RESHARDS), kind="gloo")


def unused_parameter_within_a_unit():
    """lin2 is part of the root's unit, together with parameters that are used."""
    build = partial(DoubleLinear, 7, use_second=False)
    model = match_plain(
        build, fully_shard, lambda model, step, rank: model(data(step, rank, 2, 7)).square().mean()
    )
    assert model.lin2.weight.grad is None


def test_an_unused_parameter_of_a_used_unit_keeps_no_gradient():
    run_ranks(unused_parameter_within_a_unit, 2, kind="gloo")


class Switch(nn.Module):
    """Runs the layers it is told to, in the order it is told."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, x, route):
        x = self.first(x)
        for index in route:
            x = torch.tanh(self.layers[index](x))
        return x


ROUTES = [(0, 1, 2, 3), (0, 2), (3, 1), (1,), (0, 1, 2, 3), (2, 2, 0), (3, 2, 1, 0)]


def changing_use(reshard, set_to_none):
    def loss_of(model, step, rank):
        return model(data(step, rank, 2, 5), ROUTES[step % len(ROUTES)]).square().mean()

    shard = units(*(f"layers.{index}" for index in range(4)), reshard=reshard)
    match_plain(Switch, shard, loss_of, set_to_none=lambda step: set_to_none)


def test_which_modules_run_and_in_which_order_may_change_from_step_to_step():
    run_cases(changing_use, 2, cases_of(reshard=RESHARDS, set_to_none=[True, False]), kind="gloo")


def zero_grad_in_place():
    model = seeded(Layers())
    units("layers.0", "layers.1")(model)
    rank = dist.get_rank()
    model(data(0, rank, 2, 6)).square().mean().backward()
    grads = [param.grad for param in model.parameters()]
    values = [full(grad).clone() for grad in grads]
    model.zero_grad(set_to_none=False)
    assert all(full(grad).count_nonzero() == 0 for grad in grads)
    model(data(0, rank, 2, 6)).square().mean().backward()
    for param, grad, value in zip(model.parameters(), grads, values, strict=True):
        assert param.grad is grad, "the reduce should add into the gradient that is there"
        same_shard(grad, value, "gradient")
    model(data(0, rank, 2, 6)).square().mean().backward()
    for grad, value in zip(grads, values, strict=True):
        same_shard(grad, value + value, "gradient of two backwards")


def test_the_reduce_adds_into_a_gradient_that_is_there():
    run_ranks(zero_grad_in_place, 2, kind="gloo")


# --- activations in containers --------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass
class Record:
    first: torch.Tensor
    second: torch.Tensor
    note: str = "a value that is no tensor"


PACK = {
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "namedtuple": Pair,
    "dict": lambda a, b: {"first": a, "second": b},
    "nested": lambda a, b: {"pair": Pair(a, [b, None, 3]), "text": "kept"},
    "dataclass": Record,
    "nested dataclass": lambda a, b: {"records": [Record(a, b)], "n": (1, 2)},
}
UNPACK = {
    "list": tuple,
    "tuple": tuple,
    "namedtuple": tuple,
    "dict": lambda value: (value["first"], value["second"]),
    "nested": lambda value: (value["pair"].first, value["pair"].second[0]),
    "dataclass": lambda value: (value.first, value.second),
    "nested dataclass": lambda value: (value["records"][0].first, value["records"][0].second),
}


class Packing(nn.Module):
    """Takes a container and gives one."""

    def __init__(self, container):
        super().__init__()
        self.container = container
        self.lin1 = nn.Linear(5, 5)
        self.lin2 = nn.Linear(5, 5)

    def forward(self, packed):
        first, second = UNPACK[self.container](packed)
        return PACK[self.container](torch.tanh(self.lin1(first)), torch.tanh(self.lin2(second)))


class Chain(nn.Module):
    def __init__(self, container):
        super().__init__()
        self.container = container
        self.layers = nn.Sequential(*(Packing(container) for _ in range(3)))

    def forward(self, x):
        packed = self.layers(PACK[self.container](x, x.sin()))
        assert type(packed) is type(PACK[self.container](x, x)), "hooks should hand on the container as it is"
        return packed


def containers(container, reshard):
    def loss_of(model, step, rank):
        first, second = UNPACK[container](model(data(step, rank, 2, 5)))
        return first.square().mean() + second.abs().mean()

    shard = units("layers.0", "layers.1", "layers.2", reshard=reshard)
    match_plain(partial(Chain, container), shard, loss_of, steps=4)


@pytest.mark.parametrize("container", PACK)
def test_activations_may_travel_in_containers(container):
    if TORCH_IS_THE_SUBJECT and "dataclass" in container:
        pytest.skip("torch does not look into dataclasses")
    run_cases(containers, 2, cases_of(container=[container], reshard=[True, False]), kind="gloo")


# --- several forwards, several backwards ----------------------------------------------------------------------


class Masked(nn.Module):
    """A layer that takes more than its activations, as those of transformers do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x, mask, *, angles):
        self.given = x
        return torch.tanh(self.layer(x) * mask + angles[0])


class MaskedChain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Masked() for _ in range(3))

    def forward(self, x):
        mask, angles = torch.ones(5), (torch.full((5,), 0.5), None)
        given = []
        for layer in self.layers:
            given.append(x)
            x = layer(x, mask, angles=angles)
        self.are_handed_on = [layer.given is each for layer, each in zip(self.layers, given, strict=True)]
        return x


def chained(reshard):
    def loss_of(model, step, rank):
        x = data(step, rank, 2, 5).requires_grad_()
        loss = model(x).square().mean()
        # What one unit gives out and the next takes in needs no view of it.
        assert TORCH_IS_THE_SUBJECT or model.are_handed_on[1:] == [True, True]
        return loss

    match_plain(MaskedChain, units("layers.0", "layers.1", "layers.2", reshard=reshard), loss_of, steps=4)


def test_units_may_take_more_than_their_activations():
    run_cases(chained, 2, cases_of(reshard=[True, False]), kind="gloo")


class Noting(nn.Module):
    """A layer that writes to what it is given: to a cache, and to a list inside a record."""

    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x, notes, cache):
        x = self.layer(x)
        notes.first.append(x.shape[-1])
        cache[len(cache)] = x.detach()
        return x


def written_to(**policy):
    model = nn.Sequential(Noting(6), Noting(6))
    for layer in model:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(**policy))
    notes, cache, x = Record([], None), {}, torch.ones(2, 6, requires_grad=True)
    for layer in model:
        x = layer(x, notes, cache=cache)
    assert notes.first == [6, 6]
    assert list(cache) == [0, 1]


@beyond_torch
def test_what_a_module_writes_into_its_arguments_reaches_the_caller():
    run_cases(written_to, 2, cases_of(param_dtype=[None, torch.bfloat16]))


class Written(nn.Module):
    """Outputs of layers, which are views because their inputs have three dims, are written to by whoever comes next."""

    def __init__(self, in_place):
        super().__init__()
        self.layers = nn.ModuleList(Part() for _ in range(3))
        self.in_place = in_place

    def forward(self, x):
        for layer in self.layers:
            x, given = layer(x)
            x = x.mul_(2) if self.in_place else x * 2
            x = torch.relu_(x) if self.in_place else torch.relu(x)
            x = x + given.mean()
        # The model's own output, too.
        x = self.layers[0](x)[0]
        return torch.tanh_(x) if self.in_place else torch.tanh(x)


class Part(nn.Module):
    """Gives out a part of what it computed, and what it was given in another shape."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 6)

    def forward(self, x):
        return self.layer(x)[..., :5], x.reshape(-1)


def written_outputs(reshard, with_inputs):
    names = ("layers.0", "layers.1", "layers.2")
    shard = units(*names, reshard=reshard)
    seen = {}

    def loss_of(model, step, rank):
        return model(data(step, rank, 4, 5).view(2, 2, 5).requires_grad_(with_inputs)).square().mean()

    for in_place in (True, False):
        model = match_plain(partial(Written, in_place), shard, loss_of, steps=4)
        assert all(isinstance(param, DTensor) for param in model.parameters()), "something was not let go"
        with record(model) as recorder:
            model(data(9, 0, 4, 5).view(2, 2, 5)).sum().backward()
        seen[in_place] = [(event.kind, event.unit, event.phase) for event in recorder.events]
    assert seen[True] == seen[False]


@beyond_torch
def test_outputs_may_be_written_to_in_place():
    run_cases(written_outputs, 2, cases_of(reshard=RESHARDS, with_inputs=[False, True]), kind="gloo")


class Tampering(Layers):
    tampers = False

    def forward(self, x):
        x = self.layers[0](self.first(x))
        if self.tampers:
            x._backward_hooks.clear()
        return self.last(self.layers[2](self.layers[1](x)))


def unannounced_backward():
    def loss_of(model, step, rank):
        return model(data(step, rank, 2, 6)).square().mean()

    model = seeded(Tampering())
    units("layers.0", "layers.1")(model)
    optim = torch.optim.SGD(model.parameters())
    model.tampers = True
    with pytest.raises(StateError, match=r"went through unit 'layers\.0' before its weights were gathered"):
        loss_of(model, 0, dist.get_rank()).backward()
    model.tampers = False
    optim.zero_grad()
    plain = seeded(Tampering())
    loss_of(model, 1, dist.get_rank()).backward()
    average_gradients(plain, lambda rank: loss_of(plain, 1, rank), 2)
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        same_shard(param.grad, expected.grad, "gradient")


@beyond_torch
def test_gradients_of_weights_that_were_not_there_are_refused():
    run_ranks(unannounced_backward, 2, kind="gloo")


def several_forwards(reshard, num_forwards):
    def loss_of(model, step, rank):
        outputs = [model(data(step, rank + 10 * index, 2, 6)) for index in range(num_forwards)]
        return sum(output.square().mean() for output in outputs)

    match_plain(Layers, units("layers.0", "layers.1", reshard=reshard), loss_of)


def test_a_model_may_run_several_times_before_backward():
    run_cases(several_forwards, 2, cases_of(reshard=RESHARDS, num_forwards=[2, 3]), kind="gloo")


class Reuse(nn.Module):
    """One unit runs three times, with another between."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.again = nn.Linear(5, 5)
        self.between = nn.Linear(5, 5)

    def forward(self, x):
        x = self.again(torch.tanh(self.first(x)))
        x = self.again(torch.tanh(self.between(x)))
        return self.again(torch.tanh(x))


def reused_module(reshard):
    def loss_of(model, step, rank):
        return model(data(step, rank, 2, 5)).square().mean()

    match_plain(Reuse, units("again", "between", reshard=reshard), loss_of)


def test_a_unit_may_run_several_times_in_a_forward():
    run_cases(reused_module, 2, cases_of(reshard=RESHARDS), kind="gloo")


def inputs_with_grad(reshard):
    """The gradient that leaves the model through its inputs is right too."""
    model, plain = seeded(Layers()), seeded(Layers())
    units("layers.0", "layers.1", reshard=reshard)(model)
    rank = dist.get_rank()
    for step in range(3):
        ours, theirs = (data(step, rank, 2, 6).requires_grad_() for _ in range(2))
        model(ours).square().mean().backward()
        plain(theirs).square().mean().backward()
        same(ours.grad, theirs.grad, "gradient of the input")


def test_inputs_that_need_grad_get_it():
    run_cases(inputs_with_grad, 2, cases_of(reshard=RESHARDS), kind="gloo")


class FirstUnit(nn.Module):
    """Its first unit gets the raw input, which needs no grad; the root has no parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))

    def forward(self, x):
        return self.layers(x)


def test_the_first_unit_may_get_inputs_that_need_no_grad():
    run_cases(first_unit, 2, cases_of(reshard=RESHARDS), kind="gloo")


def first_unit(reshard):
    def loss_of(model, step, rank):
        return model(data(step, rank, 2, 5)).square().mean()

    model = match_plain(FirstUnit, units("layers.0", "layers.2", reshard=reshard), loss_of)
    assert all(isinstance(param, DTensor) for param in model.parameters())


def backward_in_pieces(build, *shape):
    """Two backwards through one graph: the gradients of both add up."""
    model, plain = seeded(build()), seeded(build())
    units("layers.0", "layers.1")(model)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        output = model(data(step, rank, *shape))
        output.square().mean().backward(retain_graph=True)
        output.abs().mean().backward()
        average_gradients(plain, lambda r: plain(data(step, r, *shape)).square().mean(), world_size)  # noqa: B023
        average_gradients(plain, lambda r: plain(data(step, r, *shape)).abs().mean(), world_size)  # noqa: B023
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            same_shard(param.grad, expected.grad, f"step {step}: gradient of {name}")


def test_one_graph_may_be_run_backward_twice():
    run_ranks(backward_in_pieces, 2, Layers, 2, 6, kind="gloo")


@beyond_torch
def test_one_graph_of_outputs_that_were_written_to_may_be_run_backward_twice():
    run_ranks(backward_in_pieces, 2, partial(Written, True), 2, 2, 5, kind="gloo")


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 1)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Energy(nn.Module):
    """Gives out an energy and its forces: a backward within its forward."""

    def __init__(self):
        super().__init__()
        self.critic = Critic()

    def forward(self, x):
        energy = self.critic(x).sum()
        return energy, torch.autograd.grad(energy, x, create_graph=True)[0]


def gradient_penalty(model, step, rank):
    x = data(step, rank, 3, 6).requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.mean() + (slope.norm(dim=1) - 1).square().mean()


def energy_and_forces(model, step, rank):
    energy, forces = model(data(step, rank, 3, 6).requires_grad_())
    return energy.square() + forces.square().sum()


def gradients_of_gradients(names, reshard):
    in_energy = [f"critic.{name}" for name in names]
    for build, shard, loss_of in (
        (Critic, units(*names, reshard=reshard), gradient_penalty),
        (Energy, units(*in_energy, reshard=reshard), energy_and_forces),
    ):
        model = match_plain(build, shard, loss_of, steps=3)
        assert all(isinstance(param, DTensor) for param in model.parameters()), "something was not let go"


@beyond_torch
def test_a_loss_may_be_made_of_gradients():
    cases = cases_of(names=[[], ["first", "second"]], reshard=[True, False])
    run_cases(gradients_of_gradients, 2, cases, kind="gloo")


def eval_between_steps(reshard):
    def loss_of(model, step, rank):
        with torch.no_grad():
            model(data(step + 50, rank, 2, 6))
        model.eval()
        model(data(step + 70, rank, 2, 6))
        model.train()
        return model(data(step, rank, 2, 6)).square().mean()

    match_plain(Layers, units("layers.0", "layers.1", reshard=reshard), loss_of, steps=4)


def test_forwards_without_a_backward_may_come_between_steps():
    run_cases(eval_between_steps, 2, cases_of(reshard=RESHARDS), kind="gloo")


def frozen_between_steps():
    """`requires_grad` changes; a frozen parameter keeps no gradient and comes back when it is thawed."""

    def loss_of(model, step, rank):
        for name, param in model.named_parameters():
            if name.startswith(("layers.1", "layers.0.in_proj.bias")):
                param.requires_grad_(step % 3 != 1)
        return model(data(step, rank, 2, 6)).square().mean()

    match_plain(Layers, units("layers.0", "layers.1"), loss_of, steps=6)


def test_parameters_may_be_frozen_and_thawed_between_steps():
    run_ranks(frozen_between_steps, 2, kind="gloo")


def used_in_one_micro_batch_only(set_early, set_late):
    """Without gradient sync, a bf16 unit puts gradients by in fp32; each micro-batch uses other parameters of it."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model, plain = seeded(Switch()), seeded(Switch()).to(torch.bfloat16)
    fully_shard(model, mp_policy=policy)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    routes = (set_early, set_late)
    for micro_batch, route in enumerate(routes):
        model.set_requires_gradient_sync(micro_batch == len(routes) - 1)
        model(data(micro_batch, rank, 2, 5), route).float().square().mean().backward()
    totals = {}
    for r in range(world_size):
        held = {}
        for micro_batch, route in enumerate(routes):
            plain(data(micro_batch, r, 2, 5).bfloat16(), route).float().square().mean().backward()
            for name, param in plain.named_parameters():
                if param.grad is not None:
                    held[name] = held.get(name, 0) + param.grad.float()
            plain.zero_grad()
        for name, grad in held.items():
            totals[name] = totals.get(name, 0) + grad
    for name, param in model.named_parameters():
        assert (param.grad is None) == (name not in totals), name
        if name in totals:
            same_shard(param.grad, totals[name] / world_size, f"gradient of {name}")


@beyond_torch  # torch refuses the mix of dtypes that comes of it
@pytest.mark.parametrize(
    "routes",
    [((0, 1), (1, 2)), ((0,), (1, 2, 3)), ((0, 1, 2, 3), ())],
    ids=["overlap", "apart", "early only"],
)
def test_a_parameter_may_be_used_in_one_micro_batch_and_not_in_another(routes):
    run_ranks(used_in_one_micro_batch_only, 2, *routes, kind="gloo")


def unused_in_backward_on_all_ranks():
    """The loss of one step does not reach the model at all."""
    model = seeded(Layers())
    units("layers.0", "layers.1")(model)
    model(data(0, 0, 2, 6))
    (torch.ones(3, requires_grad=True) * 2).sum().backward()
    assert all(param.grad is None for param in model.parameters())
    plain = seeded(Layers())
    rank = dist.get_rank()
    model(data(1, rank, 2, 6)).square().mean().backward()
    average_gradients(plain, lambda r: plain(data(1, r, 2, 6)).square().mean(), 2)
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        same_shard(param.grad, expected.grad, "gradient")


def test_a_backward_that_does_not_reach_the_model_leaves_it_alone():
    run_ranks(unused_in_backward_on_all_ranks, 2, kind="gloo")


@pytest.mark.slow
@beyond_torch
def test_gradients_are_right_with_ranks_as_threads():
    for function in (unused_output, unused_module, reused_module, first_unit):
        run_cases(function, 2, cases_of(reshard=RESHARDS))
    run_cases(changing_use, 2, cases_of(reshard=RESHARDS, set_to_none=[True]))
    run_cases(containers, 2, cases_of(container=["nested dataclass"], reshard=RESHARDS))
    run_cases(several_forwards, 2, cases_of(reshard=RESHARDS, num_forwards=[2]))
