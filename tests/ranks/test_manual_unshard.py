"""`unshard` and `reshard` by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from shardwise.testing import run_ranks
from shardwise.testing.workloads import WORKLOADS, seeded
from tests.ranks.models import (
    GATHER,
    REDUCE,
    Layers,
    TwoLayers,
    average_gradients,
    counted,
    data,
    full,
    held_bytes,
    is_sharded,
    match_plain,
    same,
    same_shard,
)
from tests.ranks.subject import FSDPModule, UnshardHandle, beyond_torch, fully_shard
from tests.ranks.tables import cases_of, run_cases


def sharded_modules(model):
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def manual_reshard_with_false():
    workload = WORKLOADS["tied transformer"]
    model = workload.model()
    for unit in [*workload.units(model), model]:
        fully_shard(unit, reshard_after_forward=False)
    units = sharded_modules(model)
    batch = workload.data(0, 0, dist.get_rank())
    with CommDebugMode() as forward:
        loss = workload.loss(model(*batch), batch)
    assert counted(forward) == {GATHER: len(units)}
    for unit in units:
        unit.reshard()
    assert all(is_sharded(module) for module in (model.embed, model.layers[0].qkv))
    with CommDebugMode() as backward:
        loss.backward()
    assert counted(backward) == {GATHER: len(units), REDUCE: len(units)}
    plain = workload.model()
    average_gradients(
        plain, lambda r: workload.loss(plain(*workload.data(0, 0, r)), workload.data(0, 0, r)), 2
    )
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        same_shard(param.grad, expected.grad, f"gradient of {name}")


def test_after_a_manual_reshard_backward_gathers_all_again_the_root_too():
    run_ranks(manual_reshard_with_false, 2, kind="gloo")


def nothing_of_its_own():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in (*model, model):
        fully_shard(layer)
    handle = model.unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    handle.wait()
    handle.wait()
    assert model.unshard() is None
    model.reshard()
    assert is_sharded(model[0])


def test_a_module_without_parameters_of_its_own_may_be_unsharded():
    run_ranks(nothing_of_its_own, 2)


def before_the_first_forward():
    model, plain = seeded(TwoLayers(5)), seeded(TwoLayers(5))
    fully_shard(model)
    assert model.unshard() is None
    for shown, original in zip(model.parameters(), plain.parameters(), strict=True):
        assert type(shown) is nn.Parameter
        same(shown.detach(), original.detach(), "unsharded parameter")
    model.reshard()
    assert is_sharded(model.in_proj)
    same(full(model.in_proj.weight.detach()), plain.in_proj.weight.detach(), "full tensor after the reshard")


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_unshard_before_the_first_forward_shows_the_original_values(kind):
    run_ranks(before_the_first_forward, 3, kind=kind)


def asynchronous():
    model = seeded(TwoLayers(5))
    fully_shard(model)
    for _ in range(2):
        handle = model.unshard(async_op=True)
        assert isinstance(handle, UnshardHandle)
        handle.wait()
        assert not is_sharded(model.in_proj)
        again = model.unshard(async_op=True)
        assert isinstance(again, UnshardHandle), "async always returns a handle"
        again.wait()
        weights = list(model.parameters())
        for shown, original in zip(weights, seeded(TwoLayers(5)).parameters(), strict=True):
            same(shown.detach(), original.detach(), "unsharded parameter")
        assert held_bytes(weights) > 0
        model.reshard()
        assert held_bytes(weights) == 0
        model.reshard()


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_unshard_async_returns_a_handle_and_reshard_frees_the_memory(kind):
    run_ranks(asynchronous, 2, kind=kind)


class Reduced(nn.Module):
    """Sums what its layers compute from one input; they do not depend on one another."""

    def __init__(self, asynchronously=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(3))
        self.first = nn.Linear(5, 5)
        self.asynchronously = asynchronously

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.asynchronously:
            handles = [layer.unshard(async_op=True) for layer in self.layers]
            for handle in handles:
                handle.wait()
        return sum(layer(x) for layer in self.layers)


def async_lists(reshard):
    def shard(model):
        model.asynchronously = True
        for layer in model.layers:
            fully_shard(layer, reshard_after_forward=reshard)
        fully_shard(model)

    match_plain(Reduced, shard, lambda model, step, rank: model(data(step, rank, 3, 5)).square().mean())


def test_lists_of_modules_unsharded_together_compute_right():
    run_cases(async_lists, 2, cases_of(reshard=[True, False]), kind="gloo")


def async_counts():
    model = seeded(Reduced(asynchronously=True))
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    with CommDebugMode() as mode:
        loss = model(data(0, dist.get_rank(), 3, 5)).sum()
    assert counted(mode) == {GATHER: 4}
    loss.backward()


def test_a_unit_unsharded_by_hand_is_not_gathered_again_by_its_forward():
    run_ranks(async_counts, 2, kind="gloo")


def handle_never_waited_for():
    """The forward waits for the gather itself; abandoning one is no harm either."""
    model, plain = seeded(Layers()), seeded(Layers())
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    inputs = data(0, dist.get_rank(), 2, 6)
    for unit in (*model.layers, model):
        unit.unshard(async_op=True)
    same(model(inputs).detach(), plain(inputs).detach(), "output")
    model.layers[0].unshard(async_op=True)
    model.layers[0].reshard()
    assert is_sharded(model.layers[0].in_proj)
    same(model(inputs).detach(), plain(inputs).detach(), "output after an abandoned gather")


def test_a_handle_need_not_be_waited_for():
    run_ranks(handle_never_waited_for, 2, kind="gloo")


def stale():
    """What an unshard shows is what the shards hold now."""
    model = fully_shard(seeded(TwoLayers(5)))
    plain = seeded(TwoLayers(5))
    for _ in range(2):
        with torch.no_grad():
            for param in (*model.parameters(), *plain.parameters()):
                param.mul_(1.5)
        model.unshard()
        for shown, original in zip(model.parameters(), plain.parameters(), strict=True):
            same(shown.detach(), original.detach(), "unsharded parameter")
        model.reshard()


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_unshard_shows_the_values_that_the_shards_hold_now(kind):
    run_ranks(stale, 2, kind=kind)


def unsharded_in_the_middle_of_a_step():
    """Unsharding between forward and backward, and after backward, changes no gradient."""

    def loss_of(model, step, rank):
        loss = model(data(step, rank, 2, 6)).square().mean()
        if isinstance(model, FSDPModule):
            model.layers[1].unshard()
            if step % 2:
                model.layers[1].reshard()
                model.layers[0].unshard(async_op=True)
        return loss

    def shard(model):
        for layer in (*model.layers, model):
            fully_shard(layer)

    match_plain(Layers, shard, loss_of, steps=4)


@beyond_torch
def test_unshard_and_reshard_between_forward_and_backward_do_no_harm():
    run_ranks(unsharded_in_the_middle_of_a_step, 2, kind="gloo")
