"""The memory that a step needs is planned: counted here by the buffers that the engine allocates and frees."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import ConfigError, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from shardwise.comm.streams import SideStream, SideStreams
from shardwise.engine.buffers import ElasticBuffer
from shardwise.engine.unit.membership import units_of
from shardwise.planning import memory
from shardwise.testing import run_ranks
from shardwise.training_step.planned_memory import _unit_bytes

WIDTH = 8


def blocks():
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(5))
    )


class Counted:
    """Bytes of the elastic buffers that are allocated now, the most of them since ``restart``, and of rows ever."""

    def __init__(self):
        self.now = self.most = self.most_rows = 0

    def restart(self):
        self.most = self.now

    def install(self, monkeypatch):
        counted = self
        grow, shrink = ElasticBuffer.grow, ElasticBuffer.shrink

        def counted_grow(buffer):
            if not buffer.is_grown:
                counted.now += buffer.size_bytes
                counted.most = max(counted.most, counted.now)
                if buffer._holds == memory.ROWS:
                    counted.most_rows = max(counted.most_rows, buffer.size_bytes)
            grow(buffer)

        def counted_shrink(buffer):
            if buffer.is_grown:
                counted.now -= buffer.size_bytes
            shrink(buffer)

        monkeypatch.setattr(ElasticBuffer, "grow", counted_grow)
        monkeypatch.setattr(ElasticBuffer, "shrink", counted_shrink)


class RunsAhead(SideStreams):
    """Frees memory when a device's host would."""

    host_runs_ahead = True


CASES = {
    "freed after forward": {},
    "kept after forward": {"reshard_after_forward": False},
    "computed in bfloat16": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
    "reduced in float64": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)},
}
# They are wider than the full parameters.
HAVE_ROWS_OF_THEIR_OWN = ("computed in bfloat16", "reduced in float64")


def counted_and_planned(case, monkeypatch):
    counted = Counted()
    counted.install(monkeypatch)
    model = blocks()
    for block in model:
        fully_shard(block, **CASES[case])
    fully_shard(model, **CASES[case])
    root = units_of(model)[0].root
    root.streams = RunsAhead(*[SideStream()] * 3)
    # As NCCL's: otherwise rows do not lie in the memory of full parameters.
    root.top.mesh.shard.ordered_by_stream = True
    x = torch.ones(2, WIDTH)
    model(x).sum().backward()
    model.zero_grad()
    assert counted.now == 0
    counted.restart()
    output = model(x).float().sum()
    forward = counted.most
    counted.restart()
    output.backward()
    return forward, counted.most, counted.most_rows, planned_buffers(model)


def planned_buffers(model):
    """What the plan says of elastic buffers: not of shards, gradients and own rows that torch allocates."""
    sizes = [_unit_bytes(unit) for unit in dict.fromkeys(u for m in model.modules() for u in units_of(m))]
    root, *units = [
        replace(
            size,
            shards=0,
            gradients=0,
            own_row=0 if size.needs_cast else size.own_row,
            shard_gradients=0 if size.needs_cast else size.shard_gradients,
        )
        for size in sizes
    ]
    return memory.step_memory(root, units)


@pytest.mark.parametrize("case", CASES)
def test_the_plan_counts_the_buffers_that_a_step_allocates(case, monkeypatch):
    (result,) = run_ranks(counted_and_planned, 1, case, monkeypatch)
    forward, backward, rows, planned = result
    assert forward == planned.forward.total
    assert backward == planned.backward.total
    assert (rows > 0) == (case in HAVE_ROWS_OF_THEIR_OWN)


def plans():
    model = blocks()
    with pytest.raises(ConfigError, match="not sharded as a whole"):
        shardwise.planned_memory(model)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    planned = shardwise.planned_memory(model)
    shards = sum(param.to_local().nbytes for param in model.parameters())
    assert planned.idle >= shards
    assert planned.after_backward >= 2 * shards
    # The rows lie in the memory of the full parameters.
    assert memory.ROWS not in planned.backward.by_kind
    assert sum(planned.backward.by_kind.values()) == planned.backward.total
    stashed = shardwise.planned_memory(model, syncs=False).backward
    assert stashed.by_kind[memory.STASHED] > 0
    assert shardwise.planned_memory(model, holds_stash=True).backward.total >= stashed.total
    adding = shardwise.planned_memory(model, holds_gradients=True)
    assert adding.idle == planned.after_backward
    kept = blocks()
    for block in kept:
        fully_shard(block, reshard_after_forward=False)
    assert shardwise.planned_memory(fully_shard(kept)).forward.total > planned.forward.total
    wrapped = FullyShardedDataParallel(nn.Sequential(*map(FullyShardedDataParallel, blocks())))
    assert shardwise.planned_memory(wrapped).backward.total > 0
    outer = fully_shard(
        nn.Sequential(fully_shard(nn.Sequential(fully_shard(nn.Linear(2, 2)), nn.Linear(2, 2))))
    )
    with pytest.raises(ConfigError, match="other units inside"):
        shardwise.planned_memory(outer)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    assert shardwise.planned_memory(fully_shard(nn.Linear(4, 4), mesh=mesh)).forward.total > 0


def test_a_step_is_planned_for_both_apis_and_refused_for_nested_units():
    run_ranks(plans, 2)
