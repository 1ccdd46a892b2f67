"""Gradients that a wrapped model shows: dropped, missing where a rank has no elements, in low precision, replaced."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from shardwise.errors import RankDisagreement, StateError
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.wrapped import ONE_AXIS

FSDP = FullyShardedDataParallel
LOW = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16, keep_low_precision_grads=True)


def linears(**options):
    return FSDP(seeded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), **options)


def whole_gradients(model):
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        return {
            name: None if p.grad is None else p.grad.float().clone() for name, p in model.named_parameters()
        }


# --- dropping ---------------------------------------------------------------------------------------------------------


def zeroed(strategy, orig, set_to_none, moment):
    """The largest gradient in each of three steps, of which every one drops those of the one before."""
    model = FSDP(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), sharding_strategy=strategy, use_orig_params=orig
    )
    found = []
    for _ in range(3):
        if moment == "held":
            with model.no_sync():
                model(torch.ones(4, 8)).sum().backward()
            model.zero_grad(set_to_none=set_to_none)
        loss = model(torch.ones(4, 8)).sum()
        if moment == "between":
            model.zero_grad(set_to_none=set_to_none)
        loss.backward()
        found.append(whole_gradients(model)["1.bias"].max().item())
        if moment == "after":
            model.zero_grad(set_to_none=set_to_none)
            left = whole_gradients(model).values()
            assert all(gradient is None if set_to_none else not gradient.any() for gradient in left)
        elif moment == "held":
            model.zero_grad()
    return found


def zeroed_in_all_ways():
    for case in itertools.product(ONE_AXIS, (False, True), (False, True), ("between", "after", "held")):
        assert zeroed(*case) == [4.0, 4.0, 4.0], case


def test_zero_grad_of_the_model_drops_every_gradient():
    run_ranks(zeroed_in_all_ways, 2)


def zeroed_by_the_optimizer(strategy, orig, set_to_none):
    model = FSDP(nn.Linear(8, 8), sharding_strategy=strategy, use_orig_params=orig)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        model(torch.ones(4, 8)).sum().backward()
    optim.zero_grad(set_to_none=set_to_none)
    model(torch.ones(4, 8)).sum().backward()
    assert whole_gradients(model)["bias"].max().item() == 4.0


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("strategy", ONE_AXIS)
def test_zero_grad_of_an_optimizer_drops_gradients_held_without_sync(strategy, orig, set_to_none):
    run_ranks(zeroed_by_the_optimizer, 2, strategy, orig, set_to_none)


def held_back():
    for orig, strategy in itertools.product((False, True), ONE_AXIS):
        model = linears(use_orig_params=orig, sharding_strategy=strategy)
        model(torch.ones(2, 4)).sum().backward()
        with model.no_sync():
            model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(StateError, match="the gradients to clip have not been reduced yet"):
            model.clip_grad_norm_(1.0)
        summoned = FSDP.summon_full_params(model, with_grads=True)
        with pytest.raises(StateError, match="full gradients are not known"), summoned:
            pass
        with FSDP.summon_full_params(model):
            pass
        model(torch.ones(2, 4)).sum().backward()
        assert whole_gradients(model)["1.bias"].tolist() == [6.0] * 4
        assert model.clip_grad_norm_(1.0) > 6.0


def test_gradients_held_without_sync_are_neither_clipped_nor_shown_as_if_there_were_none():
    run_ranks(held_back, 2)


# --- ranks without elements -------------------------------------------------------------------------------------------


def without_elements(strategy):
    options = {"sharding_strategy": strategy, "use_orig_params": True}
    plain, model = seeded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), linears(**options)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    plain_optim = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(3):
        x = torch.arange(8.0).view(2, 4) + step
        for _ in range(2):
            model(x).square().sum().backward()
            plain(x).square().sum().backward()
        for name, param in model.named_parameters():
            assert (param.grad is None) == (param.numel() == 0), name
        for name, gradient in whole_gradients(model).items():
            want = dict(plain.named_parameters())[name].grad
            torch.testing.assert_close(gradient, want, rtol=1e-5, atol=1e-5)
        for each in (optim, plain_optim):
            each.step()
            each.zero_grad()
    assert sum(not param.numel() for param in model.parameters()) == 2 * (
        strategy is not ShardingStrategy.NO_SHARD
    )
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_a_parameter_without_elements_on_a_rank_has_no_gradient_there():
    for strategy in ONE_AXIS:
        run_ranks(without_elements, 2, strategy)


def hooked():
    """An optimizer for each parameter steps in its hook, on all ranks alike; other hooks find an empty gradient."""
    model = linears(use_orig_params=True)
    seen = {}
    for name, param in model.named_parameters():
        optim = torch.optim.SGD([param], lr=0.5)

        def hook(param, name=name, optim=optim):
            seen[name] = param.grad.mul_(1.0).shape
            optim.step()
            optim.zero_grad()

        param.register_post_accumulate_grad_hook(hook)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    assert seen == {name: param.shape for name, param in model.named_parameters()}
    assert all(param.grad is None for param in model.parameters())
    plain = seeded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optim = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(2):
        plain(torch.ones(2, 4)).sum().backward()
        optim.step()
        optim.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_hooks_run_on_ranks_without_elements_as_well():
    run_ranks(hooked, 2)


def some_unused(exact):
    """Parameters that a backward does not reach, some of them on ranks that have nothing of them."""
    model = linears(use_orig_params=True, exact=exact)
    model.module[1].requires_grad_(True)
    first = model.module[0]
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    weight = model.module[1].weight
    model.zero_grad()
    original = model.module.forward
    model.module.forward = lambda x: first(x)
    model(torch.ones(2, 4)).sum().backward()
    model.module.forward = original
    assert weight.grad is None
    gradients = whole_gradients(model)
    assert gradients["1.weight"] is None
    assert gradients["0.bias"].tolist() == [2.0] * 4


@pytest.mark.parametrize("exact", [False, True])
def test_parameters_that_were_not_used_have_no_gradient_on_any_rank(exact):
    run_ranks(some_unused, 2, exact)


# --- whole gradients --------------------------------------------------------------------------------------------------


def written_back(orig, precision):
    model = linears(use_orig_params=orig, mixed_precision=precision)
    model(torch.ones(2, 4)).sum().backward()
    with FSDP.summon_full_params(model, with_grads=True):
        model.module[0].bias.grad = None
        model.module[1].weight.grad.fill_(3.0)
    gradients = whole_gradients(model)
    assert gradients["1.weight"].eq(3).all()
    # One flat parameter has one gradient.
    assert gradients["0.bias"] is None if orig else not gradients["0.bias"].any()
    with FSDP.summon_full_params(model, with_grads=True):
        for param in model.parameters():
            param.grad = None
    assert all(param.grad is None for param in model.parameters())
    with FSDP.summon_full_params(model, with_grads=True):
        weight = model.module[0].weight
        weight.grad = torch.full_like(weight, 7.0)
    gradients = whole_gradients(model)
    assert gradients["0.weight"].eq(7).all()
    assert gradients["1.bias"] is None if orig else not gradients["1.bias"].any()


def test_gradients_that_are_set_or_dropped_while_whole_reach_the_shards():
    for orig, precision in itertools.product((False, True), (None, LOW)):
        run_ranks(written_back, 2, orig, precision)


def unlike_gradients():
    model = linears(use_orig_params=True)
    model(torch.ones(2, 4)).sum().backward()
    if dist.get_rank() == 0:
        model.zero_grad()
    with FSDP.summon_full_params(model, with_grads=True):
        # Each parameter lies on one rank: the ranks cannot disagree.
        assert model.module[0].weight.grad is None
        assert model.module[1].weight.grad is not None
    cut = FSDP(nn.Linear(8, 8, bias=False), use_orig_params=True)
    cut(torch.ones(2, 8)).sum().backward()
    if dist.get_rank() == 0:
        cut.zero_grad()
    summoned = FSDP.summon_full_params(cut, with_grads=True)
    with (
        pytest.raises(RankDisagreement, match=r"none on rank 0 of the group, torch.float32 on rank 1"),
        summoned,
    ):
        pass


def test_gradients_of_some_ranks_only_are_no_whole_ones():
    run_ranks(unlike_gradients, 2)


# --- dtypes -----------------------------------------------------------------------------------------------------------


def norms():
    for orig, strategy in itertools.product((False, True), ONE_AXIS):
        model = linears(use_orig_params=orig, sharding_strategy=strategy, mixed_precision=LOW)
        plain = seeded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        model(torch.ones(2, 4)).sum().backward()
        plain(torch.ones(2, 4)).sum().backward()
        want = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        got = model.clip_grad_norm_(1.0)
        assert got.dtype is torch.float16, "the dtype of the gradients"
        torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)
        for name, gradient in whole_gradients(model).items():
            torch.testing.assert_close(
                gradient, dict(plain.named_parameters())[name].grad, rtol=1e-2, atol=1e-3
            )
    model = linears(use_orig_params=True)
    # No gradient anywhere: nothing to take a dtype from.
    assert model.clip_grad_norm_(1.0).item() == 0.0
    model(torch.ones(2, 4)).sum().backward()
    assert model.clip_grad_norm_(1.0).dtype is torch.float32


def test_the_norm_of_gradients_is_in_their_dtype():
    run_ranks(norms, 2)


def converted(orig, strategy, convert, after_a_step):
    precision = MixedPrecision(param_dtype=torch.float32)
    model = linears(use_orig_params=orig, sharding_strategy=strategy, mixed_precision=precision)
    if after_a_step:
        model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()
    model = getattr(model, convert)()
    dtype = {"half": torch.float16, "double": torch.float64}[convert]
    output = model(torch.ones(2, 4))
    output.sum().backward()
    assert output.dtype is torch.float32, "what the policy says is computed in"
    plain = getattr(seeded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), convert)().float()
    torch.testing.assert_close(output, plain(torch.ones(2, 4)), rtol=1e-5, atol=1e-5)
    for param in model.parameters():
        assert param.dtype is dtype
        assert param.grad is None or param.grad.dtype is dtype


def test_a_policys_dtype_outlives_a_conversion_of_the_parameters():
    cases = itertools.product((False, True), ONE_AXIS, ("half", "double"), (False, True))
    for case in cases:
        run_ranks(converted, 2, *case)


def clipped_on_a_rank_without_elements():
    model = FullyShardedDataParallel(nn.Linear(2, 1, bias=False), use_orig_params=True)
    model(torch.ones(1, 2)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        norm = model.clip_grad_norm_(1.0)
    return sum(param.numel() for param in model.parameters()), float(norm)


def test_a_rank_without_elements_is_not_warned_that_it_has_no_gradients():
    found = run_ranks(clipped_on_a_rank_without_elements, 2)
    assert [numel for numel, _ in found] == [2, 0]
    assert [norm for _, norm in found] == pytest.approx([2**0.5] * 2)
