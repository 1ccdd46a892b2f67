"""What cannot work is refused on every rank, in words that name the place, and leaves nothing half sharded."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardwise import (
    ConfigError,
    FSDPModule,
    FullyShardedDataParallel,
    RankDisagreement,
    ShardwiseError,
    StateError,
    fully_shard,
)
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import (
    Layers,
    Traffic,
    TwoLayers,
    average_gradients,
    data,
    match_plain,
    same,
    same_shards,
)
from tests.ranks.subject import beyond_torch
from tests.ranks.tables import cases_of, run_cases

pytestmark = beyond_torch

KINDS = ["threads", "gloo"]


def refused(kind_of_error, call, *words):
    """The call raises this error, with these words in it, and a way out."""
    with pytest.raises(kind_of_error) as caught:
        call()
    message = str(caught.value)
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"
    assert isinstance(caught.value, ShardwiseError)
    assert caught.value.fix, f"no fix in: {message}"
    return message


def is_unharmed(model, plain, *inputs):
    """Not half sharded: no trace of the refused call is left, and the model trains as it did."""
    for name, module in model.named_modules():
        assert not isinstance(module, FSDPModule), f"{name} was left behind as a unit"
    for name, param in model.named_parameters():
        assert type(param) is nn.Parameter, f"{name} was left behind as {type(param)}"
    for each in (model, plain):
        each(*inputs).square().mean().backward()
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        same(param.grad, expected.grad, f"gradient of {name}")


# --- what fully_shard is given --------------------------------------------------------------------------------


def container():
    model = seeded(Layers())
    refused(ValueError, lambda: fully_shard(model.layers), "ModuleList")
    refused(ValueError, lambda: fully_shard(nn.ModuleDict({"a": nn.Linear(2, 2)})), "ModuleDict")
    refused(ValueError, lambda: fully_shard([model.layers[0], model.layers]), "ModuleList")
    is_unharmed(model, seeded(Layers()), data(0, 0, 2, 6))


@pytest.mark.parametrize("kind", KINDS)
def test_a_container_without_forward_is_refused(kind):
    run_ranks(container, 2, kind=kind)


def no_module():
    refused(TypeError, lambda: fully_shard(torch.zeros(3)), "Tensor")
    refused(ValueError, lambda: fully_shard([]))


def test_what_is_no_module_is_refused():
    run_ranks(no_module, 2)


def three_axes():
    model = seeded(Layers())
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    refused(ValueError, lambda: fully_shard(model, mesh=mesh), "dp_mesh_dims", "3")
    is_unharmed(model, seeded(Layers()), data(0, 0, 2, 6))


@pytest.mark.parametrize("kind", KINDS)
def test_a_mesh_of_three_axes_needs_to_be_told_which_are_for_data(kind):
    run_ranks(three_axes, 4, kind=kind)


def does_not_divide(k):
    model = seeded(Layers())
    words = (str(k), str(dist.get_world_size()), f"rank {dist.get_rank()}")
    refused(ValueError, lambda: fully_shard(model.layers[0], reshard_after_forward=k), *words)
    is_unharmed(model, seeded(Layers()), data(0, 0, 2, 6))


@pytest.mark.parametrize("kind", KINDS)
def test_an_int_that_does_not_divide_the_world_is_refused(kind):
    run_cases(does_not_divide, 4, cases_of(k=[3, 5, 0, -2]), kind=kind)


def twice():
    model = seeded(Layers())
    fully_shard(model.layers[0])
    refused(ShardwiseError, lambda: fully_shard(model.layers[0]))
    refused(ShardwiseError, lambda: fully_shard([model.layers[0], model.layers[1]]))
    assert not isinstance(model.layers[1], FSDPModule)
    fully_shard(model)
    model(data(0, 0, 2, 6)).sum().backward()
    assert all(isinstance(param.grad, DTensor) for param in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_module_twice_is_refused_and_the_first_call_stands(kind):
    run_ranks(twice, 2, kind=kind)


def twice_in_a_list():
    model = seeded(Layers())
    refused(ShardwiseError, lambda: fully_shard([model.layers[0], model.layers[0]]))
    is_unharmed(model, seeded(Layers()), data(0, 0, 2, 6))


def test_the_same_module_twice_in_a_list_is_refused():
    run_ranks(twice_in_a_list, 2)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.table = nn.Parameter(torch.eye(3).to_sparse())

    def forward(self, x):
        return self.lin(x)


def sparse():
    model = Sparse()
    refused(ConfigError, lambda: fully_shard(model), "table", "sparse", f"rank {dist.get_rank()}")
    assert type(model) is Sparse
    assert type(model.lin.weight) is nn.Parameter


def test_a_sparse_parameter_is_refused_by_name():
    run_ranks(sparse, 2)


def shapeless():
    for shard in (fully_shard, FullyShardedDataParallel):
        lazy = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(3))
        refused(ConfigError, lambda: shard(lazy), "1.weight", "no shape yet")  # noqa: B023
        lazy(torch.ones(1, 3))
        shard(lazy)(torch.ones(1, 3)).sum().backward()
        table = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 3))
        refused(ConfigError, lambda: shard(table), "0.weight", "sparse gradients", "sparse=False")  # noqa: B023


def test_a_parameter_without_a_shape_or_with_sparse_gradients_is_refused_by_name():
    run_ranks(shapeless, 2)


class Quantised(nn.Module):
    """torch itself allows integer parameters only where they need no grad."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 5)
        self.steps = nn.Parameter(torch.arange(7), requires_grad=False)

    def forward(self, x):
        return self.lin(x) * self.steps.sum()


def integer_that_needs_no_grad():
    def loss_of(model, step, rank):
        return model(data(step, rank, 2, 5)).square().mean() * 1e-3

    model = match_plain(Quantised, fully_shard, loss_of, steps=3)
    assert isinstance(model.steps, DTensor)


def test_an_integer_parameter_that_needs_no_grad_is_sharded_with_the_rest():
    run_ranks(integer_that_needs_no_grad, 2, kind="gloo")


def bad_placement():
    model = seeded(Layers())
    refused(
        ConfigError, lambda: fully_shard(model, shard_placement_fn=lambda p: Shard(5)), "first.weight", "5"
    )
    refused(ConfigError, lambda: fully_shard(model, shard_placement_fn=lambda p: Replicate()), "first.weight")
    is_unharmed(model, seeded(Layers()), data(0, 0, 2, 6))


def test_a_placement_that_is_no_dim_of_the_parameter_is_refused_by_name():
    run_ranks(bad_placement, 2)


# --- found at the first forward -------------------------------------------------------------------------------


def still_on_meta():
    with torch.device("meta"):
        model = Layers()
    for unit in (*model.layers, model):
        fully_shard(unit)
    model.layers[1].to_empty(device="cpu")
    words = ("first.weight", "to_empty", f"rank {dist.get_rank()}")
    refused(StateError, lambda: model(data(0, 0, 2, 6)), *words)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param, value in zip(model.parameters(), seeded(Layers()).parameters(), strict=True):
            param.copy_(distribute_tensor(value.detach(), param.device_mesh))
    same(model(data(0, 0, 2, 6)).detach(), seeded(Layers())(data(0, 0, 2, 6)).detach(), "output")


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_still_on_the_meta_device_is_named_with_the_way_out(kind):
    run_ranks(still_on_meta, 2, kind=kind)


def replaced(how):
    model = seeded(Layers())
    for unit in (*model.layers, model):
        fully_shard(unit)
    model(data(0, 0, 2, 6)).sum().backward()
    weight = model.layers[1].in_proj.weight
    if how == "another shape":
        model.layers[1].in_proj.weight = nn.Parameter(torch.zeros(3, 3))
    elif how == "gone":
        model.layers[1].in_proj.weight = None
    elif how == "a plain tensor":
        model.layers[1].in_proj.weight = nn.Parameter(torch.zeros(tuple(weight.shape)))
    words = ("layers.1", "in_proj.weight", f"rank {dist.get_rank()}")
    refused(StateError, lambda: model(data(0, 0, 2, 6)), *words)
    model.layers[1].in_proj.weight = weight
    model.zero_grad()
    plain = seeded(Layers())
    same(model(data(0, 0, 2, 6)).detach(), plain(data(0, 0, 2, 6)).detach(), "output once it is put back")


def test_a_parameter_replaced_by_what_cannot_be_adopted_is_named():
    run_cases(replaced, 2, cases_of(how=["another shape", "gone", "a plain tensor"]), kind="gloo")


def adopted(how):
    """Replacing tensors is refused only where it cannot be understood."""
    model, plain = seeded(Layers()), seeded(Layers())
    for unit in (*model.layers, model):
        fully_shard(unit)
    model(data(0, 0, 2, 6)).sum().backward()
    model.zero_grad()
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(2)
        if how == "assign":
            state = {name: value.detach() * 2 for name, value in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
        elif how == "new parameter":
            for module in model.modules():
                for name, param in list(module.named_parameters(recurse=False)):
                    setattr(module, name, nn.Parameter(param.detach() * 2))
        elif how == "to_empty":
            values = [param.detach() * 2 for param in model.parameters()]
            model.to_empty(device="cpu")
            for param, value in zip(model.parameters(), values, strict=True):
                param.copy_(value)
        elif how == "dtype there and back":
            model.double().float()
            for param in model.parameters():
                param.mul_(2)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optim, plain_optim = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    for step in range(2):
        model(data(step, rank, 2, 6)).square().mean().backward()
        average_gradients(plain, lambda r: plain(data(step, r, 2, 6)).square().mean(), world_size)  # noqa: B023
        for each in (optim, plain_optim):
            each.step()
            each.zero_grad()
        same_shards(model, plain, f"{how}, step {step}: ")


def test_a_parameter_replaced_by_its_like_is_adopted():
    run_cases(
        adopted, 2, cases_of(how=["assign", "new parameter", "to_empty", "dtype there and back"]), kind="gloo"
    )


# --- ranks that differ ----------------------------------------------------------------------------------------


def odd_one(what):
    """The model of the last rank differs in one thing."""
    model = seeded(Layers())
    if dist.get_rank() == dist.get_world_size() - 1:
        if what == "shape":
            model.layers[1].in_proj = nn.Linear(6, 25)
            model.layers[1].out_proj = nn.Linear(25, 6)
        elif what == "dtype":
            model.layers[1].in_proj.to(torch.bfloat16)
        elif what == "name":
            layer = model.layers[1]
            layer.other = layer.in_proj
            del layer._modules["in_proj"]
        elif what == "number":
            model.layers[1].extra = nn.Parameter(torch.zeros(4))
    return model


PLACE = {"shape": "in_proj.weight", "dtype": "in_proj.weight", "name": "in_proj.weight", "number": "extra"}


def shard_and_run(model, units):
    for unit in (*units, model):
        fully_shard(unit)
    model(data(0, 0, 2, 6))


def ranks_differ(what):
    model = odd_one(what)
    with Traffic() as traffic, pytest.raises(RankDisagreement) as caught:
        shard_and_run(model, model.layers)
    return str(caught.value), len(traffic.seen)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["shape", "dtype", "name", "number"])
def test_ranks_whose_models_differ_are_told_where_before_anything_is_gathered(what, kind):
    for message, num_gathers in run_ranks(ranks_differ, 3, what, kind=kind):
        assert num_gathers == 0
        assert PLACE[what] in message, message
        assert "2" in message.split("fix:")[0], f"does not name the odd rank: {message}"


def different_units():
    """One rank forgot to shard a layer."""
    model = seeded(Layers())
    units = [layer for index, layer in enumerate(model.layers) if (dist.get_rank(), index) != (1, 1)]
    with pytest.raises(RankDisagreement) as caught:
        shard_and_run(model, units)
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_shard_different_modules_are_told(kind):
    for message in run_ranks(different_units, 2, kind=kind):
        assert "layers.1" in message, message


def one_rank_refuses():
    """An error that only one rank makes is that rank's error; nothing is left half sharded there."""
    model = seeded(TwoLayers(6))
    k = 3 if dist.get_rank() == 1 else True
    try:
        fully_shard(model, reshard_after_forward=k)
    except ConfigError:
        is_unharmed(model, seeded(TwoLayers(6)), data(0, 0, 2, 6))
        return "refused"
    return "sharded"


def test_a_call_that_is_wrong_on_one_rank_is_refused_there():
    assert run_ranks(one_rank_refuses, 2)[1] == "refused"
