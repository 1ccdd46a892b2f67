"""With safe participation ranks take the branches they like, and gradients are averages in which the rest is zero.

Which branches a rank takes is read off its batch, so that it changes from rank to rank and from step to step.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from shardwise import (
    FullyShardedDataParallel,
    ModuleWrapPolicy,
    PeerFailure,
    RankDisagreement,
    ShardingStrategy,
    StateError,
    fully_shard,
    trace,
)
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.divergence import LONG_SECONDS, WIDTH, Block, Boom, timeouts_of
from tests.ranks.models import data, same, same_parameters, sgd
from tests.ranks.subject import beyond_torch
from tests.ranks.tables import run_cases, slow

pytestmark = beyond_torch
ROUTES = ((0,), (1,), (), (2, 0), (1, 2, 1))


def route_of(x):
    return ROUTES[int(x[0, 0].abs() * 1000) % len(ROUTES)]


class Trunk(Block):
    """Run by every rank."""


class Branching(nn.Module):
    """Branches of two sizes between parts that every rank runs; without a trunk, a rank may run nothing at all."""

    def __init__(self, has_trunk=True, checkpoints=None):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH) if has_trunk else nn.Identity()
        self.trunk_in = Trunk(8) if has_trunk else nn.Identity()
        self.branches = nn.ModuleList(Block(width) for width in (8, 8, 12))
        self.trunk_out = Trunk(10) if has_trunk else nn.Identity()
        self.checkpoints = checkpoints

    def forward(self, x):
        route = route_of(x)
        x = self.trunk_in(self.first(x))
        for number in route:
            branch = self.branches[number]
            x = (
                branch(x)
                if self.checkpoints is None
                else checkpoint(branch, x, use_reentrant=self.checkpoints)
            )
        return self.trunk_out(x)


def shard(model, api, options, covers):
    if api == "wrapper":
        policy = ModuleWrapPolicy({Block, Trunk})
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)
    else:
        if "replicas" in options:
            world = dist.get_world_size()
            options = {"mesh": init_device_mesh("cpu", (options["replicas"], world // options["replicas"]))}
        fully_shard(model, wrap=(Block, Trunk), **options)
    for module in [model] if covers == "all" else model.branches:
        module.set_safe_participation()
    return model


def loss_of(model, number, rank):
    return model(data(number, rank, 3, WIDTH)).square().mean()


def one(losses, model):
    losses[0]().backward()


def accumulated(losses, model):
    for loss in losses:
        loss().backward()


def stashed(losses, model):
    if isinstance(model, FullyShardedDataParallel):
        with model.no_sync():
            losses[0]().backward()
    else:
        model.set_requires_gradient_sync(False)
        losses[0]().backward()
        model.set_requires_gradient_sync(True)
    losses[1]().backward()


def together(losses, model):
    (losses[0]() + losses[1]()).backward()


def one_behind(losses, model):
    waiting = [loss() for loss in losses]
    for loss in waiting:
        loss.backward()


def after_others(losses, model):
    """Forwards without grad, and with: one is held over the optimizer's step, because no backward follows."""
    losses[0]().backward()
    with torch.no_grad():
        losses[0]()
    losses[0]()


def train(api, options, covers="all", has_trunk=True, checkpoints=None, schedule=one):
    """Losses of a sharded and a plain model, step by step; bitwise, where micro-batches are not added up first."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = shard(seeded(Branching(has_trunk, checkpoints)), api, dict(options), covers)
    plain = seeded(Branching(has_trunk))
    optim, plain_optim = sgd(model.parameters()), sgd(plain.parameters())
    num_batches = 1 if schedule in (one, after_others) else 2
    sums_as_plain = schedule in (one, accumulated, after_others, one_behind)
    tolerance = 0.0 if sums_as_plain and not {"replicas", "exact"} & set(options) else 1e-5
    routes = set()
    for step in range(4):
        seen = []

        def run(number, seen=seen):
            seen.append(loss_of(model, number, rank))
            return seen[-1]

        schedule([lambda number=number: run(number) for number in (2 * step, 2 * step + 1)], model)
        totals = {param: torch.zeros_like(param) for param in plain.parameters()}
        for number in range(2 * step, 2 * step + num_batches):
            sums = {param: torch.zeros_like(param) for param in plain.parameters()}
            for other in range(world):
                plain.zero_grad()
                loss = loss_of(plain, number, other)
                if loss.requires_grad:
                    loss.backward()
                if other == rank:
                    same(
                        seen[number - 2 * step - num_batches].detach(),
                        loss.detach(),
                        f"loss {number}",
                        tolerance,
                    )
                for param in plain.parameters():
                    sums[param] += 0.0 if param.grad is None else param.grad
            for param, total in totals.items():
                total += sums[param] / world
        for param, total in totals.items():
            param.grad = total
        routes.add(tuple(route_of(data(2 * step, other, 3, WIDTH)) for other in range(world)))
        for each in (optim, plain_optim):
            each.step()
            each.zero_grad()
    assert any(len(set(taken)) > 1 for taken in routes), "all ranks took the same branches"
    if api == "fully_shard":
        model.reset_iter_state()
        same_parameters(model, plain, "at the end: ", tolerance)


def wrapper(**options):
    return {"api": "wrapper", "options": {"use_orig_params": True, **options}}


SHARDED = {"api": "fully_shard", "options": {}}
KEPT = {"api": "fully_shard", "options": {"reshard_after_forward": False}}
BRANCHES = {"covers": "branches"}
SCHEDULES = (one, accumulated, stashed, together, one_behind, after_others)


# With each API every schedule; all of them with each, in turn.
@pytest.mark.parametrize(
    "apis", [(SCHEDULES[::2], SCHEDULES[1::2]), slow((SCHEDULES,) * 2)], ids=["each", "all"]
)
def test_ranks_that_take_different_branches_train_to_the_average_over_ranks(apis):
    of_branches, of_wrapper = apis
    cases = [{**SHARDED, "schedule": schedule} for schedule in SCHEDULES]
    cases += [{**SHARDED, **BRANCHES, "schedule": schedule} for schedule in of_branches]
    cases += [{**SHARDED, "has_trunk": False}, {**KEPT, **BRANCHES}]
    cases += [{**SHARDED, **BRANCHES, "checkpoints": kind} for kind in (False, True)]
    cases += [{**wrapper(), "schedule": schedule} for schedule in of_wrapper]
    cases += [
        wrapper(use_orig_params=False),
        {**wrapper(forward_prefetch=True), **BRANCHES},
        wrapper(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
        wrapper(sharding_strategy=ShardingStrategy.NO_SHARD),
        {**wrapper(), **BRANCHES, "checkpoints": False},
        {**wrapper(), "has_trunk": False},
    ]
    run_cases(train, 3, cases)


def test_four_processes_take_different_branches():
    cases = [
        {**SHARDED, **BRANCHES},
        {**SHARDED, "has_trunk": False},
        {"api": "fully_shard", "options": {"reshard_after_forward": 2}, **BRANCHES},
        {"api": "fully_shard", "options": {"replicas": 2}, "schedule": stashed},
        {"api": "fully_shard", "options": {"exact": True}, "schedule": accumulated},
        wrapper(),
    ]
    run_cases(train, 4, cases, kind="gloo")


def test_at_debug_level_detail_branches_are_no_difference_of_order(monkeypatch):
    for module in ("execution_order", "wrapper"):
        monkeypatch.setattr(f"shardwise.wrapper.{module}.debugs_in_detail", lambda: True)
    run_cases(train, 2, [{**wrapper(), **BRANCHES}])


# --- what it does, and what it does not ------------------------------------------------------------------------------


JOINT = ["branches.0", "branches.1", "branches.2"]


def joint_events(model, number):
    with trace.record(model) as recorder:
        loss = loss_of(model, number, dist.get_rank())
        if torch.is_grad_enabled():
            loss.backward()
    events = recorder.of(trace.UNSHARD, trace.RESHARD, trace.REDUCE)
    return [event for event in events if event[1] in JOINT]


def a_life():
    """Gathered together, let go together, whatever is run; an error on the way is no obstacle to the next step."""
    model = shard(seeded(Branching()), "fully_shard", {}, "branches")
    rank = dist.get_rank()
    weights = [branch.up.weight for branch in model.branches]
    for number in range(3):
        events = joint_events(model, number)
        assert events[:3] == [(trace.UNSHARD, name, trace.IN_FORWARD) for name in JOINT]
        assert [name for kind, name, _ in events if kind == trace.REDUCE] == JOINT[::-1]
        assert sorted(name for kind, name, _ in events if kind == trace.RESHARD) == JOINT
        assert len(events) == 9
        assert all(weight is branch.up.weight for weight, branch in zip(weights, model.branches, strict=True))
    with torch.no_grad():
        assert {kind for kind, *_ in joint_events(model, 0)} == {trace.UNSHARD, trace.RESHARD}
    model.trunk_out.boom = "forward" if rank == 0 else None
    with timeouts_of(timeout_seconds=LONG_SECONDS), pytest.raises((Boom, PeerFailure)):
        loss_of(model, 0, rank).backward()
    model.trunk_out.boom = None
    mended = joint_events(model, 1)
    assert mended[:3] == [(trace.RESHARD, name, trace.IDLE) for name in JOINT]
    assert len(mended) == 3 + 9
    model.register_forward_pre_hook(lambda module, args: module.set_safe_participation(False))
    with pytest.raises(StateError, match="in the middle of a step"):
        loss_of(model, 0, rank)


def test_joint_units_are_gathered_at_the_first_place_that_all_ranks_come_to_and_reduced_at_the_last():
    run_ranks(a_life, 2)


def switched_off():
    """Set and taken back: as if it had never been; the error that then comes says what would have helped."""
    model = shard(seeded(Branching()), "fully_shard", {}, "all")
    rank = dist.get_rank()
    loss_of(model, 0, rank)
    model.set_safe_participation(False)
    number = next(n for n in range(99) if len({route_of(data(n, r, 3, WIDTH)) for r in range(2)}) == 2)
    with (
        timeouts_of(timeout_seconds=LONG_SECONDS),
        pytest.raises(RankDisagreement, match="set_safe_participation"),
    ):
        loss_of(model, number, rank).backward()


def test_without_it_ranks_that_branch_are_told_of_it():
    run_ranks(switched_off, 2)
