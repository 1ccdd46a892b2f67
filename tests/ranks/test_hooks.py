"""Post-accumulate hooks on the sharded parameters."""

from __future__ import annotations

import collections

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.testing import run_ranks
from shardwise.testing.workloads import WORKLOADS, seeded
from tests.ranks.models import Layers, average_gradients, data, full, same
from tests.ranks.subject import fully_shard
from tests.ranks.tables import cases_of, run_cases


def sharded_layers(reshard=True):
    model = seeded(Layers())
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard)
    return fully_shard(model)


def hooks_run_once(reshard):
    model = sharded_layers(reshard)
    counts = collections.Counter()
    seen = {}
    params = dict(model.named_parameters())

    def hook_of(name):
        def hook(param):
            assert param is params[name], "the hook should get the object it was put on"
            counts[name] += 1
            assert isinstance(param.grad, DTensor)
            seen[name] = param.grad.to_local().clone()

        return hook

    for name, param in params.items():
        param.register_post_accumulate_grad_hook(hook_of(name))
    for backward in range(1, 4):
        model(data(backward, dist.get_rank(), 2, 6)).square().mean().backward()
        assert counts == dict.fromkeys(params, backward)
        for name, param in params.items():
            same(seen[name], param.grad.to_local(), f"gradient of {name} as the hook saw it")
        model.zero_grad()


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_a_hook_runs_once_a_backward_and_parameter_with_the_reduced_gradient_in_place(kind):
    run_cases(hooks_run_once, 2, cases_of(reshard=[True, False]), kind=kind)


def hook_sees_the_average():
    model, plain = sharded_layers(), seeded(Layers())
    seen = {}
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda param, name=name: seen.update({name: param.grad}))
    rank = dist.get_rank()
    model(data(0, rank, 2, 6)).square().mean().backward()
    average_gradients(plain, lambda r: plain(data(0, r, 2, 6)).square().mean(), dist.get_world_size())
    for name, expected in plain.named_parameters():
        same(full(seen[name]), expected.grad, f"gradient of {name}")


def test_the_gradient_a_hook_sees_is_the_average_over_ranks():
    run_ranks(hook_sees_the_average, 2, kind="gloo")


def hook_is_not_run_without_sync():
    model = sharded_layers()
    counts = collections.Counter()
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda param, name=name: counts.update([name]))
    model.set_requires_gradient_sync(False)
    model(data(0, 0, 2, 6)).sum().backward()
    assert not counts
    model.set_requires_gradient_sync(True)
    model(data(1, 0, 2, 6)).sum().backward()
    assert counts == {name: 1 for name, _ in model.named_parameters()}


def test_a_hook_waits_for_the_backward_that_reduces():
    run_ranks(hook_is_not_run_without_sync, 2, kind="gloo")


def removed_hook():
    model = sharded_layers()
    count = collections.Counter()
    handle = model.first.weight.register_post_accumulate_grad_hook(lambda param: count.update(["first"]))
    model(data(0, 0, 2, 6)).sum().backward()
    handle.remove()
    model(data(0, 0, 2, 6)).sum().backward()
    assert count == {"first": 1}


def test_a_removed_hook_runs_no_more():
    run_ranks(removed_hook, 2, kind="gloo")


def optimizer_in_the_hook(reshard):
    """Two sharded models: one steps after backward, the other parameter by parameter inside it."""
    workload = WORKLOADS["tied transformer"]
    after, inside = workload.model(), workload.model()
    for model in (after, inside):
        for unit in [*workload.units(model), model]:
            fully_shard(unit, reshard_after_forward=reshard)
    options = {"lr": 1e-2, "foreach": False}
    optim = torch.optim.AdamW(after.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, step_size=5)
    own_optim = {param: torch.optim.AdamW([param], **options) for param in inside.parameters()}
    own_scheduler = {p: torch.optim.lr_scheduler.StepLR(each, step_size=5) for p, each in own_optim.items()}

    def step(param):
        own_optim[param].step()
        own_optim[param].zero_grad()
        own_scheduler[param].step()

    for param in inside.parameters():
        param.register_post_accumulate_grad_hook(step)
    rank = dist.get_rank()
    for index in range(10):
        batch = workload.data(index, 0, rank)
        loss = workload.loss(after(*batch), batch)
        loss.backward()
        optim.step()
        optim.zero_grad()
        scheduler.step()
        other = workload.loss(inside(*batch), batch)
        other.backward()
        same(other.detach(), loss.detach(), f"step {index}: loss")
        for (name, got), want in zip(inside.named_parameters(), after.parameters(), strict=True):
            assert got.grad is None
            same(got.detach().to_local(), want.detach().to_local(), f"step {index}: shard of {name}")


def test_an_optimizer_and_scheduler_run_in_hooks_give_the_same_bits_as_after_backward():
    run_cases(optimizer_in_the_hook, 2, cases_of(reshard=[True, False]), kind="gloo")
