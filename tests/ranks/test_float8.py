"""Torchao's float8 training, whose weights decide what is sent: fp8 values and one scale for all ranks.

Runs where torchao is installed; it is not among the development dependencies.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import Traffic, data
from tests.ranks.subject import beyond_torch, fully_shard

pytest.importorskip("torchao.float8", reason="torchao is not installed here")
pytestmark = [
    beyond_torch,  # whose gathers of fp8 values gloo refuses
    pytest.mark.filterwarnings("ignore"),
]

STEPS = 5


def float8_model(*, gathers_float8):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    layers = [
        nn.Linear(32, 64, bias=False),
        nn.ReLU(),
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.Linear(32, 16, bias=False),
    ]
    model = seeded(nn.Sequential(*layers))
    # Emulated: the same roundings as on a GPU that has fp8, in fp32 arithmetic.
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers_float8, emulate=True)
    convert_to_float8_training(model, config=config)
    return model


def train(model, shard, *, precomputes=False, steps=STEPS):
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    for layer in (model[0], model[2], model[4]):
        shard(layer)
    shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        loss = model(data(step, dist.get_rank(), 16, 32)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optim.step()
        optim.zero_grad()
        if precomputes:
            precompute_float8_dynamic_scale_for_fsdp(model)
    return losses


def weights_of(model):
    """Each rank's shards as they are stored, whatever wraps them."""
    locals_ = [param.detach().to_local() for param in model.parameters()]
    return [getattr(local, "_tensor", local) for local in locals_]


def all_ways_agree(reshard):
    """Casting before the gather, by the largest value of all ranks, is casting the whole weight after it."""
    shard = partial(fully_shard, reshard_after_forward=reshard)
    peer = float8_model(gathers_float8=False)
    wanted = train(peer, torch_fully_shard)
    for gathers_float8, precomputes in [(False, False), (True, False), (True, True)]:
        what = f"gathers_float8={gathers_float8}, precomputes={precomputes}"
        model = float8_model(gathers_float8=gathers_float8)
        assert train(model, shard, precomputes=precomputes) == wanted, what
        for shard_of_ours, shard_of_peer in zip(weights_of(model), weights_of(peer), strict=True):
            assert torch.equal(shard_of_ours, shard_of_peer), what


@pytest.mark.parametrize("reshard", [True, False])
def test_float8_gathers_train_to_the_same_bits_as_casts_after_the_gather(reshard):
    run_ranks(all_ways_agree, 2, reshard, kind="gloo")


def bytes_gathered(gathers_float8):
    model = float8_model(gathers_float8=gathers_float8)
    train(model, fully_shard, steps=1)
    with Traffic() as traffic:
        model[4](torch.ones(16, 32))
    (gathered,) = [num_bytes for op, _, num_bytes in traffic.seen if op == "_allgather_base_"]
    return gathered


def test_a_float8_gather_sends_a_quarter_of_the_bytes():
    weight_bytes = 32 * 16 * 4
    assert run_ranks(bytes_gathered, 2, False, kind="gloo") == [weight_bytes] * 2
    for gathered in run_ranks(bytes_gathered, 2, True, kind="gloo"):
        assert weight_bytes // 4 <= gathered <= weight_bytes // 4 + 2 * 16
