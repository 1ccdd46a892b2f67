"""Forwards without grad: nothing is kept, nothing goes stale, and training before and after is not disturbed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import (
    Layers,
    Traffic,
    average_gradients,
    data,
    held_bytes,
    is_gathered,
    is_sharded,
    same,
    same_shard,
    seen_weights,
    sgd,
)
from tests.ranks.subject import MixedPrecisionPolicy, beyond_torch, fully_shard
from tests.ranks.tables import cases_of, run_cases

MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
# Ways a unit may go on after forward: freed, kept, or in parts.
RESHARDS = [True, False, 2]


def sharded(reshard=True, **kwargs):
    model = seeded(Layers())
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard, **kwargs)
    return fully_shard(model, **kwargs)


def evaluate(model, mode, step, rank=0):
    model.eval()
    with MODES[mode]():
        output = model(data(step, rank, 2, 6)) + 0
    model.train()
    return output


def alternates(mode, reshard, first):
    """Train and evaluate in turn: every evaluation sees the weights of the step before it."""
    model, plain = sharded(reshard), seeded(Layers())
    optims = [sgd(each.parameters()) for each in (model, plain)]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    what = f"{mode}, reshard {reshard}"
    if first == "evaluation":
        same(evaluate(model, mode, 9), evaluate(plain, "no_grad", 9), f"{what}: first output")
    for step in range(3):
        loss = model(data(step, rank, 2, 6)).square().mean()
        loss.backward()
        losses = average_gradients(plain, lambda r: plain(data(step, r, 2, 6)).square().mean(), world_size)  # noqa: B023
        same(loss.detach(), losses[rank], f"{what}, step {step}: loss")
        for each in optims:
            each.step()
            each.zero_grad()
        for index, (param, expected) in enumerate(
            zip(*(each.param_groups[0]["params"] for each in optims), strict=True)
        ):
            same_shard(param.detach(), expected.detach(), f"{what}, step {step}: parameter {index}")
        for again in range(2):
            got, want = evaluate(model, mode, 20 + again), evaluate(plain, "no_grad", 20 + again)
            same(got, want, f"{what}, step {step}: output {again}")
        # Weights that change between evaluations, without a step.
        with torch.no_grad():
            for each in optims:
                for param in each.param_groups[0]["params"]:
                    param.mul_(1.01)
        same(evaluate(model, mode, 30), evaluate(plain, "no_grad", 30), f"{what}, step {step}: scaled output")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", ["training", "evaluation"])
def test_evaluation_between_steps_sees_the_weights_of_the_last_step(mode, first):
    for reshard in RESHARDS:
        world_size = 4 if reshard == 2 else 2
        run_ranks(alternates, world_size, mode, reshard, first)
    run_ranks(alternates, 2, mode, True, first, kind="gloo")


def frees(mode):
    for reshard in (True, 2):
        model = sharded(reshard)
        modules = [model.first, *(layer.in_proj for layer in model.layers), model.last]
        for _ in range(2):
            with seen_weights(*modules) as weights:
                evaluate(model, mode, 0)
            assert len(weights) == 10
            assert held_bytes(weights) == 0, (
                f"{mode}, reshard {reshard}: {held_bytes(weights)} bytes are held"
            )
            for module in modules:
                assert is_sharded(module)


@beyond_torch  # which keeps the root
@pytest.mark.parametrize("mode", MODES)
def test_a_forward_without_grad_leaves_no_memory_behind(mode):
    run_ranks(frees, 4, mode)


def leaves_no_part(mode):
    """With an int, a part is kept for backward; without grad there is none to come."""
    model = sharded(2)
    evaluate(model, mode, 0)
    with Traffic() as traffic:
        model.layers[0].unshard()
    assert traffic.of("_allgather_base_") == [4], "gathered from parts that were kept"


@beyond_torch
def test_a_forward_without_grad_keeps_no_part_either():
    run_cases(leaves_no_part, 4, cases_of(mode=MODES), kind="gloo")


def stale_part():
    """A part that was kept for a backward that never came, and weights that changed since."""
    model, plain = sharded(2), seeded(Layers())
    params = list(model.parameters())
    model(data(0, 0, 2, 6))
    with torch.no_grad():
        for param in (*params, *plain.parameters()):
            param.mul_(2)
    layer = model.layers[0]
    layer.unshard()
    for shown, expected in zip(layer.parameters(), plain.layers[0].parameters(), strict=True):
        same(shown.detach(), expected.detach(), "unsharded parameter")


@beyond_torch
def test_unshard_does_not_gather_parts_that_have_gone_stale():
    run_ranks(stale_part, 4)


def keeps_what_is_asked(mode):
    """For a loop of inference the parameters may be kept on purpose."""
    model, plain = sharded(True), seeded(Layers())
    model.set_reshard_after_forward(False)
    evaluate(model, mode, 0)
    assert is_gathered(model.first)
    assert is_gathered(model.layers[1].in_proj)
    assert is_sharded(model.first), "whoever looks now means the shards"
    same(evaluate(model, mode, 1), evaluate(plain, "no_grad", 1), "output")


def test_parameters_are_kept_over_forwards_without_grad_where_that_was_asked_for():
    run_cases(keeps_what_is_asked, 2, cases_of(mode=MODES))


def between_forward_and_backward(mode, reshard):
    model, plain = sharded(reshard), seeded(Layers())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(2):
        loss = model(data(step, rank, 2, 6)).square().mean()
        same(evaluate(model, mode, 5), evaluate(plain, "no_grad", 5), "output")
        loss.backward()
        average_gradients(plain, lambda r: plain(data(step, r, 2, 6)).square().mean(), world_size)  # noqa: B023
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            same_shard(param.grad, expected.grad, f"{mode}, reshard {reshard}: gradient of {name}")
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("mode", MODES)
def test_an_evaluation_between_forward_and_backward_does_not_disturb_the_gradients(mode):
    for reshard in RESHARDS:
        run_ranks(between_forward_and_backward, 4 if reshard == 2 else 2, mode, reshard)


def units_alone(mode):
    """A unit that is called by itself, before and after the model around it has run."""
    model, plain = sharded(), seeded(Layers())
    for _ in range(2):
        with MODES[mode]():
            got = model.layers[1](data(0, 0, 2, 6)) + 0
        same(got, plain.layers[1](data(0, 0, 2, 6)).detach(), f"{mode}: output of a layer")
        same(evaluate(model, mode, 1), evaluate(plain, "no_grad", 1), f"{mode}: output")


def test_a_unit_may_be_evaluated_by_itself():
    run_cases(units_alone, 2, cases_of(mode=MODES))


def everything_in_inference_mode():
    """Made, sharded and run inside inference mode, as a server would; no training follows."""
    with torch.inference_mode():
        model = sharded()
        for step in range(2):
            got = model(data(step, 0, 2, 6))
            same(got, seeded(Layers())(data(step, 0, 2, 6)), f"output {step}")


@beyond_torch
def test_a_model_may_be_made_and_sharded_inside_inference_mode():
    run_ranks(everything_in_inference_mode, 2)


def in_low_precision(mode):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model, plain = sharded(mp_policy=policy), seeded(Layers()).to(torch.bfloat16)
    with MODES[mode]():
        got = model(data(0, 0, 2, 6)) + 0
    with torch.no_grad():
        same(got, plain(data(0, 0, 2, 6).to(torch.bfloat16)), f"{mode}: output")
    model(data(0, 0, 2, 6)).sum().backward()
    assert model.first.weight.grad is not None


def test_a_forward_without_grad_computes_in_the_dtype_of_the_policy():
    run_cases(in_low_precision, 2, cases_of(mode=MODES))
