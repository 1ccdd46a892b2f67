"""torch.compile on units, inside and around them: the plain model's numbers, one compilation, hooks untraced."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import (
    average_gradients,
    data,
    full,
    same,
    same_shard,
    same_shards,
    sgd,
)
from tests.ranks.subject import MixedPrecisionPolicy, beyond_torch, fully_shard, record

STEPS = 5
WIDTH = 6


class Inner(nn.Module):
    """Not one of torch's own modules: those are not compiled by themselves."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))

    def forward(self, x):
        return torch.tanh(x @ self.weight)


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.inner = Inner(width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        return x + self.out(self.inner(x))


class Blocks(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def compile_blocks(model, **kwargs):
    for block in model.blocks:
        block.compile(**kwargs)


def wrap_blocks(model, **kwargs):
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, **kwargs)


def compile_inner(model, **kwargs):
    for block in model.blocks:
        block.inner.compile(**kwargs)


def shard(model, reshard=True, policy=None):
    kwargs = {} if policy is None else {"mp_policy": policy}
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard, **kwargs)
    fully_shard(model, **kwargs)


def compile_root(model, **kwargs):
    model.compile(**kwargs)


# What is compiled, before and after sharding.
PLACES = {
    "blocks before": (compile_blocks, None),
    "blocks after": (None, compile_blocks),
    "wrapped before": (wrap_blocks, None),
    "wrapped after": (None, wrap_blocks),
    "inside before": (compile_inner, None),
    "inside after": (None, compile_inner),
    "root before": (compile_root, None),
    "root after": (None, compile_root),
}


@contextmanager
def one_compilation():
    """A second compilation of the same code is an error, and what was compiled can be counted."""
    torch._dynamo.reset()
    counters.clear()
    config = torch._dynamo.config
    was, config.error_on_recompile = config.error_on_recompile, True
    try:
        yield
    finally:
        config.error_on_recompile = was
        torch._dynamo.reset()


def loss_of(model, step, rank):
    return model(data(step, rank, 2, WIDTH)).square().mean()


def train_beside_plain(model, plain, what, tolerance=0.0):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optims = [sgd(each.parameters()) for each in (model, plain)]
    for step in range(STEPS):
        loss = loss_of(model, step, rank)
        loss.backward()
        losses = average_gradients(plain, partial(loss_of, plain, step), world_size)
        same(loss.detach(), losses[rank], f"{what}, step {step}: loss", tolerance)
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            same_shard(param.grad, expected.grad, f"{what}, step {step}: gradient of {name}", 100 * tolerance)
        for each in optims:
            each.step()
            each.zero_grad()
        same_shards(model, plain, f"{what}, step {step}: ", tolerance)


def compiled(places, reshard, policy, checkpointed):
    for place in places:
        before, after = PLACES[place]
        model, plain = seeded(Blocks(checkpointed)), seeded(Blocks())
        if policy is not None:
            shard(plain, reshard, policy)
        with one_compilation():
            if before is not None:
                before(model, backend="aot_eager")
            shard(model, reshard, policy)
            if after is not None:
                after(model, backend="aot_eager")
            if policy is None:
                train_beside_plain(model, plain, place)
            else:
                train_beside_eager(model, plain, place)
            assert counters["stats"]["calls_captured"] > 0, f"{place}: nothing was compiled"
            if "root" not in place:
                assert not counters["graph_break"], f"{place}: {dict(counters['graph_break'])}"
                assert counters["stats"]["unique_graphs"] == 1, f"{place}: {dict(counters['stats'])}"


def train_beside_eager(model, eager, what):
    """Where a policy rounds, the eager model is sharded too."""
    optims = [sgd(each.parameters()) for each in (model, eager)]
    for step in range(STEPS):
        losses = [
            each(data(step, dist.get_rank(), 2, WIDTH)).float().square().mean() for each in (model, eager)
        ]
        for loss in losses:
            loss.backward()
        same(losses[0].detach(), losses[1].detach(), f"{what}, step {step}: loss")
        for each in optims:
            each.step()
            each.zero_grad()
        for (name, param), expected in zip(model.named_parameters(), eager.parameters(), strict=True):
            same(full(param.detach()), full(expected.detach()), f"{what}, step {step}: {name}")


def test_compiled_blocks_match_the_plain_model_and_compile_once():
    run_ranks(compiled, 2, list(PLACES), True, None, False, kind="gloo")


def test_compiled_blocks_that_keep_their_parameters_match_and_compile_once():
    run_ranks(compiled, 2, ["blocks before", "blocks after", "root after"], False, None, False, kind="gloo")


def test_compiled_blocks_match_under_activation_checkpointing():
    run_ranks(compiled, 2, ["blocks before", "blocks after"], True, None, True, kind="gloo")


def test_compiled_blocks_match_in_low_precision():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    run_ranks(compiled, 2, ["blocks after", "inside before"], True, policy, False, kind="gloo")


def whole_graph():
    """`fullgraph=True` forbids any break: the hooks must not be in what is traced."""
    for place in ("blocks before", "blocks after", "wrapped before", "inside after"):
        before, after = PLACES[place]
        model, plain = seeded(Blocks()), seeded(Blocks())
        with one_compilation():
            if before is not None:
                before(model, backend="aot_eager", fullgraph=True)
            shard(model)
            if after is not None:
                after(model, backend="aot_eager", fullgraph=True)
            train_beside_plain(model, plain, place)


@beyond_torch
def test_blocks_compile_as_one_graph_without_a_break():
    run_ranks(whole_graph, 2, kind="gloo")


def same_events():
    """Compilation changes neither what is gathered nor when."""
    seen = []
    for compiles in (False, True):
        model = seeded(Blocks())
        with one_compilation():
            if compiles:
                compile_blocks(model, backend="aot_eager")
            shard(model)
            with record(model) as recorder:
                for step in range(2):
                    model(data(step, 0, 2, WIDTH)).sum().backward()
                    model.zero_grad()
                seen.append(recorder.of("unshard", "reshard", "reduce", "post_backward"))
    assert seen[0] == seen[1]
    assert len(seen[0]) > 20


@beyond_torch
def test_compiled_blocks_are_gathered_and_reduced_as_eager_ones():
    run_ranks(same_events, 2, kind="gloo")


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = Block()
        self.two = Block()

    def forward(self, x):
        x = self.one(x * 2)
        return self.two(x + 1)


def around_units():
    """Compiled from outside, a graph ends where a unit begins; nothing of the unit's hooks is traced."""
    model, plain = seeded(Pair()), seeded(Pair())
    for unit in (model.one, model.two, model):
        fully_shard(unit)
    with one_compilation():
        model.compile(backend="aot_eager")
        for step in range(STEPS):
            inputs = data(step, dist.get_rank(), 2, WIDTH).requires_grad_()
            output = model(inputs)
            same(output.detach(), plain(inputs).detach(), f"step {step}: output")
            output.sum().backward()
        reasons = list(counters["graph_break"])
        assert len(reasons) == 1, reasons
        assert "shardwise gathers and reduces here" in reasons[0], reasons
        # One graph before each unit, one for what both units have in common.
        assert counters["stats"]["unique_graphs"] == 3


@beyond_torch
def test_a_model_compiled_around_its_units_breaks_only_where_they_begin():
    run_ranks(around_units, 2, kind="gloo")


def without_grad_too():
    """Grad mode is part of what torch compiles for: one more compilation, then none."""
    model, plain = seeded(Blocks()), seeded(Blocks())
    shard(model)
    torch._dynamo.reset()
    compile_blocks(model, backend="aot_eager")
    for step in range(4):
        if step == 1:
            torch._dynamo.config.error_on_recompile = True
        with torch.no_grad():
            got = model(data(step, 0, 2, WIDTH))
        same(got, plain(data(step, 0, 2, WIDTH)).detach(), f"step {step}: output")
        model(data(step, 0, 2, WIDTH)).sum().backward()
    torch._dynamo.config.error_on_recompile = False
    torch._dynamo.reset()


def test_evaluation_between_compiled_steps_compiles_once():
    run_ranks(without_grad_too, 2, kind="gloo")


def by_inductor():
    model, plain = seeded(Blocks()), seeded(Blocks())
    with one_compilation():
        compile_blocks(model)
        shard(model)
        train_beside_plain(model, plain, "inductor", tolerance=1e-5)


@pytest.mark.slow  # inductor's first compilation calls a C++ compiler; later ones find it in torch's cache
def test_blocks_compiled_by_inductor_match_the_plain_model():
    run_ranks(by_inductor, 2, kind="gloo")


def optimizer_compiled():
    model, plain = seeded(nn.Linear(4, 3)), seeded(nn.Linear(4, 3))
    fully_shard(model)
    optim, plain_optim = sgd(model.parameters()), sgd(plain.parameters())
    step_compiled = torch.compile(optim.step, backend="eager")
    for step in range(3):
        model(data(step, dist.get_rank(), 2, 4)).square().mean().backward()
        average_gradients(plain, lambda r: plain(data(step, r, 2, 4)).square().mean(), 2)  # noqa: B023
        step_compiled()
        plain_optim.step()
        same_shards(model, plain, f"step {step}: ", 1e-6)  # compiled, a step may round another way
        optim.zero_grad()
        plain_optim.zero_grad()
    torch._dynamo.reset()


def test_an_optimizers_step_may_be_compiled():
    run_ranks(optimizer_compiled, 2, kind="gloo")


def hooks_of_users(where):
    """A user's own forward hooks run inside the module's call, with the parameters unsharded."""
    model = seeded(Blocks())
    seen = []
    block = model.blocks[1]

    def look(module, *_):
        seen.append(type(module.inner.weight) is nn.Parameter)

    if where == "before":
        block.register_forward_pre_hook(look)
        block.register_forward_hook(look)
    shard(model)
    if where == "after":
        block.register_forward_pre_hook(look)
        block.register_forward_hook(look)
    model(data(0, 0, 2, WIDTH)).sum().backward()
    assert seen == [True, True], f"hooks registered {where} sharding: {seen}"


@beyond_torch  # which runs hooks that are registered later on shards
@pytest.mark.parametrize("where", ["before", "after"])
def test_forward_hooks_of_users_see_unsharded_parameters(where):
    run_ranks(partial(hooks_of_users, where), 2)
