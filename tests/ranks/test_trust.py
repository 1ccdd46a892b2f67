"""Ranks that part raise, all of them, with the place where they part; then they train on, right to the last bit.

Many cases share one set of ranks: a case that left anything behind would fail those after it.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from shardwise import PeerFailure, RankDisagreement, set_trust
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import average_gradients, data, same_parameters, sgd
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
        self.boom = None

    def forward(self, x):
        if self.boom == "forward":
            raise Boom
        x = x + self.down(torch.tanh(self.up(x)))
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


def sharded():
    model = seeded(Model())
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def loss_of(model, step, rank):
    return model(data(step, rank, 3, WIDTH)).square().mean()


class Run:
    """A sharded model in training, and a plain one beside it that makes the same good steps."""

    def __init__(self):
        self.model, self.plain = sharded(), seeded(Model())
        self.optim, self.plain_optim = sgd(self.model.parameters()), sgd(self.plain.parameters())
        self.step = 0

    def loss(self):
        return loss_of(self.model, self.step, dist.get_rank())

    def good_step(self):
        self.model.order = (0, 1, 2, 3)
        self.optim.zero_grad()
        self.loss().backward()
        self.optim.step()
        average_gradients(
            self.plain, lambda rank: loss_of(self.plain, self.step, rank), dist.get_world_size()
        )
        self.plain_optim.step()
        self.plain_optim.zero_grad()
        self.step += 1
        same_parameters(self.model, self.plain, f"step {self.step}: ", 0.0)


# --- what a rank may do wrong: each is called on all ranks and told whether this one errs ---------------------------


def another_layer_of_the_same_shape(run, errs):
    run.model.order = (0, 2, 1, 3) if errs else (0, 1, 2, 3)
    run.loss().backward()
    run.optim.step()


def another_layer_of_another_shape(run, errs):
    run.model.order = (0, 3, 1, 2) if errs else (0, 1, 2, 3)
    run.loss().backward()
    run.optim.step()


def an_unused_layer(run, errs):
    run.model.order = (0, 1, 3) if errs else (0, 1, 2, 3)
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
    run.model.blocks[1].up.weight.requires_grad_(not errs)
    try:
        run.loss().backward()
        run.optim.step()
    finally:
        run.model.blocks[1].up.weight.requires_grad_(True)


def another_resharding(run, errs):
    run.model.blocks[1].set_reshard_after_forward(not errs)
    try:
        run.loss().backward()
        run.optim.step()
    finally:
        run.model.blocks[1].set_reshard_after_forward(True)


def no_sync_on_one(run, errs):
    run.model.set_requires_gradient_sync(not errs)
    try:
        run.loss().backward()
        run.optim.step()
    finally:
        run.model.set_requires_gradient_sync(True)


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
    run.model.blocks[2].boom = "forward" if errs else None
    try:
        run.loss().backward()
        run.optim.step()
    finally:
        run.model.blocks[2].boom = None


def an_exception_in_backward(run, errs):
    run.model.blocks[1].boom = "backward" if errs else None
    try:
        run.loss().backward()
        run.optim.step()
    finally:
        run.model.blocks[1].boom = None


def an_exception_in_a_hook(run, errs):
    hook = run.model.blocks[2].up.weight.register_post_accumulate_grad_hook(raise_boom) if errs else None
    try:
        run.loss().backward()
        run.optim.step()
    finally:
        if hook is not None:
            hook.remove()


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
]
BREAKING_OFF = [an_exception_in_forward, an_exception_in_backward, an_exception_in_a_hook]


@contextmanager
def timeout_of(seconds):
    before = set_trust(timeout_seconds=seconds)
    try:
        yield
    finally:
        set_trust(timeout_seconds=before.timeout_seconds)


def outcomes(cases, who):
    """What each case ends in on this rank; a good step before and after each must be right to the last bit."""
    errs = dist.get_rank() == who % dist.get_world_size()
    ended = []
    run = Run()
    with timeout_of(4.0):
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
    return ended


def check(world_size, who, parting, breaking_off, kind):
    told = run_ranks(outcomes, world_size, [*parting, *breaking_off], who, kind=kind, timeout_seconds=100)
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
    check(4, 0, PARTING, BREAKING_OFF, "threads")
