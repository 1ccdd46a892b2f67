"""Torch's optimizers step shards as they step the whole, shards without elements included."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import FullyShardedDataParallel
from shardwise.errors import StateError
from shardwise.testing import run_ranks
from tests.ranks.models import data, match_plain
from tests.ranks.subject import beyond_torch, fully_shard
from tests.ranks.tables import cases_of, run_cases

pytestmark = pytest.mark.arithmetic

OPTIMIZERS = {
    "Adam": partial(torch.optim.Adam, lr=0.02, weight_decay=0.01),
    "Adam amsgrad": partial(torch.optim.Adam, lr=0.02, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.02, weight_decay=0.05),
    "Adamax": partial(torch.optim.Adamax, lr=0.02),
    "NAdam": partial(torch.optim.NAdam, lr=0.02),
    "RAdam": partial(torch.optim.RAdam, lr=0.02),
    "SGD": partial(torch.optim.SGD, lr=0.05),
    "SGD momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "SGD nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "ASGD": partial(torch.optim.ASGD, lr=0.05),
}


class Uneven(nn.Module):
    """Sizes that do not divide by the world, and a first dim that some ranks have no row of."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.few_rows = nn.Parameter(torch.full((2, 7), 0.5))
        self.last = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.last(x * self.few_rows.sum(0)) * self.scale


def shard(model):
    fully_shard(model.first)
    fully_shard(model)


def loss_of(model, step, rank):
    return model(data(step, rank, 3, 5)).square().mean()


def matches_the_unsharded_optimizer(name, foreach):
    make = partial(OPTIMIZERS[name], foreach=foreach)
    made = []

    def optimizer(params):
        made.append(make(params))
        return made[-1]

    model = match_plain(Uneven, shard, loss_of, steps=3, optimizer=optimizer)
    local_sizes = [param.to_local().numel() for param in model.parameters()]
    for state in made[0].state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                assert isinstance(value, DTensor), f"{name}: the state {key} is not sharded"
    return 0 in local_sizes


def test_an_optimizer_steps_shards_as_it_steps_the_whole():
    cases = cases_of(name=list(OPTIMIZERS), foreach=[False, True])
    lacked_a_row = run_cases(matches_the_unsharded_optimizer, 4, cases)
    assert any(all(by_case) for by_case in lacked_a_row), "every rank had a row of every parameter"


def test_optimizers_step_alike_where_ranks_are_processes():
    run_ranks(matches_the_unsharded_optimizer, 4, "AdamW", True, kind="gloo")


def stepped_in_vain(when):
    """An optimizer that holds parameters which no gradient comes to says so, instead of training nothing."""
    model = Uneven()
    made = torch.optim.SGD(model.parameters()) if when.startswith("before") else None
    if when == "before wrapping":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    else:
        shard(model)
    if when == "between":
        loss = loss_of(model, 0, dist.get_rank())
        made = torch.optim.SGD(model.parameters())
        loss.backward()
    else:
        if when == "after an exception":
            loss = loss_of(model, 0, dist.get_rank())
            loss.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            made = torch.optim.SGD(model.parameters())
        loss_of(model, 0, dist.get_rank()).backward()
    form = "was before it was sharded" if when.startswith("before") else "is while gathered"
    with pytest.raises(
        StateError, match=rf"(?s)SGD holds parameter '.*' as it {form}.* make the optimizer after"
    ):
        made.step()
    # Others are none the worse for it.
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@beyond_torch
@pytest.mark.parametrize("when", ["before sharding", "before wrapping", "between", "after an exception"])
def test_an_optimizer_that_would_step_in_vain_says_so(when):
    run_ranks(stepped_in_vain, 2, when, kind="gloo")
