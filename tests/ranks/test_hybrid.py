"""Shards in one axis of a mesh, replicas of them in another."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from shardwise import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from shardwise.errors import ConfigError
from shardwise.testing import run_ranks
from shardwise.testing.parity import (
    BF16,
    FP32,
    ONE_BATCH,
    Accumulation,
    differences,
    gather_histories,
    run_plain,
    run_sharded,
)
from shardwise.testing.workloads import WORKLOADS, seeded
from tests.ranks.models import (
    GATHER,
    REDUCE,
    DoubleLinear,
    Layers,
    Traffic,
    average_gradients,
    counted,
    data,
    full,
    same,
    same_shard,
)
from tests.ranks.tables import slow

pytestmark = pytest.mark.arithmetic

ALL_REDUCE = "c10d.allreduce_"
LAST_OF_THREE = Accumulation(3, sync_each=False)

# Not bitwise: the oracle adds up ranks 0 to 3 in turn, here pairs are added first: (0 + 1) + (2 + 3). One rounding
# of a sum's last bit, in float32 about 1e-7, is what may differ.
LAST_DIGITS = 1e-6


def mesh_2x2():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def hybrid_layers(mesh=None, **kwargs):
    mesh = mesh or mesh_2x2()
    model = seeded(Layers())
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh, **kwargs)
    return model


# --- parity -----------------------------------------------------------------------------------------------------------


def parity(name, runs, precision, tolerance):
    workload, mesh = WORKLOADS[name], mesh_2x2()
    policy = MixedPrecisionPolicy(precision.param_dtype, precision.reduce_dtype)
    local = [
        run_sharded(
            workload,
            partial(fully_shard, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy),
            accumulation=accumulation,
            steps=3,
        )
        for reshard, accumulation in runs
    ]
    wrong = []
    oracles = {}
    # Runs that differ in their resharding alone have one oracle, and one rank that runs it and judges them.
    judges = list(dict.fromkeys(accumulation for _, accumulation in runs))
    for (reshard, accumulation), history in zip(runs, gather_histories(local), strict=True):
        if judges.index(accumulation) % dist.get_world_size() != dist.get_rank():
            continue
        if accumulation not in oracles:
            oracles[accumulation] = run_plain(
                workload, 4, precision=precision, accumulation=accumulation, steps=3
            )
        found = differences(oracles[accumulation], history, tolerance=tolerance)
        wrong += [f"reshard {reshard}, {accumulation.label}: {found[0]}"] if found else []
    return wrong


SOME = ("odd MLP", "tied transformer")


@pytest.mark.parametrize("name", [name if name in SOME else slow(name) for name in WORKLOADS])
def test_two_replicas_of_two_shards_match_the_oracle_to_the_last_digits(name):
    runs = [
        (reshard, accumulation) for reshard in (True, False) for accumulation in (ONE_BATCH, LAST_OF_THREE)
    ]
    assert run_ranks(parity, 4, name, runs, FP32, LAST_DIGITS, kind="gloo") == [[]] * 4


def test_two_replicas_of_two_shards_match_the_oracle_in_bf16():
    # A last digit of the float32 gradients can tip a weight's rounding to bf16, whose step is 2**-8.
    runs = [(True, ONE_BATCH), (False, LAST_OF_THREE)]
    assert run_ranks(parity, 4, "tied transformer", runs, BF16, 1e-3, kind="gloo") == [[]] * 4


def power_of_two_gradients():
    """Sums that are exact in any order must come out as the average, to the bit, on every rank."""
    mesh = mesh_2x2()
    model = fully_shard(nn.Linear(6, 5, bias=False), mesh=mesh)
    slope = 2.0 ** dist.get_rank()
    (model(torch.ones(1, 6)) * slope).sum().backward()
    assert full(model.weight.grad).eq(15 / 4).all()


def test_the_gradient_is_the_average_over_all_four_ranks():
    run_ranks(power_of_two_gradients, 4, kind="gloo")
    run_ranks(power_of_two_gradients, 4, kind="threads")


# --- what is where ----------------------------------------------------------------------------------------------------


def placements():
    model = hybrid_layers()
    rank = dist.get_rank()
    for param, original in zip(model.parameters(), seeded(Layers()).parameters(), strict=True):
        assert param.placements == (Replicate(), Shard(0))
        assert param.device_mesh.mesh_dim_names == ("replicate", "shard")
        chunks = original.detach().chunk(2)
        same(param.to_local().detach(), chunks[rank % 2], "shard")
    model(data(0, rank, 2, 6)).sum().backward()
    for param in model.parameters():
        assert param.grad.placements == (Replicate(), Shard(0))


def test_parameters_and_gradients_are_replicated_and_sharded():
    run_ranks(placements, 4, kind="gloo")


def counts(reshard):
    model = hybrid_layers(reshard_after_forward=reshard)
    found = []
    for step in range(2):
        with CommDebugMode() as forward:
            loss = model(data(step, dist.get_rank(), 2, 6)).sum()
        with CommDebugMode() as backward:
            loss.backward()
        found.append((counted(forward), counted(backward)))
    with Traffic() as traffic:
        model(data(2, 0, 2, 6)).sum().backward()
    return found, traffic.seen


@pytest.mark.parametrize("reshard", [True, False])
def test_a_unit_takes_one_gather_a_pass_one_reduce_scatter_and_one_all_reduce(reshard):
    for steps, traffic in run_ranks(counts, 4, reshard, kind="gloo"):
        for forward, backward in steps:
            assert forward == {GATHER: 4}
            assert backward == {**({GATHER: 3} if reshard else {}), REDUCE: 4, ALL_REDUCE: 4}
        assert {ranks for _, ranks, _ in traffic} == {2}, "shards travel within a replica only"


# --- the all-reduce put off -------------------------------------------------------------------------------------------


def put_off(num_put_off, sync_first):
    """Micro-batches without all-reduce, then one with; returns the counts of each and checks the sum."""
    model, plain = hybrid_layers(), seeded(Layers())
    rank = dist.get_rank()
    found = []
    for micro_batch in range(num_put_off + 1):
        is_last = micro_batch == num_put_off
        model.set_requires_all_reduce(is_last)
        model.set_requires_gradient_sync(sync_first or micro_batch > 0)
        with CommDebugMode() as backward:
            loss = model(data(micro_batch, rank, 2, 6)).sum()
            loss.backward()
        found.append({op: n for op, n in counted(backward).items() if op != GATHER})
        assert is_last or all(param.grad is None for param in model.parameters())
        average_gradients(plain, lambda r: plain(data(micro_batch, r, 2, 6)).sum(), 4)  # noqa: B023
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        same_shard(param.grad, expected.grad, name, LAST_DIGITS)
    return found


def test_partial_sums_are_kept_while_the_all_reduce_is_put_off():
    for found in run_ranks(put_off, 4, 2, True, kind="gloo"):
        assert found == [{REDUCE: 4}, {REDUCE: 4}, {REDUCE: 4, ALL_REDUCE: 4}]


def test_the_all_reduce_and_gradient_sync_can_be_put_off_together():
    for found in run_ranks(put_off, 4, 2, False, kind="gloo"):
        assert found == [{}, {REDUCE: 4}, {REDUCE: 4, ALL_REDUCE: 4}]


def partial_sum_of_a_parameter_that_the_last_micro_batch_does_not_use():
    model, plain = seeded(DoubleLinear()), seeded(DoubleLinear())
    fully_shard(model, mesh=mesh_2x2())
    rank = dist.get_rank()
    for micro_batch, use_second in enumerate((True, False)):
        model.use_second = plain.use_second = use_second
        model.set_requires_all_reduce(not use_second)

        def loss_of(module, r, micro_batch=micro_batch):
            return sum(out.sum() for out in _as_tuple(module(data(micro_batch, r, 2, 8))))

        loss_of(model, rank).backward()
        average_gradients(plain, lambda r: loss_of(plain, r), 4)
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert param.grad is not None, f"the partial sum of {name} was lost"
        same_shard(param.grad, expected.grad, name, LAST_DIGITS)


def _as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def test_a_partial_sum_is_not_lost_when_the_last_micro_batch_does_not_use_the_parameter():
    run_ranks(partial_sum_of_a_parameter_that_the_last_micro_batch_does_not_use, 4, kind="gloo")


class Optional(nn.Module):
    """Two units side by side; the second is optional."""

    def __init__(self):
        super().__init__()
        self.always = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)
        self.uses_both = True

    def forward(self, x):
        x = self.always(x)
        return self.sometimes(x) if self.uses_both else x


def partial_sum_of_an_unused_unit():
    model, plain = seeded(Optional()), seeded(Optional())
    mesh = mesh_2x2()
    for unit in (model.always, model.sometimes, model):
        fully_shard(unit, mesh=mesh)
    for micro_batch, uses_both in enumerate((True, False)):
        model.uses_both = plain.uses_both = uses_both
        model.set_requires_all_reduce(not uses_both)
        model(data(micro_batch, dist.get_rank(), 2, 6)).sum().backward()
        average_gradients(plain, lambda r: plain(data(micro_batch, r, 2, 6)).sum(), 4)  # noqa: B023
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert param.grad is not None, f"the partial sum of {name} was lost"
        same_shard(param.grad, expected.grad, name, LAST_DIGITS)


def test_a_partial_sum_is_not_lost_when_the_last_micro_batch_does_not_use_the_unit():
    run_ranks(partial_sum_of_an_unused_unit, 4, kind="gloo")


def reset_drops_partial_sums():
    model, plain = hybrid_layers(), seeded(Layers())
    model.set_requires_all_reduce(False)
    model(data(0, dist.get_rank(), 2, 6)).sum().backward()
    model.reset_iter_state()
    model.set_requires_all_reduce(True)
    model(data(1, dist.get_rank(), 2, 6)).sum().backward()
    average_gradients(plain, lambda r: plain(data(1, r, 2, 6)).sum(), 4)
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        same_shard(param.grad, expected.grad, name, LAST_DIGITS)


def test_reset_drops_the_partial_sums_too():
    run_ranks(reset_drops_partial_sums, 4, kind="gloo")


# --- more axes --------------------------------------------------------------------------------------------------------


def parts_within_a_replica():
    """1 × 4 and parts of 2: backward gathers over pairs of neighbours."""
    mesh = init_device_mesh("cpu", (1, 4))
    model = hybrid_layers(mesh, reshard_after_forward=2)
    wanted = [param.detach().clone() for param in seeded(Layers()).layers[0].parameters()]
    loss = model(data(0, dist.get_rank(), 2, 6)).sum()
    with Traffic() as traffic:
        loss.backward()
    assert traffic.of("_allgather_base_") == [2, 2, 2]
    model.layers[0].unshard()
    for param, original in zip(model.layers[0].parameters(), wanted, strict=True):
        same(param.detach(), original, "gathered parameter")


def test_an_int_reshards_to_parts_of_the_shard_axis():
    run_ranks(parts_within_a_replica, 4, kind="gloo")


def eight_ranks(dims, shard_world, reshard):
    """On a mesh of 2 × 2 × 2; what the model computes is the average over the data-parallel ranks."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("outer", "inner", "other"))
    model, plain = seeded(Layers()), seeded(Layers())
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=reshard)
    names = {"outer": 0, "inner": 1, "other": 2}
    used = [names[name] for name in (*dims.replicate_names, *dims.shard_names)]
    mine = mesh.get_coordinate()
    fixed = [axis for axis in range(3) if axis not in used]
    group = [
        int(mesh.mesh[place])
        for place in [(a, b, c) for a in range(2) for b in range(2) for c in range(2)]
        if all(place[axis] == mine[axis] for axis in fixed)
    ]
    for step in range(2):
        model(data(step, dist.get_rank(), 2, 6)).sum().backward()
        average_gradients(
            plain,
            lambda index: plain(data(step, group[index], 2, 6)).sum(),  # noqa: B023
            len(group),
        )
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        placements = ((Replicate(),) if dims.replicate else ()) + ((Shard(0),) if dims.shard else ())
        assert param.placements == placements
        assert shard_world in (1, param.device_mesh.size(param.device_mesh.ndim - 1))
        same_shard(param.grad, expected.grad, name, LAST_DIGITS)


@pytest.mark.parametrize(
    ("dims", "shard_world", "reshard"),
    [
        (DataParallelMeshDims(shard="inner"), 2, True),
        (DataParallelMeshDims(shard="inner", replicate="outer"), 2, True),
        (DataParallelMeshDims(shard=("outer", "inner")), 4, True),
        (DataParallelMeshDims(shard=("outer", "inner")), 4, 2),
        (DataParallelMeshDims(shard="other", replicate=("outer", "inner")), 2, False),
        (DataParallelMeshDims(replicate=("outer", "inner")), 1, True),
    ],
    ids=[
        "one axis",
        "two axes",
        "two axes as one",
        "parts of two axes as one",
        "replicas over two axes",
        "replicas only",
    ],
)
def test_named_axes_of_a_larger_mesh_shard_and_replicate(dims, shard_world, reshard):
    run_ranks(eight_ranks, 8, dims, shard_world, reshard)


def test_named_axes_work_between_processes():
    run_ranks(eight_ranks, 8, DataParallelMeshDims(shard=("outer", "inner")), 4, 2, kind="gloo")


# --- bad input --------------------------------------------------------------------------------------------------------


def refusals():
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("a", "b", "c"))
    layer = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"mesh of 3 axes \(1, 2, 1\) does not say which"):
        fully_shard(layer, mesh=mesh)
    with pytest.raises(ConfigError, match="names the axis 'd', which the mesh does not have"):
        fully_shard(layer, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="d"))
    with pytest.raises(ConfigError, match="names the axis 'b' twice"):
        fully_shard(layer, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="b", replicate="b"))
    with pytest.raises(ConfigError, match="shard world is 2"):
        fully_shard(
            layer,
            mesh=mesh,
            dp_mesh_dims=DataParallelMeshDims(shard="b", replicate="a"),
            reshard_after_forward=3,
        )
    assert type(layer) is nn.Linear, "a refusal leaves the module as it was"
    assert type(layer.weight) is nn.Parameter


def test_axes_that_are_unknown_missing_doubled_or_too_many_are_refused():
    run_ranks(refusals, 2, kind="gloo")


def test_dims_that_name_nothing_are_refused():
    with pytest.raises(ConfigError, match="DataParallelMeshDims names no axis"):
        DataParallelMeshDims()
