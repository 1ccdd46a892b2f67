"""A rehearsed step is the real step: the engine's events in the same order as in ranks that compute."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from shardwise import MixedPrecisionPolicy, trace
from shardwise.forecast.rehearsal import META, Job, rehearse, sharded_as
from shardwise.forecast.settings import Settings
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import Layers, TwoLayers
from tests.ranks.subject import beyond_torch

pytestmark = beyond_torch

WORLD = 4
MODES = {
    "freed after forward": {},
    "kept after forward": {"reshard_after_forward": False},
    "kept in part": {"reshard_after_forward": 2},
    "recomputed": {"recompute": True},
    "replicated": {"replicas": 2},
    "replicated, two micro-batches": {"replicas": 2, "micro_batches": 2},
    "prefetched in forward": {"forward_prefetch": 1},
    "large ones alone": {"alone": ("first", "last")},
    "units of several blocks": {"group_bytes": 2**30, "forward_prefetch": 1},
    "mixed precision": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "the wrapper": {"api": "wrapper"},
    "the wrapper, kept": {"api": "wrapper", "reshard_after_forward": False},
}


def settings_of(mode):
    given = dict(MODES[mode])
    return Settings(optimizer=None, **{"wrap": TwoLayers, **given})


def real_events(mode):
    settings = settings_of(mode)
    shape = (2, WORLD // 2) if settings.replicas > 1 else (WORLD,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = sharded_as(seeded(Layers()), settings, mesh)
    for _ in range(2):
        with trace.record(model) as recorder:
            for number in range(settings.micro_batches):
                if settings.replicas > 1:
                    model.set_requires_all_reduce(number == settings.micro_batches - 1)
                model(torch.ones(2, 6)).sum().backward()
        model.zero_grad()
    return recorder.of()


def all_real_events(modes):
    return {mode: real_events(mode) for mode in modes}


def test_a_rehearsal_has_the_events_of_real_ranks_in_their_order():
    real = run_ranks(all_real_events, WORLD, list(MODES))[0]
    for mode in MODES:
        job = Job(Layers, lambda: ((torch.empty(2, 6, device=META),), {}))
        rehearsed = rehearse(job, settings_of(mode), WORLD)
        assert rehearsed.trace == real[mode], mode


@pytest.mark.parametrize("ranks", [1, 3])
def test_any_number_of_ranks_can_be_rehearsed(ranks):
    job = Job(Layers, lambda: ((torch.empty(2, 6, device=META),), {}))
    found = rehearse(job, settings_of("freed after forward"), ranks)
    assert found.units == ["", "layers.0", "layers.1", "layers.2"]
