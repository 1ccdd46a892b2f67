"""What a step holds at its peaks in every mode: counted in a dry run of the engine, beside the plan's arithmetic.

In blocks of weights: six equal blocks of two layers each, of float32, and hardly any activations.
"""

from __future__ import annotations

from itertools import chain, repeat

import pytest
import torch
from torch import nn

import shardwise
from shardwise import MixedPrecisionPolicy, fully_shard
from shardwise.comm.dry_run import rehearsing
from shardwise.forecast.dry_mesh import dry_mesh
from shardwise.forecast.recording import TapeRecorder
from shardwise.forecast.rehearsal import sharded_as
from shardwise.forecast.settings import Settings

WIDTH = 2048
BLOCK_BYTES = 8 * WIDTH * WIDTH * 4
# Of activations, in blocks.
MOST_OFF = 0.01

WIDE_ROWS = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
NARROW_ROWS = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        )


def stack():
    return nn.Sequential(*(Block() for _ in range(6)))


def sharded(**options):
    def shard(model, mesh):
        for block in model:
            fully_shard(block, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    return shard


def syncing(*of_each_backward):
    """Sharded so that each backward syncs or not; the first step, of one backward, does."""

    def shard(model, mesh):
        model = sharded()(model, mesh)
        syncs = chain((True,), of_each_backward, repeat(True))
        model.register_forward_pre_hook(lambda module, args: module.set_requires_gradient_sync(next(syncs)))
        return model

    return shard


def counted(ranks, settings):
    """Blocks at the peaks of forward and backward in a dry run."""
    made = shardwise.plan(
        stack,
        torch.empty(4, WIDTH, device="meta"),
        ranks=ranks,
        optimizer=None,
        loss=lambda out: out.float().sum(),
        **{"wrap": Block, **settings},
    ).memory
    workspaces = made.by_kind["workspaces"]
    return tuple((made.by_phase[phase] - workspaces) / BLOCK_BYTES for phase in ("forward", "backward"))


def planned(ranks, settings, **options):
    """The same by arithmetic."""
    recorder = TapeRecorder()
    replicas = settings.get("replicas", 1)
    with rehearsing(recorder), torch.device("meta"):
        mesh = dry_mesh(recorder, ranks // replicas, replicas)
        model = sharded_as(stack(), Settings(**{"wrap": Block, **settings}), mesh)
        found = shardwise.planned_memory(model, **options)
    return tuple(peak.total / BLOCK_BYTES for peak in (found.forward, found.backward))


@pytest.mark.parametrize(
    ("ranks", "settings", "forward", "backward"),
    [
        (2, {}, 5.0, 8.0),
        (8, {}, 2.75, 4.25),
        (2, {"reshard_after_forward": False}, 9.0, 10.0),
        (8, {"reshard_after_forward": False}, 6.75, 7.75),
        (8, {"reshard_after_forward": 2}, 6.75, 6.25),
        (2, {"offload": True}, 2.5, 3.0),
        (8, {"offload": True}, 2.125, 3.0),
        (8, {"replicas": 2}, 3.5, 5.5),
        (8, {"mp_policy": NARROW_ROWS}, 1.8125, 2.75),
        (8, {"mp_policy": WIDE_ROWS}, 1.8125, 3.75),
        (8, {"mp_policy": WIDE_ROWS, "offload": True}, 1.1875, 2.5),
        (8, {"recompute": True}, 2.75, 4.25),
        (8, {"api": "wrapper"}, 2.75, 4.25),
        (8, {"api": "wrapper", "reshard_after_forward": False}, 6.75, 7.75),
        (8, {"api": "wrapper", "replicas": 2}, 3.5, 5.5),
        (8, {"shard": sharded(exact=True)}, 2.75, 4.375),
    ],
)
def test_a_step_holds_what_is_planned(ranks, settings, forward, backward):
    assert planned(ranks, settings) == (forward, backward)
    assert counted(ranks, settings) == pytest.approx((forward, backward), abs=MOST_OFF)


@pytest.mark.parametrize(
    ("settings", "options", "backward"),
    [
        ({}, [{"holds_gradients": True}], 4.625),
        ({"mp_policy": WIDE_ROWS}, [{"holds_gradients": True}], 4.125),
        ({"shard": sharded(exact=True)}, [{"holds_gradients": True}], 4.75),
        (
            {"shard": syncing(False, False)},
            [{"syncs": False}, {"syncs": False, "holds_stash": True}],
            9.75,
        ),
        ({"shard": syncing(False, True)}, [{"syncs": False}, {"holds_stash": True}], 9.75),
    ],
)
def test_a_backward_that_adds_to_an_earlier_one_holds_what_is_planned(settings, options, backward):
    assert max(planned(8, settings, **each)[1] for each in options) == backward
    assert counted(8, {"micro_batches": 2, **settings})[1] == pytest.approx(backward, abs=MOST_OFF)
