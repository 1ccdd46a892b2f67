"""Steps predicted for a CPU: the host is the device, and does one thing after another."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import shardwise
from shardwise.forecast.device_files import load_device
from shardwise.forecast.prices import seconds_of_collective


def block():
    return nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64, bias=False))


def planned(device, **settings):
    build = lambda: nn.Sequential(*(block() for _ in range(3)))  # noqa: E731
    inputs = torch.empty(8, 64, device="meta")
    return shardwise.plan(build, inputs, ranks=2, device=device, wrap=nn.Linear, **settings)


def test_nothing_runs_beside_compute():
    bars = [bar for lane in planned("cpu-gloo").timeline.lanes if lane.name != "host" for bar in lane.bars]
    bars.sort(key=lambda bar: bar.start)
    assert {"forward", "backward", "all_gather", "reduce_scatter"} <= {bar.kind for bar in bars}
    assert all(one.end <= other.start + 1e-12 for one, other in pairwise(bars))


def test_all_communication_is_exposed():
    plan = planned("cpu-gloo", reshard_after_forward=True)
    links, num_bytes = load_device("cpu-gloo").links, 64 * 64 * 4
    gather, reduce = (
        seconds_of_collective(links, kind, num_bytes, 2, 2) for kind in ("all_gather", "reduce_scatter")
    )
    # Each layer is gathered twice and reduced once; the norms are the root's, which is not gathered again.
    assert plan.step.exposed >= 3 * (2 * gather + reduce)
    assert plan.seconds == pytest.approx(plan.step.host)


def test_a_cpu_does_not_fuse_norms():
    on_gpu = sum(entry.kind == "elementwise" for entry in ops(planned("h200")))
    assert sum(entry.kind == "elementwise" for entry in ops(planned("cpu-gloo"))) > on_gpu


def ops(plan):
    return [entry for entry in plan.rehearsal.tape if hasattr(entry, "flops")]
