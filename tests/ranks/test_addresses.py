"""Whole parameters begin on a cache line, as torch's own tensors do, however they are sharded.

Matrix kernels look at the addresses they are given and sum in another order if a matrix starts in the middle of a
vector. With equal shapes and threads, alignment is what could still make a sharded model compute other bits.
"""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from shardwise import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from shardwise.zero import ZeroRedundancyOptimizer
from tests.ranks.tables import cases_of, run_cases

pytestmark = pytest.mark.arithmetic

CACHE_LINE_BYTES = 64
BRAIN, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
# Hardly one of them fills a cache line; a batch of one goes through kernels that look at every address.
SIZES = (1, 5, 3, 17, 33, 1, 63, 129, 40, 7)


def odd_layers(dtype=SINGLE):
    return seeded(nn.Sequential(*(nn.Linear(*both, dtype=dtype) for both in pairwise(SIZES))))


def offsets_in_forward(model, dtype=SINGLE):
    """How far from a cache line parameters begin while their layer computes."""
    seen = []

    def look(module, args, output):
        seen.extend(param.data_ptr() % CACHE_LINE_BYTES for param in module.parameters())

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(look)
    model(torch.ones(1, SIZES[0], dtype=dtype))
    assert len(seen) == 2 * (len(SIZES) - 1)
    return seen


def sharded(dtype, compute):
    model = odd_layers(dtype)
    policy = MixedPrecisionPolicy(param_dtype=compute)
    for layers in (model[:3], model[3:]):
        fully_shard(list(layers), mp_policy=policy)
    return offsets_in_forward(fully_shard(model, mp_policy=policy), dtype)


def wrapped(originals, dtype, compute):
    model = FullyShardedDataParallel(
        odd_layers(dtype), use_orig_params=originals, mixed_precision=MixedPrecision(param_dtype=compute)
    )
    return offsets_in_forward(model, dtype)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_units_begin_every_parameter_on_a_cache_line(world_size):
    dtypes = {"dtype": [SINGLE, DOUBLE], "compute": [None, BRAIN]}
    for fn, cases in (
        (sharded, cases_of(**dtypes)),
        (wrapped, cases_of(originals=[False, True], **dtypes)),
    ):
        for of_rank in run_cases(fn, world_size, cases):
            for case, offsets in zip(cases, of_rank, strict=True):
                assert not any(offsets), (fn.__name__, case, offsets)


def views_of_one_buffer(balanced):
    model = odd_layers()
    plain = copy.deepcopy(model)
    ZeroRedundancyOptimizer(
        model.parameters(), optim.SGD, lr=0.1, parameters_as_bucket_view=True, balanced=balanced
    )
    batch = torch.randn(1, SIZES[0], generator=torch.Generator().manual_seed(dist.get_rank()))
    outputs = [run_layers(layers, batch) for layers in (model, plain)]
    return offsets_in_forward(model), all(map(torch.equal, *outputs))


def run_layers(layers, x):
    """What each layer makes of an input of its own: a last bit does not get lost on the way."""
    outputs = []
    for layer in layers:
        x = torch.sin(torch.arange(layer.in_features) + x.sum()).reshape(1, -1)
        outputs.append(layer(x))
    return outputs


@pytest.mark.parametrize("balanced", [False, True])
def test_parameters_that_share_a_buffer_compute_what_they_did_by_themselves(balanced):
    for offsets, is_same in run_ranks(views_of_one_buffer, 3, balanced):
        assert not any(offsets), offsets
        assert is_same
