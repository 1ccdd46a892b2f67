"""A step that breaks off can be put back on every rank; an optimizer's step that breaks off is called torn."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import FullyShardedDataParallel, ModuleWrapPolicy, PeerFailure, StateError, fully_shard
from shardwise.engine.step.agreement import note_checkpoint
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.divergence import LONG_SECONDS, Block, Boom, Model, OutOfMemory, Run, timeouts_of
from tests.ranks.models import data
from tests.ranks.subject import beyond_torch
from tests.ranks.tables import cases_of, run_cases, slow

pytestmark = beyond_torch


class Counting(Model):
    """Has running statistics between its blocks."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return super().forward(self.norm(x))


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_of(model):
    params = list(model.parameters())
    grads = [None if p.grad is None else local(p.grad).clone() for p in params]
    return [local(p).detach().clone() for p in params], grads, [buffer.clone() for buffer in model.buffers()]


def same_state(before, now):
    for old, new in zip(before, now, strict=True):
        for a, b in zip(old, new, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)


class Fuse:
    """Blows in a block's forward, or when backward comes to its output."""

    def __init__(self, error):
        self.error = error

    def blow(self, *_):
        raise self.error

    def wait_for_backward(self, module, args, output):
        output.register_hook(self.blow)

    def arm(self, block, where):
        if where == "forward":
            return block.register_forward_pre_hook(self.blow)
        return block.register_forward_hook(self.wait_for_backward)


def make(api):
    model = seeded(Counting())
    if api == "wrapper":
        return FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True
        )
    return fully_shard(model, wrap=Block)


def broken_steps(api, where, error, accumulates, who):
    """A step that broke off on one rank, and the same step again, as if nothing had been."""
    model, rank = make(api), dist.get_rank()
    errs = rank == who % dist.get_world_size()
    with timeouts_of(undoes_steps=True, timeout_seconds=LONG_SECONDS):
        if accumulates:
            model(data(0, rank, 3, 6)).sum().backward()
        before = state_of(model)
        fuse = Fuse(error).arm(model.blocks[1], where) if errs else None
        with pytest.raises(type(error) if errs else PeerFailure):
            model(data(1, rank, 3, 6)).sum().backward()
        if fuse is not None:
            fuse.remove()
        # What the next forward does by itself: parameters are shown sharded again.
        model.reset_iter_state()
        same_state(before, state_of(model))
        model(data(1, rank, 3, 6)).sum().backward()
        after = state_of(model)
        assert not all(map(torch.equal, before[2], after[2]))
        twin = make(api)
        for step in (0, 1) if accumulates else (1,):
            twin(data(step, rank, 3, 6)).sum().backward()
        same_state(after, state_of(twin))


ERRORS = (Boom(), OutOfMemory(), KeyboardInterrupt())


PLACES = ["forward", "backward"]
EACH = [
    *cases_of(where=PLACES, error=[Boom()], accumulates=[True], who=[-1]),
    *cases_of(where=["forward"], error=[OutOfMemory()], accumulates=[False], who=[0]),
    *cases_of(where=["backward"], error=[KeyboardInterrupt()], accumulates=[False], who=[-1]),
]
ALL = cases_of(where=PLACES, error=ERRORS, accumulates=[False, True], who=[-1, 0])


@pytest.mark.parametrize("cases", [EACH, slow(ALL)], ids=["each", "all"])
@pytest.mark.parametrize("api", ["fully_shard", "wrapper"])
def test_a_step_that_raised_on_one_rank_is_undone_on_all(api, cases):
    run_cases(broken_steps, 3, [{"api": api, **case} for case in cases])


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


def torn_step(api):
    run = Run(api)
    run.optim = TornSGD(run.model.parameters(), lr=0.02, momentum=0.9)
    tears = dist.get_rank() == 1
    saved = run.model.state_dict()
    saved = {name: value.clone() for name, value in saved.items()}
    with timeouts_of(timeout_seconds=LONG_SECONDS):
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
        with pytest.raises(StateError if tears else PeerFailure) as caught:
            run.loss()
        assert "the step of TornSGD on rank 1 raised, and is torn" in str(caught.value)
        if tears:
            note_checkpoint("run/step-7")
            with pytest.raises(StateError, match=r"load the last checkpoint \(run/step-7\)"):
                run.loss()
            note_checkpoint("")
        run.model.load_state_dict(saved)
        dist.barrier()
        run.loss().backward()


@pytest.mark.parametrize("api", ["fully_shard", "wrapper"])
def test_a_torn_optimizer_step_is_reported_to_all_ranks_until_a_checkpoint_is_loaded(api):
    run_ranks(torn_step, 2, api, kind="gloo")
