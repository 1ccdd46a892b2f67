"""What `fully_shard` turns a module and its parameters into."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardwise import ConfigError
from shardwise.testing import run_ranks
from shardwise.testing.workloads import WORKLOADS, TiedTransformer, seeded
from tests.ranks.models import (
    DoubleLinear,
    Layers,
    TwoLayers,
    average_gradients,
    data,
    full,
    is_sharded,
    match_plain,
    same,
    same_parameters,
)
from tests.ranks.subject import FSDPModule, MixedPrecisionPolicy, beyond_torch, fully_shard, record
from tests.ranks.tables import cases_of, run_cases


def each_parameter_is_a_dtensor():
    for workload in WORKLOADS.values():
        model = workload.model()
        kinds = {name: param.requires_grad for name, param in model.named_parameters()}
        for unit in [*workload.units(model), model]:
            fully_shard(unit)
        assert {name: param.requires_grad for name, param in model.named_parameters()} == kinds
        for param in model.parameters():
            assert isinstance(param, DTensor)
            assert isinstance(param, nn.Parameter)
            assert param.placements == (Shard(0),)
            assert param.device_mesh.size() == dist.get_world_size()


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_parameter_becomes_a_dtensor_parameter_sharded_on_dim_0(world_size):
    run_ranks(each_parameter_is_a_dtensor, world_size)


def shards_are_chunks():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for workload in WORKLOADS.values():
        model, plain = workload.model(), workload.model()
        for unit in [*workload.units(model), model]:
            fully_shard(unit)
        for (name, param), original in zip(model.named_parameters(), plain.parameters(), strict=True):
            chunks = original.detach().chunk(world_size)
            want = chunks[rank] if rank < len(chunks) else original.detach()[:0]
            same(param.detach().to_local(), want, f"{workload.name}: shard of {name}")
            assert param.shape == original.shape
            assert param.stride() == original.stride()


@pytest.mark.parametrize("world_size", [2, 3, 4, 16])
def test_a_rank_holds_its_chunk_of_each_parameter_and_nothing_where_there_are_not_enough(world_size):
    run_ranks(shards_are_chunks, world_size)


def full_tensors_are_the_originals(placement_fn=None):
    for workload in WORKLOADS.values():
        model, plain = workload.model(), workload.model()
        for unit in [*workload.units(model), model]:
            fully_shard(unit, shard_placement_fn=placement_fn)
        same_parameters(model, plain, f"{workload.name}: ")


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_full_tensor_gives_back_the_original_values(kind):
    run_ranks(full_tensors_are_the_originals, 4, kind=kind)


def last_dim(param):
    return Shard(param.ndim - 1)


def first_or_last_dim(param):
    return Shard(param.ndim - 1 if param.shape[0] % 2 else 0)


def shards_are_chunks_of_any_dim():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = seeded(nn.Conv2d(4, 6, 4))
    original = model.weight.detach().clone()
    fully_shard(model, shard_placement_fn=lambda param: Shard(min(2, param.ndim - 1)))
    assert model.weight.placements == (Shard(2),)
    assert model.bias.placements == (Shard(0),)
    same(model.weight.detach().to_local(), original.chunk(world_size, dim=2)[rank], "shard")
    same(full(model.weight.detach()), original, "full tensor")


def test_shard_placement_fn_chooses_the_dim():
    run_ranks(shards_are_chunks_of_any_dim, 2)


def uneven_on_the_last_dim():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = seeded(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2)))
    originals = [param.detach().clone() for param in model.parameters()]
    fully_shard(model, shard_placement_fn=last_dim)
    for param, original in zip(model.parameters(), originals, strict=True):
        dim = original.ndim - 1
        chunks = original.chunk(world_size, dim=dim)
        want = chunks[rank] if rank < len(chunks) else original.narrow(dim, 0, 0)
        assert param.placements == (Shard(dim),)
        same(param.detach().to_local(), want, "shard")
    full_tensors_are_the_originals(last_dim)


@beyond_torch
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sizes_that_do_not_divide_are_sharded_on_any_dim(world_size):
    run_ranks(uneven_on_the_last_dim, world_size)


def trains_sharded_on(placement_fn):
    def shard(model):
        for unit in (*model.layers, model):
            fully_shard(unit, shard_placement_fn=placement_fn)

    tolerance = 0.0 if dist.get_world_size() == 2 else 1e-6
    build = partial(Layers, num_layers=2, width=5)
    match_plain(
        build,
        shard,
        lambda model, step, rank: model(data(step, rank, 3, 5)).square().mean(),
        tolerance=tolerance,
    )


@beyond_torch
@pytest.mark.parametrize("world_size", [2, 3])
def test_training_sharded_on_other_dims_matches_the_plain_model(world_size):
    run_cases(
        trains_sharded_on, world_size, cases_of(placement_fn=[last_dim, first_or_last_dim]), kind="gloo"
    )


def a_call_owns_what_is_left():
    model = seeded(Layers(num_layers=2))
    fully_shard(model.layers[0].in_proj)
    fully_shard(model.layers[0])
    fully_shard(model)
    inner, outer, root = model.layers[0].in_proj, model.layers[0], model
    modules = [
        inner,
        outer.out_proj,
        model.first,
        model.last,
        model.layers[1].in_proj,
        model.layers[1].out_proj,
    ]
    for unit, shown in ((inner, [0]), (outer, [1]), (root, [2, 3, 4, 5])):
        unit.unshard()
        assert [index for index, module in enumerate(modules) if not is_sharded(module)] == shown
        unit.reshard()
        assert all(is_sharded(module) for module in modules)


def test_a_call_owns_the_parameters_that_no_earlier_call_took():
    run_ranks(a_call_owns_what_is_left, 2)


def class_is_extended():
    module = nn.Linear(4, 4)
    assert fully_shard(module) is module
    assert isinstance(module, FSDPModule)
    assert isinstance(module, nn.Linear)
    assert type(module).__name__.endswith("Linear")
    assert type(module) is not nn.Linear
    other = fully_shard(nn.Linear(3, 3))
    assert type(other) is type(module), "modules of one class should get one class"
    assert type(nn.Linear(4, 4)) is nn.Linear
    assert not isinstance(nn.Linear(4, 4), FSDPModule)


def test_the_module_is_returned_with_fsdp_module_mixed_into_its_class():
    run_ranks(class_is_extended, 2)


def tied_stays_tied(tie_across_units):
    model = seeded(TiedTransformer())
    if tie_across_units:
        fully_shard(model.embed)
    for unit in (*model.layers, model):
        fully_shard(unit)
    names = [name for name, _ in model.named_parameters()]
    assert "embed.weight" in names
    assert "head.weight" not in names
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        assert model.embed.weight is model.head.weight
        model(torch.randint(0, 19, (2, 6), generator=torch.Generator().manual_seed(step))).sum().backward()
        assert model.embed.weight is model.head.weight
        assert isinstance(model.embed.weight, DTensor)
        assert isinstance(model.embed.weight.grad, DTensor)
        optim.step()
    assert [name for name, _ in model.named_parameters()] == names


def test_parameters_shared_within_a_unit_stay_shared():
    run_ranks(tied_stays_tied, 2, False)


@beyond_torch
def test_parameters_shared_across_units_stay_shared():
    run_ranks(tied_stays_tied, 2, True)


class Constant(nn.Module):
    """Initialises itself, as modules built on the meta device must."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))
        self.bias = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.constant_(self.weight, 0.25)
        nn.init.ones_(self.bias)

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


def starts_on_meta():
    with torch.device("meta"):
        model = nn.Sequential(Constant(5), Constant(5))
    for unit in (*model, model):
        fully_shard(unit)
    assert all(isinstance(param, DTensor) and param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    for module in model:
        module.reset_parameters()
    plain = nn.Sequential(Constant(5), Constant(5))
    same_parameters(model, plain)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optim, plain_optim = (
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.SGD(plain.parameters(), lr=0.1),
    )
    for step in range(3):
        model(data(step, rank, 2, 5)).square().sum().backward()
        average_gradients(plain, lambda r: plain(data(step, r, 2, 5)).square().sum(), world_size)  # noqa: B023
        for each in (optim, plain_optim):
            each.step()
            each.zero_grad()
        same_parameters(model, plain)


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_a_model_on_the_meta_device_is_sharded_then_filled_then_trained(kind):
    run_ranks(starts_on_meta, 2, kind=kind)


def two_modules_one_unit():
    def shard(model):
        fully_shard([model.layers[0], model.layers[1]])
        fully_shard(model)
        assert isinstance(model.layers[0], FSDPModule)
        assert isinstance(model.layers[1], FSDPModule)

    model = match_plain(
        Layers, shard, lambda model, step, rank: model(data(step, rank, 3, 6)).square().mean()
    )
    with record(model) as recorder:
        loss = model(data(0, 0, 3, 6)).sum()
        assert len(recorder.of("unshard")) == 2, "one gather for the pair and one for the root"
        assert is_sharded(model.layers[0].in_proj)
        assert is_sharded(model.layers[1].in_proj)
        loss.backward()
    assert len(recorder.of("unshard")) == 3


def test_a_list_of_modules_is_one_unit():
    run_ranks(two_modules_one_unit, 2, kind="gloo")


@beyond_torch  # torch does it too, but is given a mesh by the tests
def test_a_rank_that_a_launcher_started_needs_no_init_process_group(monkeypatch):
    assert not dist.is_initialized()
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        layer = fully_shard(nn.Linear(3, 2))
        assert isinstance(layer.weight, DTensor)
        layer(torch.ones(1, 3)).sum().backward()
    finally:
        dist.destroy_process_group()
    monkeypatch.delenv("RANK")
    with pytest.raises(RuntimeError, match="no process group"):
        fully_shard(nn.Linear(3, 2))


class Hidden(nn.Module):
    """A model whose forward ends before its head, which is then called on parts of what came out."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        return self.norm(self.body(x))

    def loss(self, x):
        return sum(self.head(part).square().mean() for part in self(x).chunk(2))


def head_after_the_forward():
    def shard(model):
        fully_shard([model.norm, model.head])
        fully_shard(model)

    model = match_plain(
        Hidden,
        shard,
        lambda model, step, rank: model.loss(data(step, rank, 4, 6)),
        steps=3,
        tolerance=1e-6,  # each part's gradients are summed over ranks by themselves
    )
    with torch.no_grad():
        model(data(0, 0, 4, 6))
    assert is_sharded(model.norm)


def test_modules_of_a_list_need_not_all_run_in_the_forward_of_the_model():
    run_ranks(head_after_the_forward, 2, kind="gloo")


def halves_without_a_model():
    """A unit of two modules and no model around them: a step may use either."""
    match_plain(
        lambda: nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)]),
        lambda model: fully_shard(list(model)),
        lambda model, step, rank: model[step % 2](data(step, rank, 4, 6)).square().mean(),
        steps=4,
    )


@beyond_torch
def test_modules_of_a_list_may_run_one_by_one_without_a_model_around_them():
    run_ranks(halves_without_a_model, 2, kind="gloo")


def ignored_stay_plain():
    model = seeded(DoubleLinear())
    ignored = {model.lin2.weight}
    before = model.lin2.weight
    fully_shard(model, ignored_params=ignored)
    assert model.lin2.weight is before
    assert isinstance(model.lin2.bias, DTensor)
    rank = dist.get_rank()
    first, second = model(data(0, rank, 3, 8))
    (first.sum() + second.sum()).backward()
    plain = seeded(DoubleLinear())
    _, second = plain(data(0, rank, 3, 8))
    second.sum().backward()
    same(before.grad, plain.lin2.weight.grad, "gradient of the ignored parameter, which is local")


def test_ignored_parameters_stay_as_they_are():
    run_ranks(ignored_stay_plain, 2, kind="gloo")


class MixedDtypes(nn.Module):
    """float32, bfloat16 and float64 parameters, odd sizes, in one unit."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(5, 7)
        self.low = nn.Linear(7, 3, dtype=torch.bfloat16)
        self.exact = nn.Linear(3, 5, dtype=torch.float64)

    def forward(self, x):
        return self.exact(self.low(torch.tanh(self.wide(x)).bfloat16()).double())


def dtypes_in_one_unit():
    model = match_plain(
        MixedDtypes, fully_shard, lambda model, step, rank: model(data(step, rank, 3, 5)).square().mean()
    )
    assert [param.dtype for param in model.parameters()] == [torch.float32] * 2 + [torch.bfloat16] * 2 + [
        torch.float64
    ] * 2
    with record(model) as recorder:
        model(data(0, 0, 3, 5)).sum().backward()
    assert len(recorder.of("unshard")) == 1


@beyond_torch
@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_parameters_of_different_dtypes_travel_in_one_unit(kind):
    run_ranks(dtypes_in_one_unit, 2, kind=kind)


def sharded_on_a_given_mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pairs", "peers"))
    model = seeded(TwoLayers())
    fully_shard(model, mesh=mesh["peers"])
    for param, original in zip(model.parameters(), seeded(TwoLayers()).parameters(), strict=True):
        assert param.device_mesh.size() == 2
        same(param.detach().to_local(), original.detach().chunk(2)[dist.get_rank() % 2], "shard")


def test_the_mesh_says_which_ranks_share_a_module():
    run_ranks(sharded_on_a_given_mesh, 4, kind="gloo")


def output_in_its_own_dtype():
    model = seeded(TwoLayers())
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    fully_shard(model, mp_policy=policy)
    seen = []
    model.in_proj.register_forward_pre_hook(
        lambda module, args: seen.append((module.weight.dtype, args[0].dtype))
    )
    assert model(data(0, 0, 2, 8)).dtype is torch.float32
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    assert all(param.dtype is torch.float32 for param in fully_shard(seeded(TwoLayers())).parameters())


def test_the_policy_sets_the_dtypes_of_parameters_inputs_and_outputs():
    run_ranks(output_in_its_own_dtype, 2)


def device_type_says_where():
    model = fully_shard(nn.Linear(4, 4), device_type="cpu")
    assert model.weight.device_mesh.device_type == "cpu"
    model(torch.ones(2, 4)).sum().backward()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    assert fully_shard(nn.Linear(4, 4), mesh=mesh, device_type="cpu").weight.device_mesh == mesh
    with pytest.raises(ConfigError, match=r"device_type is 'cuda'.*cpu devices"):
        fully_shard(nn.Linear(4, 4), mesh=mesh, device_type="cuda")


@beyond_torch
def test_device_type_says_where_a_model_is_sharded():
    run_ranks(device_type_says_where, 2)
