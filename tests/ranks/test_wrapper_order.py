"""At `DebugLevel.DETAIL`, ranks that run units in different orders are told so, and none hangs."""

from __future__ import annotations

import contextlib
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import FullyShardedDataParallel, ShardingStrategy
from shardwise.testing import run_ranks
from tests.ranks.wrapped import device

STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]


class TwoPaths(nn.Module):
    """A first layer, then one of two whose parameters have as many elements: their collectives would match."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.path = nn.Linear(6, 6, bias=False)
        self.other_path = nn.Sequential(
            nn.Linear(6, 3, bias=False), nn.ReLU(), nn.Linear(3, 6, bias=False)
        ).requires_grad_(False)
        self.third = nn.Linear(6, 6)
        self.takes_other = False

    def forward(self, x):
        x = torch.relu(self.first(x))
        return torch.relu(self.other_path(x) if self.takes_other else self.path(x))

    def flip(self):
        now, then = (self.other_path, self.path) if self.takes_other else (self.path, self.other_path)
        for param in now.parameters():
            param.requires_grad = False
        for param in then.parameters():
            param.requires_grad = True
        self.takes_other = not self.takes_other


@contextlib.contextmanager
def detail():
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        yield
    finally:
        dist.set_debug_level(before)


def wrapped(strategy, use_orig_params):
    model = TwoPaths()
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    model.path = FullyShardedDataParallel(model.path, **options)
    model.other_path = FullyShardedDataParallel(model.other_path, **options)
    return FullyShardedDataParallel(model, **options).to(device())


def step(model):
    model(torch.randn(8, 5, device=device())).sum().backward()


def differs_at_first():
    with detail():
        for strategy, use_orig_params in itertools.product(STRATEGIES, (False, True)):
            model = wrapped(strategy, use_orig_params)
            if dist.get_rank() != 0:
                model.flip()
            with pytest.raises(RuntimeError, match=r"^Forward order differs across ranks") as caught:
                model(torch.randn(8, 5, device=device()))
            assert "are at 'path'" in str(caught.value)
            assert "are at 'other_path'" in str(caught.value)
            # Told so, a program can go on.
            if dist.get_rank() != 0:
                model.flip()
            step(model)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_differ_in_the_first_iteration_all_raise(world_size):
    run_ranks(differs_at_first, world_size, kind="gloo")


def stops_early():
    """One rank runs a unit less than the others."""
    with detail():
        model = nn.Sequential(nn.Linear(4, 4), FullyShardedDataParallel(nn.Linear(4, 4)))
        model = FullyShardedDataParallel(model)
        if dist.get_rank() == 1:
            model.module.forward = model.module[0].forward
        with pytest.raises(RuntimeError, match=r"^Forward order differs across ranks") as caught:
            model(torch.randn(2, 4, device=device()))
        assert "ranks [1] are at the end of forward" in str(caught.value)


def test_a_rank_that_ends_early_keeps_nobody_waiting():
    run_ranks(stops_early, 2, kind="gloo")


def differs_later():
    prefix = (
        f"Forward order differs from that of the first iteration on rank {dist.get_rank()}. "
        "Collectives are unchecked and may give incorrect results or hang"
    )
    with detail():
        for strategy, iterations, use_orig_params in itertools.product(STRATEGIES, (1, 3), (False, True)):
            model = wrapped(strategy, use_orig_params)
            reported = []
            for iteration in range(iterations + 2):
                if iteration == iterations and dist.get_rank() != 0:
                    model.flip()
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    step(model)
                reported += [
                    (iteration, each.category)
                    for each in caught
                    if str(each.message).startswith("Forward order differs")
                ]
                assert all(
                    str(each.message).startswith(prefix) for each in caught if "order" in str(each.message)
                )
            assert reported == ([(iterations, UserWarning)] if dist.get_rank() else []), (strategy, reported)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_that_departs_from_the_first_order_warns_once_and_goes_on(world_size):
    run_ranks(differs_later, world_size, kind="gloo")


def trains_and_evaluates():
    with detail(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for strategy, use_orig_params in itertools.product(STRATEGIES, (False, True)):
            model = wrapped(strategy, use_orig_params)
            for _ in range(2):
                model.train()
                for _ in range(3):
                    step(model)
                model.eval()
                # Evaluation may go another way than training, and then training the first way again.
                model.module.takes_other = True
                for _ in range(3):
                    model(torch.randn(8, 5, device=device())).sum()
                model.module.takes_other = False
    assert not [each for each in caught if str(each.message).startswith("Forward order")]


@pytest.mark.parametrize("world_size", [2, 4])
def test_training_and_evaluation_in_turn_never_warn(world_size):
    run_ranks(trains_and_evaluates, world_size, kind="gloo")
