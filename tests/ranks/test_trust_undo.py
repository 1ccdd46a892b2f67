"""A step that breaks off can be put back on every rank; an optimizer's step that breaks off is called torn."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import PeerFailure, StateError, fully_shard
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import data
from tests.ranks.parting import Boom, Model, Run, timeouts_of
from tests.ranks.subject import beyond_torch

pytestmark = beyond_torch


class Counting(Model):
    """Has running statistics between its blocks."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return super().forward(self.norm(x))


def state_of(model):
    grads = [None if p.grad is None else p.grad.to_local().clone() for p in model.parameters()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    return [p.to_local().clone() for p in model.parameters()], grads, buffers


def same_state(before, now):
    for old, new in zip(before, now, strict=True):
        for a, b in zip(old, new, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)


def broken_steps(where, accumulates):
    model = seeded(Counting())
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    rank = dist.get_rank()
    with timeouts_of(undoes_steps=True, timeout_seconds=4.0):
        if accumulates:
            model(data(0, rank, 3, 6)).sum().backward()
        before = state_of(model)
        model.blocks[1].boom = where if rank == dist.get_world_size() - 1 else None
        expected = Boom if rank == dist.get_world_size() - 1 else PeerFailure
        with pytest.raises(expected):
            model(data(1, rank, 3, 6)).sum().backward()
        # What the next forward does by itself: parameters are shown sharded again.
        model.reset_iter_state()
        same_state(before, state_of(model))
        model.blocks[1].boom = None
        # And the same step again, as if nothing had been.
        model(data(1, rank, 3, 6)).sum().backward()
        after = state_of(model)
        assert not all(map(torch.equal, before[2], after[2]))
        twin = seeded(Counting())
        for block in twin.blocks:
            fully_shard(block)
        fully_shard(twin)
        for step in (0, 1) if accumulates else (1,):
            twin(data(step, rank, 3, 6)).sum().backward()
        same_state(after, state_of(twin))


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("accumulates", [False, True], ids=["fresh", "accumulating"])
def test_a_step_that_raised_on_one_rank_is_undone_on_all(where, accumulates):
    run_ranks(broken_steps, 3, where, accumulates)


class TornSGD(torch.optim.SGD):
    """Raises half way through, when told to."""

    is_armed = False

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        if self.is_armed:
            self.param_groups[0]["params"][0].add_(1.0)
            raise KeyboardInterrupt
        return super().step()


def torn_step():
    run = Run()
    run.optim = TornSGD(run.model.parameters(), lr=0.02, momentum=0.9)
    tears = dist.get_rank() == 1
    saved = run.model.state_dict()
    saved = {name: value.clone() for name, value in saved.items()}
    with timeouts_of(timeout_seconds=4.0):
        # A forward inside a step, in its closure, is no torn step.
        run.optim.step(lambda: run.loss().backward())
        run.model.load_state_dict(saved)
        run.optim = TornSGD(run.model.parameters(), lr=0.02, momentum=0.9)
        run.good_step()
        saved = {name: value.clone() for name, value in run.model.state_dict().items()}
        run.loss().backward()
        run.optim.is_armed = tears
        if tears:
            with pytest.raises(KeyboardInterrupt):
                run.optim.step()
        else:
            run.optim.step()
        run.optim.is_armed = False
        with pytest.raises(StateError if tears else PeerFailure) as told:
            run.loss()
        assert "the step of TornSGD on rank 1 raised, and is torn" in str(told.value)
        if tears:
            with pytest.raises(StateError, match="last checkpoint"):
                run.loss()
        run.model.load_state_dict(saved)
        dist.barrier()
        run.loss().backward()


def test_a_torn_optimizer_step_is_told_to_all_ranks_until_a_checkpoint_is_loaded():
    run_ranks(torn_step, 2, kind="gloo")
