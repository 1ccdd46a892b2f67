"""Tensor subclasses decide what is gathered and how it is rebuilt."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils import _pytree as pytree

import shardwise
from shardwise import MixedPrecisionPolicy, fully_shard
from shardwise.testing import run_ranks

aten = torch.ops.aten


class Quantised(torch.Tensor):
    """Full precision at rest; on the wire one byte an element and one scale a row."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device=data.device)

    def __init__(self, data):
        self.data_ = data

    def __repr__(self):
        return f"Quantised({self.data_})"

    def __tensor_flatten__(self):
        return ["data_"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, metadata, outer_size, outer_stride):
        return cls(inner["data_"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        kept = func in (
            aten.detach.default,
            aten.clone.default,
            aten.slice.Tensor,
            aten.copy_.default,
            aten._to_copy.default,
            aten.alias.default,
            aten.view.default,
        )
        args, kwargs = pytree.tree_map_only(cls, lambda t: t.data_, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, cls, out) if kept else out

    def fsdp_pre_all_gather(self, mesh):
        scale = self.data_.abs().amax(dim=1, keepdim=True).clamp(min=1e-8) / 127
        return ((self.data_ / scale).round().to(torch.int8), scale), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        quantised, scale = outputs
        if out is not None:
            torch.mul(quantised.to(param_dtype), scale.to(param_dtype), out=out)
            return None
        full = quantised.to(param_dtype) * scale.to(param_dtype)
        return full, (full,)


class Misshapen(Quantised):
    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        full = outputs[0].to(param_dtype).reshape(-1)
        return full, (full,)


class Detailed(Quantised):
    """Asks for everything a subclass may be told."""

    seen = None

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        Detailed.seen = (mesh.size(), outer_size, outer_stride, type(module), mp_policy)
        return super().fsdp_pre_all_gather(mesh)


def model_of(subclass, width=8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(subclass(layer.weight.detach().clone()))
    return model


def plain_twin():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def dequantised(weight):
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-8) / 127
    return (weight / scale).round().to(torch.int8).to(weight.dtype) * scale


def trains_on_what_the_subclass_rebuilds(reshard):
    """Compute sees the dequantised weights, the optimizer the full ones: followed step by step in plain torch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    plain, model = plain_twin(), model_of(Quantised)
    fully_shard(model[0], reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    assert isinstance(model[0].weight.to_local(), Quantised)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        batches = torch.randn(world, 3, 8, generator=torch.Generator().manual_seed(step))
        computed = copy.deepcopy(plain)
        with torch.no_grad():
            for layer in (computed[0], computed[2]):
                layer.weight.copy_(dequantised(layer.weight))
        total = None
        for batch in batches:
            computed.zero_grad()
            computed(batch).square().sum().backward()
            gradients = [p.grad.clone() for p in computed.parameters()]
            total = gradients if total is None else [a + b for a, b in zip(total, gradients, strict=True)]
        for param, gradient in zip(plain.parameters(), total, strict=True):
            param.grad = gradient / world
        plain_optimizer.step()
        with CommDebugMode() as mode:
            loss = model(batches[rank]).square().sum()
        counts = {str(op): n for op, n in mode.get_comm_counts().items()}
        assert counts == {"c10d._allgather_base_": 2}, counts
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for (name, expected), (_, param) in zip(
            plain.named_parameters(), model.named_parameters(), strict=True
        ):
            local = param.full_tensor() if not isinstance(param.to_local(), Quantised) else whole(param)
            assert torch.equal(local, expected), f"step {step}, {name}"


def whole(param):
    parts = [torch.empty_like(param.to_local().data_) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, param.to_local().data_.detach().contiguous())
    return torch.cat(parts)


@pytest.mark.parametrize("reshard", [True, False])
def test_a_subclass_that_quantises_trains_on_what_it_rebuilds(reshard):
    run_ranks(trains_on_what_the_subclass_rebuilds, 2, reshard, kind="gloo")


def frees_what_it_rebuilt():
    model = model_of(Quantised)
    fully_shard(model)
    model.unshard()
    weight = model[0].weight
    assert weight.untyped_storage().nbytes() == weight.numel() * 4
    assert torch.equal(weight.detach(), dequantised(plain_twin()[0].weight.detach()))
    model.reshard()
    assert weight.untyped_storage().nbytes() == 0


def test_resharding_frees_the_rebuilt_parameter():
    run_ranks(frees_what_it_rebuilt, 2, kind="gloo")


def details():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = model_of(Detailed)
    fully_shard(model, mp_policy=policy)
    model.unshard()
    assert model[0].weight.dtype == torch.bfloat16
    return Detailed.seen == (2, torch.Size((4, 8)), (8, 1), nn.Linear, policy)


def test_a_subclass_may_ask_for_mesh_sizes_module_and_policy():
    assert all(run_ranks(details, 2, kind="gloo"))


def refused(subclass, width, words):
    model = model_of(subclass, width)
    with pytest.raises(shardwise.ConfigError, match=words):
        fully_shard(model)
    assert type(model) is nn.Sequential
    assert isinstance(model[0].weight, subclass)


@pytest.mark.parametrize(
    ("subclass", "width", "words"),
    [(Misshapen, 8, "returned shape"), (Quantised, 7, "evenly along dim 0")],
    ids=["another shape", "uneven rows"],
)
def test_a_subclass_that_cannot_work_is_refused_and_the_model_unharmed(subclass, width, words):
    run_ranks(refused, 2, subclass, width, words, kind="gloo")
