"""Methods that count as a forward, and roots that share their lanes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import ConfigError, fully_shard, register_fsdp_forward_method, share_comm_ctx
from shardwise.testing import run_ranks
from shardwise.trace import record


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 4)
        self.decoder = nn.Linear(4, 6)

    def encode(self, x, *, scale=1.0):
        return torch.relu(self.encoder(x)) * scale

    def decode(self, z):
        return self.decoder(z)

    def forward(self, x):
        return self.decode(self.encode(x))


def seeded():
    torch.manual_seed(3)
    return Autoencoder()


def trained_through_methods():
    """A VAE's way: encode and decode are called apart, never the module itself."""
    plain, model = seeded(), seeded()
    fully_shard(model)
    for name in ("encode", "decode"):
        register_fsdp_forward_method(model, name)
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(3):
        batches = torch.randn(world, 2, 6, generator=torch.Generator().manual_seed(step))
        total = None
        for batch in batches:
            plain.zero_grad()
            plain.decode(plain.encode(batch, scale=2.0)).square().sum().backward()
            gradients = [param.grad.clone() for param in plain.parameters()]
            total = gradients if total is None else [a + b for a, b in zip(total, gradients, strict=True)]
        for param, gradient in zip(plain.parameters(), total, strict=True):
            param.grad = gradient / world
        with record(model) as recorder:
            latent = model.encode(batches[rank], scale=2.0)
            assert "unshard" in [event.kind for event in recorder.events]
            model.decode(latent).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        optimizers[1].zero_grad()
        for expected, param in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(param.full_tensor(), expected)


def test_registered_methods_train_like_a_forward():
    run_ranks(trained_through_methods, 2, kind="gloo")


def unregistered_method_fails():
    model = seeded()
    fully_shard(model)
    with pytest.raises(Exception, match="DTensor"):
        model.encode(torch.ones(2, 6))


def test_a_method_that_is_not_registered_sees_shards():
    run_ranks(unregistered_method_fails, 2, kind="gloo")


def test_a_module_that_is_not_sharded_is_left_alone():
    model = seeded()
    register_fsdp_forward_method(model, "encode")
    assert "encode" not in model.__dict__


def missing_method():
    model = seeded()
    fully_shard(model)
    with pytest.raises(ConfigError, match="no method 'embed'"):
        register_fsdp_forward_method(model, "embed")


def test_a_method_that_does_not_exist_is_refused():
    run_ranks(missing_method, 1)


def chunks_share_side_streams():
    """Two chunks of a pipeline: roots of their own, one set of lanes, right gradients."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    chunks = copy.deepcopy(plain)
    first, second = fully_shard(chunks[0]), fully_shard(chunks[1])
    share_comm_ctx([first, second])
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = torch.randn(world, 3, 4, generator=torch.Generator().manual_seed(1))
    sum(plain(batch).square().sum() for batch in batches).backward()
    second(first(batches[rank])).square().sum().backward()
    streams = [chunk._shardwise_units[0].root.streams for chunk in (first, second)]
    for expected, param in zip(plain.parameters(), chunks.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad / world)
    return streams[0] is streams[1]


def test_roots_that_share_side_streams_train_right():
    assert all(run_ranks(chunks_share_side_streams, 2, kind="gloo"))


def test_only_sharded_modules_share_side_streams():
    with pytest.raises(TypeError, match="not sharded"):
        share_comm_ctx([nn.Linear(2, 2)])
