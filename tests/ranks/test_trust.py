"""Ranks that part raise, all of them, with the place where they part; then they train on, right to the last bit.

Many cases share one set of ranks: a case that left anything behind would fail those after it.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear

from shardwise import (
    FullyShardedDataParallel,
    ModuleWrapPolicy,
    PeerFailure,
    RankDisagreement,
    ZeroRedundancyOptimizer,
    clip_grad_norm_,
    set_trust,
)
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import average_gradients, data, same, sgd
from tests.ranks.subject import beyond_torch, fully_shard

pytestmark = beyond_torch

WIDTH = 6


class Boom(Exception):
    """A user's own error."""


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(WIDTH, width)
        self.down = nn.Linear(width, WIDTH)
        self.uses_bias = True
        self.boom = None

    def forward(self, x):
        if self.boom == "forward":
            raise Boom
        x = x + self.down(torch.tanh(self.up(x)) if self.uses_bias else linear(x, self.up.weight))
        if self.boom == "backward":
            x.register_hook(raise_boom)
        return x


def raise_boom(*_):
    raise Boom


class Model(nn.Module):
    """Blocks in an order that a test can change; the last one is of another size."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(width) for width in (8, 8, 8, 12))
        self.order = (0, 1, 2, 3)

    def forward(self, x):
        x = self.first(x)
        for number in self.order:
            x = self.blocks[number](x)
        return x


def sharded(face):
    model = seeded(Model())
    if face == "wrapper":
        return FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True
        )
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def loss_of(model, step, rank):
    return model(data(step, rank, 3, WIDTH)).square().mean()


class Run:
    """A sharded model in training, and a plain one beside it that makes the same good steps."""

    def __init__(self, face="fully_shard"):
        self.face = face
        self.model, self.plain = sharded(face), seeded(Model())
        self.optim, self.plain_optim = sgd(self.model.parameters()), sgd(self.plain.parameters())
        self.step = 0

    def loss(self):
        return loss_of(self.model, self.step, dist.get_rank())

    def take(self, *order):
        model = self.model.module if self.face == "wrapper" else self.model
        model.order = order

    def block(self, number):
        block = self.model.blocks[number]
        return block.module if self.face == "wrapper" else block

    def good_step(self):
        """Right to the last bit: a parameter that was not would show in the loss."""
        self.take(0, 1, 2, 3)
        self.optim.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optim.step()
        losses = average_gradients(
            self.plain, lambda rank: loss_of(self.plain, self.step, rank), dist.get_world_size()
        )
        same(loss.detach(), losses[dist.get_rank()], f"loss of step {self.step}", 0.0)
        self.plain_optim.step()
        self.plain_optim.zero_grad()
        self.step += 1


# --- what a rank may do wrong: each is called on all ranks and told whether this one errs ---------------------------


def another_layer_of_the_same_shape(run, errs):
    run.take(*((0, 2, 1, 3) if errs else (0, 1, 2, 3)))
    run.loss().backward()
    run.optim.step()


def another_layer_of_another_shape(run, errs):
    run.take(*((0, 3, 1, 2) if errs else (0, 1, 2, 3)))
    run.loss().backward()
    run.optim.step()


def an_unused_layer(run, errs):
    run.take(*((0, 1, 3) if errs else (0, 1, 2, 3)))
    run.loss().backward()
    run.optim.step()


def an_extra_forward(run, errs):
    if errs:
        run.loss()
    run.loss().backward()
    run.optim.step()


def an_extra_forward_without_grad(run, errs):
    if errs:
        with torch.no_grad():
            run.loss()
    run.loss().backward()
    run.optim.step()


def a_missing_forward(run, errs):
    if not errs:
        run.loss().backward()
    run.optim.step()


def no_backward(run, errs):
    loss = run.loss()
    if not errs:
        loss.backward()
    run.optim.step()


def backward_twice(run, errs):
    loss = run.loss()
    loss.backward(retain_graph=errs)
    if errs:
        loss.backward()
    run.optim.step()


def another_number_of_micro_batches(run, errs):
    for _ in range(3 if errs else 2):
        run.loss().backward()
    run.optim.step()


def another_requires_grad(run, errs):
    run.block(1).up.weight.requires_grad_(not errs)
    try:
        run.loss().backward()
        run.optim.step()
    finally:
        run.block(1).up.weight.requires_grad_(True)


def another_resharding(run, errs):
    run.model.blocks[1].set_reshard_after_forward(not errs)
    try:
        run.loss().backward()
        run.optim.step()
    finally:
        run.model.blocks[1].set_reshard_after_forward(True)


def no_sync_on_one(run, errs):
    if run.face == "wrapper":
        with run.model.no_sync() if errs else nullcontext():
            run.loss().backward()
    else:
        run.model.set_requires_gradient_sync(not errs)
        try:
            run.loss().backward()
        finally:
            run.model.set_requires_gradient_sync(True)
    run.optim.step()


def eval_on_one(run, errs):
    with torch.set_grad_enabled(not errs):
        loss = run.loss()
    if not errs:
        loss.backward()
    run.optim.step()


def a_step_on_the_others_only(run, errs):
    run.loss().backward()
    if not errs:
        run.optim.step()
    run.loss()


def an_exception_in_forward(run, errs):
    run.block(2).boom = "forward" if errs else None
    try:
        run.loss().backward()
        run.optim.step()
    finally:
        run.block(2).boom = None


def an_exception_in_backward(run, errs):
    run.block(1).boom = "backward" if errs else None
    try:
        run.loss().backward()
        run.optim.step()
    finally:
        run.block(1).boom = None


def an_exception_in_a_hook(run, errs):
    hook = run.block(2).up.weight.register_post_accumulate_grad_hook(raise_boom) if errs else None
    try:
        run.loss().backward()
        run.optim.step()
    finally:
        if hook is not None:
            hook.remove()


def clipping_on_one(run, errs):
    run.loss().backward()
    if errs:
        clip_grad_norm_(run.model.parameters(), 1.0)
    run.optim.step()


def a_gradient_on_the_others_only(run, errs):
    run.block(2).uses_bias = not errs
    try:
        run.loss().backward()
        run.optim.step()
    finally:
        run.block(2).uses_bias = True


PARTING = [
    another_layer_of_the_same_shape,
    another_layer_of_another_shape,
    an_unused_layer,
    an_extra_forward,
    an_extra_forward_without_grad,
    a_missing_forward,
    no_backward,
    backward_twice,
    another_number_of_micro_batches,
    another_requires_grad,
    another_resharding,
    no_sync_on_one,
    eval_on_one,
    a_step_on_the_others_only,
    clipping_on_one,
    a_gradient_on_the_others_only,
]
BREAKING_OFF = [an_exception_in_forward, an_exception_in_backward, an_exception_in_a_hook]


@contextmanager
def timeouts_of(**changes):
    """A policy of the process for a while: the processes of a pool serve other tests too."""
    before = set_trust(**changes)
    try:
        yield
    finally:
        set_trust(**asdict(before))


def outcomes(cases, who, face):
    """What each case ends in on this rank; a good step before and after each must be right to the last bit."""
    errs = dist.get_rank() == who % dist.get_world_size()
    ended = []
    run = Run(face)
    with timeouts_of(timeout_seconds=4.0):
        run.good_step()
        for case in cases:
            run.optim.zero_grad()
            try:
                case(run, errs)
            except (Boom, RankDisagreement, PeerFailure) as error:
                ended.append((type(error).__name__, str(error)))
            else:
                ended.append(("nothing", ""))
            run.good_step()
            run.good_step()
    return ended


def check(world_size, who, parting, breaking_off, kind, face="fully_shard"):
    cases = [*parting, *breaking_off]
    told = run_ranks(outcomes, world_size, cases, who, face, kind=kind, timeout_seconds=100)
    who %= world_size
    for rank, ended in enumerate(told):
        for case, (name, text) in zip(parting, ended, strict=False):
            assert name == "RankDisagreement", f"{case.__name__} on rank {rank}: {name} {text}"
            assert f"rank {who} went on to" in text
            assert f"rank {rank}: ..." in text
        for case, (name, text) in zip(breaking_off, ended[len(parting) :], strict=True):
            assert name == ("Boom" if rank == who else "PeerFailure"), f"{case.__name__} on {rank}: {name}"
            assert rank == who or f"rank {who} broke off its step" in text


def test_two_ranks_that_part_both_raise_and_train_on():
    check(2, 0, PARTING, BREAKING_OFF, "gloo")


def test_four_ranks_raise_when_the_last_one_parts_and_train_on():
    check(4, -1, PARTING[:2] + PARTING[6:8] + PARTING[-1:], BREAKING_OFF[1:2], "gloo")


def test_ranks_as_threads_that_part_all_raise_and_train_on():
    check(4, 0, PARTING[1::2], BREAKING_OFF[1:], "threads")


def test_ranks_of_a_wrapped_model_that_part_all_raise_and_train_on():
    # Of settings that a wrapper does not have.
    others = (another_resharding, another_requires_grad)
    check(3, 1, [case for case in PARTING if case not in others], BREAKING_OFF, "threads", "wrapper")


def zero_outcomes():
    """The last rank errs with a ZeroRedundancyOptimizer; then all go on."""
    errs = dist.get_rank() == dist.get_world_size() - 1
    model = seeded(Model())
    optim = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)
    ended = []

    def gradients(of=lambda name: True):
        for name, param in model.named_parameters():
            param.grad = torch.ones_like(param) if of(name) else None

    def all_step():
        gradients()
        optim.step()

    def one_lacks_a_gradient():
        gradients(lambda name: not errs or name != "first.bias")
        optim.step()

    with timeouts_of(timeout_seconds=4.0):
        all_step()
        for case in (one_lacks_a_gradient, one_lacks_a_gradient):
            try:
                case()
            except RankDisagreement as error:
                ended.append(str(error))
            all_step()
    return ended


@pytest.mark.parametrize("kind", ["gloo", "threads"])
def test_no_rank_steps_a_zero_optimizer_before_all_agree(kind):
    for ended in run_ranks(zero_outcomes, 3, kind=kind):
        assert len(ended) == 2
        assert all("rank 2 went on to step a ZeroRedundancyOptimizer" in text for text in ended)
        assert all("without gradients of [1]" in text for text in ended)
