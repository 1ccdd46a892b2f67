"""Weights that are kept unsharded beyond a step of an optimizer: the next forward computes with the new ones."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from shardwise import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.wrapped import ONE_AXIS

FSDP = FullyShardedDataParallel
KINDS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
OPTIMIZERS = {
    "SGD": lambda params, kind: torch.optim.SGD(params, lr=0.05, momentum=0.9, **KINDS[kind]),
    "AdamW": lambda params, kind: torch.optim.AdamW(params, lr=0.05, **KINDS[kind]),
    "Adagrad": lambda params, kind: torch.optim.Adagrad(params, lr=0.05, **KINDS[kind]),
}


def network():
    return seeded(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))


def wrapped(**options):
    model = network()
    inner = FSDP(model[0], **options)
    return FSDP(nn.Sequential(inner, model[1], model[2]), **options)


def losses(model, optim, look):
    """Four steps; ``look`` asks for outputs at a moment when parameters may be kept, or leaves them unused."""
    found = []
    x = torch.arange(12.0).view(2, 6) / 7
    for _ in range(4):
        loss = model(x).square().mean()
        if look == "before backward":
            with torch.no_grad():
                model(x)
        loss.backward()
        if look == "after backward":
            model(x)
        elif look == "after backward without grad":
            with torch.no_grad():
                model(x)
        elif look == "of a unit":
            model[0](x)
        optim.step()
        if look == "twice":
            optim.step()
        optim.zero_grad()
        found.append(loss.item())
    return found


LOOKS = ("after backward", "after backward without grad", "before backward", "of a unit", "twice")


def kept(strategy, orig, precision=None):
    for (name, make), kind, look in itertools.product(OPTIMIZERS.items(), KINDS, LOOKS):
        plain = network()
        want = losses(plain, make(plain.parameters(), kind), look)
        model = wrapped(sharding_strategy=strategy, use_orig_params=orig, mixed_precision=precision)
        got = losses(model, make(model.parameters(), kind), look)
        torch.testing.assert_close(
            torch.tensor(got),
            torch.tensor(want),
            rtol=1e-4 if precision is None else 2e-2,
            atol=1e-6,
            msg=f"{name} {kind}, a look {look}: {got} for {want}",
        )


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("strategy", ONE_AXIS)
def test_a_step_of_any_kind_of_optimizer_is_seen_by_the_next_forward(strategy, orig):
    run_ranks(kept, 2, strategy, orig)


@pytest.mark.parametrize("strategy", [ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD])
def test_steps_are_seen_where_weights_are_computed_with_in_another_dtype(strategy):
    run_ranks(kept, 2, strategy, True, MixedPrecision(param_dtype=torch.bfloat16))


def written():
    """Weights kept by a forward, and what is written to the shards by other means than a step."""
    x = torch.ones(2, 6)
    writes = (
        lambda params: torch._foreach_mul_(params, 0.5),
        lambda params: [param.mul_(0.5) for param in params],
        lambda params: [param.copy_(param * 0.5) for param in params],
        lambda params: [setattr(param, "data", param.data * 0.5) for param in params],
    )
    for strategy, orig, write in itertools.product(ONE_AXIS, (False, True), writes):
        model, plain = wrapped(sharding_strategy=strategy, use_orig_params=orig), network()
        model(x)
        with torch.no_grad():
            write(list(model.parameters()))
            write(list(plain.parameters()))
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)


def test_writes_to_shards_are_seen_by_the_next_forward():
    run_ranks(written, 2)


def offloaded():
    for kind, look in itertools.product(KINDS, LOOKS):
        make, plain = OPTIMIZERS["AdamW"], network()
        want = losses(plain, make(plain.parameters(), kind), look)
        model = wrapped(
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
            use_orig_params=True,
            cpu_offload=CPUOffload(offload_params=True),
        )
        got = losses(model, make(model.parameters(), kind), look)
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-4, atol=1e-6)


def test_steps_on_the_host_are_seen_by_the_next_forward():
    run_ranks(offloaded, 2)


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.skips = False

    def forward(self, x):
        x = self.first(x)
        return x if self.skips else self.second(x)


def gathered_early():
    """Units that were gathered ahead and not used, with a write to the shards before the next forward."""
    x = torch.ones(2, 6)
    for orig, moment in itertools.product((False, True), ("alone", "skipped", "skipped with grad")):
        plain = seeded(Skipping())
        model = seeded(Skipping())
        options = {"forward_prefetch": True, "use_orig_params": orig}
        model.first, model.second = FSDP(model.first, **options), FSDP(model.second, **options)
        model = FSDP(model, **options)
        for _ in range(2):
            model(x).sum().backward()
        with torch.set_grad_enabled(moment == "skipped with grad"):
            if moment == "alone":
                model.module.first(x)
            else:
                model.module.skips = True
                model(x)
                model.module.skips = False
        with torch.no_grad():
            for param in (*model.parameters(), *plain.parameters()):
                param.mul_(0.5)
            torch.testing.assert_close(model(x), plain(x), msg=moment)


def test_a_unit_that_was_gathered_ahead_and_not_used_is_gathered_anew():
    run_ranks(gathered_early, 2)
