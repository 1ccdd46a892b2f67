"""Choices that contradict each other are refused, by name, on every rank, and leave the model as it was."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import ConfigError, MixedPrecisionPolicy, fully_shard
from shardwise.engine.buffers import allocate_shards
from shardwise.planning.rows import RowParam, plan_rows
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import Layers, TwoLayers, data, match_plain
from tests.ranks.subject import beyond_torch
from tests.ranks.test_bad_input import is_unharmed, refused
from tests.ranks.test_settings import GatherComm, ReduceComm

pytestmark = beyond_torch

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "output_dtype"])
def test_a_precision_that_nothing_can_be_added_up_in_is_refused(field):
    dtype = torch.float8_e4m3fn
    refused(ConfigError, lambda: MixedPrecisionPolicy(**{field: dtype}), field, str(dtype))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="page-locked memory can be had here")
def test_host_memory_that_cannot_be_page_locked_is_reported_with_the_way_out():
    layout = plan_rows([RowParam((4, 2), 0, "fp32", 4, 4)], 2)
    call = lambda: allocate_shards(layout, torch.device("cpu"), [SINGLE], 0, pins=True)  # noqa: E731
    refused(ConfigError, call, "16 bytes", "page-locked", "CPUOffloadPolicy(pin_memory=False)")


class Rotation(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (self.turn * (x + 1j)).abs() * self.scale


def a_complex_gradient_reduced_as_a_real_one():
    model = Rotation()
    policy = MixedPrecisionPolicy(reduce_dtype=SINGLE)
    refused(ConfigError, lambda: fully_shard(model, mp_policy=policy), "'turn'", "complex64", "float32")
    is_unharmed(model, Rotation(), data(0, 0, 2, 4))
    # Without the contradiction it trains, beside a parameter that is real.
    match_plain(Rotation, fully_shard, lambda model, step, rank: model(data(step, rank, 2, 4)).sum(), steps=3)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


def a_tied_parameter_in_two_precisions():
    model = seeded(Tied())
    fully_shard(model.embed, mp_policy=MixedPrecisionPolicy(BRAIN))
    call = lambda: fully_shard(model.head, mp_policy=MixedPrecisionPolicy(HALF))  # noqa: E731
    refused(ConfigError, call, "'weight'", "bfloat16", "float16")
    fully_shard(model.head, mp_policy=MixedPrecisionPolicy(BRAIN))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(BRAIN))
    model(data(0, dist.get_rank(), 2, 4)).sum().backward()
    assert model.embed.weight.grad is model.head.weight.grad is not None


def an_ignored_parameter_that_is_sharded():
    model = seeded(TwoLayers())
    plain_weight = model.in_proj.weight
    fully_shard(model.in_proj)
    for weight in (plain_weight, model.in_proj.weight):
        call = lambda: fully_shard(model, ignored_params={weight})  # noqa: B023, E731
        refused(ConfigError, call, "'weight'", "'Linear'", "ignored_params")
    assert type(model) is TwoLayers
    assert type(model.out_proj.weight) is nn.Parameter
    fully_shard(model, ignored_params={model.out_proj.weight})
    assert type(model.out_proj.weight) is nn.Parameter
    model(data(0, dist.get_rank(), 2, 8)).sum().backward()


def a_list_with_wrap():
    model = seeded(Layers())
    refused(ConfigError, lambda: fully_shard(list(model.layers), wrap=TwoLayers), "wrap", "list")
    is_unharmed(model, seeded(Layers()), data(0, 0, 2, 6))


# What gathers or reduces a unit, each as (the setting's name, its argument).
WAYS = {
    "gather": [
        ("set_custom_all_gather", GatherComm()),
        ("set_allocate_memory_from_process_group_for_comm", True),
        ("set_symm_mem_for_comm", "NCCL"),
    ],
    "reduce": [
        ("set_custom_reduce_scatter", ReduceComm()),
        ("set_allocate_memory_from_process_group_for_comm", True),
        ("set_separate_reduce_scatter_group", True),
    ],
}


def two_ways_to_do_one_thing():
    """What was set first stays; what is the same setting again replaces it; the model trains as it did."""
    for first_name, make_first in (
        ("set_custom_all_gather", GatherComm),
        ("set_custom_reduce_scatter", ReduceComm),
    ):
        for name, argument in WAYS["gather" if "gather" in first_name else "reduce"]:
            if name == first_name:
                continue
            first = make_first()
            model = seeded(TwoLayers())
            fully_shard(model)
            getattr(model, first_name)(make_first())
            getattr(model, first_name)(first)
            refused(ConfigError, lambda: getattr(model, name)(argument), first_name, name, "rank")  # noqa: B023
            model(data(0, dist.get_rank(), 2, 8)).sum().backward()
            assert first.calls, f"{name} put {first_name} aside"
    model = seeded(TwoLayers())
    fully_shard(model)
    model.set_separate_reduce_scatter_group()
    refused(
        ConfigError,
        lambda: model.set_custom_reduce_scatter(ReduceComm()),
        "set_separate_reduce_scatter_group",
    )
    # Taken back, the way is free; taking back what was never set changes nothing.
    model.set_separate_reduce_scatter_group(False)
    comm = ReduceComm()
    model.set_custom_reduce_scatter(comm)
    model.set_separate_reduce_scatter_group(False)
    model.set_allocate_memory_from_process_group_for_comm(False)
    model(data(0, dist.get_rank(), 2, 8)).sum().backward()
    assert comm.calls


CONTRADICTIONS = [
    a_complex_gradient_reduced_as_a_real_one,
    a_tied_parameter_in_two_precisions,
    an_ignored_parameter_that_is_sharded,
    a_list_with_wrap,
    two_ways_to_do_one_thing,
]


@pytest.mark.parametrize("contradiction", CONTRADICTIONS, ids=lambda function: function.__name__)
def test_refused_is(contradiction):
    run_ranks(contradiction, 2, kind="gloo")
