"""How many collectives a step takes, as torch's `CommDebugMode` counts them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from shardwise.testing import run_ranks
from shardwise.testing.workloads import WORKLOADS
from tests.ranks.models import GATHER, REDUCE, counted
from tests.ranks.subject import beyond_torch, fully_shard


def counts_of_three_steps(name, reshard):
    workload = WORKLOADS[name]
    model = workload.model()
    units = workload.units(model)
    for unit in units:
        fully_shard(unit, reshard_after_forward=reshard)
    fully_shard(model)
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    counts = []
    for step in range(3):
        batch = workload.data(step, 0, dist.get_rank())
        with CommDebugMode() as forward:
            loss = workload.loss(model(*batch), batch)
        with CommDebugMode() as backward:
            loss.backward()
        with CommDebugMode() as optimizer:
            optim.step()
            optim.zero_grad()
        counts.append(tuple(counted(mode) for mode in (forward, backward, optimizer)))
    return len(units), counts


def check(name, world_size, reshard, kind="gloo"):
    for num_below, steps in run_ranks(counts_of_three_steps, world_size, name, reshard, kind=kind):
        gathers_again = {} if reshard is False else {GATHER: num_below}
        for forward, backward, optimizer in steps:
            assert forward == {GATHER: num_below + 1}
            assert backward == {**gathers_again, REDUCE: num_below + 1}
            assert optimizer == {}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("name", ["odd MLP", "tied transformer", "conv net", "adapters"])
def test_one_gather_a_unit_and_pass_and_one_reduce_from_the_first_step_on(name, reshard):
    check(name, 2, reshard)


@pytest.mark.parametrize("reshard", [True, False, 2])
def test_four_ranks_count_the_same_whatever_the_resharding(reshard):
    check("tied transformer", 4, reshard)


def counts_without_sync():
    workload = WORKLOADS["tied transformer"]
    model = workload.model()
    for unit in [*workload.units(model), model]:
        fully_shard(unit)
    counts = []
    for micro_batch, sync in enumerate((False, False, True)):
        model.set_requires_gradient_sync(sync)
        batch = workload.data(0, micro_batch, dist.get_rank())
        loss = workload.loss(model(*batch), batch)
        with CommDebugMode() as backward:
            loss.backward()
        counts.append(counted(backward))
    return counts


def test_without_gradient_sync_nothing_is_reduced():
    for first, second, last in run_ranks(counts_without_sync, 2, kind="gloo"):
        assert first == second == {GATHER: 3}
        assert last == {GATHER: 3, REDUCE: 4}


def counts_of_eval():
    workload = WORKLOADS["tied transformer"]
    model = workload.model().eval()
    for unit in [*workload.units(model), model]:
        fully_shard(unit)
    counts = []
    for step in range(2):
        with torch.no_grad(), CommDebugMode() as mode:
            model(*workload.data(step, 0, dist.get_rank()))
        counts.append(counted(mode))
    return counts


@beyond_torch  # which keeps the root's parameters although no backward will need them
def test_a_forward_without_backward_gathers_each_unit_once():
    for first, second in run_ranks(counts_of_eval, 2, kind="gloo"):
        assert first == {GATHER: 4}
        assert second == {GATHER: 4}
