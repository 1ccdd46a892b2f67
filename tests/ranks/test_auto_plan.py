"""``fully_shard(model, plan=...)``: a model at hand is sharded as rank 0 has chosen, or as a plan says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwise
from shardwise import ConfigError, fully_shard
from shardwise.forecast.auto import without_memory
from shardwise.forecast.rehearsal import all_units
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import Layers, TwoLayers
from tests.ranks.subject import beyond_torch

pytestmark = beyond_torch

WIDTH = 6


def inputs(rank):
    # Of another size on each rank: one of them chooses for all.
    return torch.ones(4 + rank, WIDTH)


def trained(shard):
    model = seeded(Layers())
    shard(model)
    rank = torch.distributed.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(inputs(rank)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [unit.name for unit in all_units(model)]


def auto_beside_by_hand(budget_gb):
    rank = torch.distributed.get_rank()
    options = {"plan": "auto", "loss": lambda out: out.square().sum(), "device_type": "cpu"}
    chosen = trained(lambda model: fully_shard(model, inputs=inputs(rank), budget_gb=budget_gb, **options))
    by_hand = trained(lambda model: fully_shard(model, wrap=TwoLayers, device_type="cpu"))
    with pytest.raises(ConfigError) as refused:
        fully_shard(Layers(), inputs=inputs(rank), budget_gb=1e-9, **options)
    return chosen, by_hand, str(refused.value)


def test_all_ranks_shard_as_rank_0_has_chosen_and_train_as_by_hand():
    found = run_ranks(auto_beside_by_hand, 2, 1.0)
    for (losses, units), (expected, _), refused in found:
        assert losses == expected
        assert units == found[0][0][1]
        assert "" in units
        assert "settings fits into 0.0000 GiB" in refused


def test_the_logger_says_what_was_chosen_and_why(caplog):
    def shard():
        with caplog.at_level("INFO", "shardwise"):
            fully_shard(Layers(), plan="auto", inputs=torch.ones(2, WIDTH), device_type="cpu")

    run_ranks(shard, 1)
    assert "chosen: " in caplog.text
    assert "the fastest of" in caplog.text


def chosen_before(ranks):
    return shardwise.choose(
        Layers, torch.empty(4, WIDTH, device="meta"), ranks=ranks, device="cpu-gloo", wrap=TwoLayers
    )


def shard_as_chosen(choice):
    model = Layers()
    fully_shard(model, plan=choice, device_type="cpu")
    with pytest.raises(ConfigError, match="one whole model that is not sharded yet"):
        fully_shard(model, plan=choice, device_type="cpu")
    return len(all_units(model))


def test_a_choice_made_before_is_taken_as_it_is():
    choice = chosen_before(2)
    assert run_ranks(shard_as_chosen, 2, choice) == [len(choice.best.rehearsal.units)] * 2


def refuse(options, message):
    with pytest.raises(ConfigError, match=message):
        fully_shard(nn.Sequential(Layers()), device_type="cpu", **options)


def test_what_is_no_plan_or_lacks_something_is_refused():
    cases = [
        ({"plan": "fast"}, "plan='fast' is no plan"),
        ({"plan": "auto"}, r"depends on what the model is given(.|\n)*pass inputs="),
        ({"plan": chosen_before(4)}, "the plan is for 4 ranks, and there are 1"),
        ({"plan": "auto", "exact": True}, "a plan does not know exact"),
    ]

    def all_cases():
        for options, message in cases:
            refuse(options, message)

    run_ranks(all_cases, 1)


def test_a_copy_without_memory_has_the_models_shapes_ties_and_modes():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    copied = without_memory(model)
    assert all(each.is_meta for each in (*copied.parameters(), *copied.buffers()))
    assert copied[1].weight is copied[0].weight
    assert not copied[0].bias.requires_grad
    assert not copied.training
    assert [each.shape for each in copied.parameters()] == [each.shape for each in model.parameters()]
    assert not model[0].weight.is_meta
