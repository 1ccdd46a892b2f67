"""Tensor subclasses decide what is gathered and how it is rebuilt."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
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
            aten.split.Tensor,
            aten.new_zeros.default,
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
    [(Misshapen, 8, "returned shape"), (Quantised, 7, "evenly along dim 0.*3 rows")],
    ids=["another shape", "uneven rows"],
)
def test_a_subclass_that_cannot_work_is_refused_and_the_model_unharmed(subclass, width, words):
    run_ranks(refused, 2, subclass, width, words, kind="gloo")


class Padded(Quantised):
    """Sends as many rows from every rank, however uneven the parameter is."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        rows = -(-outer_size[0] // mesh.size())
        padded = torch.zeros(rows, *self.data_.shape[1:])
        padded[: self.data_.shape[0]] = self.data_
        return (padded,), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (padded,) = outputs
        if out is not None:
            out.copy_(padded[: out.shape[0]])
            return None
        full = padded.clone()
        return full, (full,)


def uneven_rows(height, hybrid):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")) if hybrid else None
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, height), nn.Linear(height, 3))
    model = copy.deepcopy(plain)
    for layer in model:
        layer.weight = nn.Parameter(Padded(layer.weight.detach().clone()))
        layer.weight.tag = "a user's"
    fully_shard(model, mesh=mesh)
    assert [layer.weight.tag for layer in model] == ["a user's"] * 2
    # The full weight is not kept alive by the sharded one.
    assert not hasattr(model[0].weight, "data_")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    model.unshard()
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.detach(), expected.detach(), msg=name)


@pytest.mark.parametrize(("height", "hybrid"), [(7, False), (1, False), (5, True)])
def test_a_subclass_may_pad_uneven_rows_itself(height, hybrid):
    run_ranks(uneven_rows, 2, height, hybrid, kind="gloo")


class Packed(torch.Tensor):
    """Two elements a byte and a scale a block, as NF4 has it: no narrow, no clone, no views, never quantized twice."""

    BLOCK = 4

    @staticmethod
    def __new__(cls, codes, scales, shape):
        assert codes.storage_offset() == scales.storage_offset() == 0
        return torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=scales.dtype, device=scales.device, requires_grad=False
        )

    def __init__(self, codes, scales, shape):
        self.codes, self.scales = codes, scales

    def __repr__(self):
        return f"Packed({tuple(self.shape)})"

    @classmethod
    def of(cls, weight):
        blocks = weight.reshape(-1, cls.BLOCK)
        scales = blocks.abs().amax(dim=1) / 7
        nibbles = (blocks / scales[:, None]).round().add(8).to(torch.uint8).reshape(-1)
        return cls(nibbles[::2] * 16 + nibbles[1::2], scales, weight.shape)

    def unpacked(self):
        nibbles = torch.stack([self.codes // 16, self.codes % 16], dim=1).reshape(-1, self.BLOCK).float() - 8
        return (nibbles * self.scales[:, None]).reshape(self.shape)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            x, weight, *bias = args
            return func(x, weight.unpacked(), *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        self, kwargs = args[0], kwargs or {}
        if func is aten.detach.default:
            return cls(self.codes, self.scales, self.shape)
        if func is aten.split.Tensor:
            parts = self.shape[0] // args[1]
            assert self.shape[0] % args[1] == 0
            return [
                cls(codes.clone(), scales.clone(), (args[1], *self.shape[1:]))
                for codes, scales in zip(self.codes.chunk(parts), self.scales.chunk(parts), strict=True)
            ]
        if func in (aten.new_zeros.default, aten.empty_like.default):
            shape = args[1] if func is aten.new_zeros.default else self.shape
            numel, device = torch.Size(shape).numel(), kwargs.get("device") or self.device
            codes = torch.zeros(numel // 2, dtype=torch.uint8, device=device)
            return cls(codes, torch.zeros(numel // cls.BLOCK, device=device), shape)
        if func is aten.slice.Tensor:
            assert args[1:3] == (0, 0), "only all rows"
            assert args[3] == self.shape[0], "only all rows"
            return cls(self.codes, self.scales, self.shape)
        if func is aten.copy_.default:
            self.codes.copy_(args[1].codes)
            self.scales.copy_(args[1].scales)
            return self
        raise NotImplementedError(f"{func} of packed weights")

    def fsdp_pre_all_gather(self, mesh):
        return (self.codes, self.scales), [self.shape, mesh.get_group().size()]

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        codes, scales = outputs
        # Each metadata is used once.
        metadata[0] = torch.Size((metadata[0][0] * metadata[1], *metadata[0][1:]))
        if out is not None:
            assert out.codes.untyped_storage().data_ptr() == codes.untyped_storage().data_ptr()
            return None
        return Packed(codes, scales, metadata[0]), outputs


def packed_model():
    """Packed weights, frozen, beside adapters that train."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"base": nn.Linear(8, 8), "adapter": nn.Linear(8, 8)})
    model["base"].weight = nn.Parameter(Packed.of(model["base"].weight.detach()), requires_grad=False)
    return model


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = packed_model()

    def forward(self, x):
        return self.parts["base"](x) + self.parts["adapter"](x)


def packed_weights(how):
    plain, model = Adapted(), Adapted()
    packed = model.parts["base"].weight
    expected = packed.unpacked()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")) if how == "hybrid" else None
    if how == "meta":
        empty = aten.empty_like.default
        on_meta = Packed.__torch_dispatch__(empty, (), (packed,), {"device": torch.device("meta")})
        model.parts["base"].weight = nn.Parameter(on_meta, requires_grad=False)
        model.parts["base"].bias = nn.Parameter(model.parts["base"].bias.to("meta"))
        model.parts["adapter"].to("meta")
    fully_shard(model, mesh=mesh)
    if how == "meta":
        model.to_empty(device="cpu")
        rank = dist.get_rank()
        with torch.no_grad():
            for param, value in zip(model.parameters(), plain.parameters(), strict=True):
                param._local_tensor.copy_(value.detach().chunk(2)[rank])
    assert isinstance(model.parts["base"].weight._local_tensor, Packed)
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (plain, model)
    ]
    for step in range(3):
        rows = torch.randn(2 * world, 8, generator=torch.Generator().manual_seed(step))
        plain(rows).square().mean().backward()
        model(rows[2 * rank : 2 * rank + 2].clone()).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    model.unshard()
    assert torch.equal(model.parts["base"].weight.unpacked(), expected)
    torch.testing.assert_close(model.parts["adapter"].weight.detach(), plain.parts["adapter"].weight.detach())


@pytest.mark.parametrize("how", ["plain", "hybrid", "meta"])
def test_packed_weights_are_sharded_as_they_are_packed(how):
    run_ranks(packed_weights, 2, how, kind="gloo")


def defined_on_tensors():
    """Without a subclass: methods set on the shards themselves, after they have got their memory."""
    sent = []

    def pre(self, mesh, outer_size, outer_stride, module, mp_policy):
        sent.append(tuple(outer_size))
        return (self.to(torch.bfloat16),), None

    def post(self, outputs, metadata, param_dtype, *, out=None):
        if out is not None:
            out.copy_(outputs[0])
            return None
        full = outputs[0].to(param_dtype)
        return full, (full,)

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    fully_shard(model[0])
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    for param in model.parameters():
        nn.init.normal_(param)
    for layer in model:
        local = layer.weight._local_tensor
        local.fsdp_pre_all_gather = pre.__get__(local)
        local.fsdp_post_all_gather = post.__get__(local)
    full = [param.full_tensor().detach() for param in model.parameters()]
    x = torch.randn(3, 8)
    rounded = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    with torch.no_grad():
        for param, value in zip(rounded.parameters(), full, strict=True):
            param.copy_(value.to(torch.bfloat16) if value.dim() == 2 else value)
    out = model(x)
    assert torch.equal(out, rounded(x))
    out.sum().backward()
    rounded(x).sum().backward()
    for param, expected in zip(model.parameters(), rounded.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad)
    return set(sent)


def test_the_methods_may_be_set_on_shards_before_the_first_forward():
    assert run_ranks(defined_on_tensors, 2, kind="gloo") == [{(8, 8), (4, 8)}] * 2


class Viewless(Padded):
    """Trains as a subclass that nobody can take a view of."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        assert func not in (aten.view.default, aten.clone.default), func
        return super().__torch_dispatch__(func, types, args, kwargs)

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (gathered,) = outputs
        if out is not None:
            assert out.data_.data_ptr() == gathered.data_ptr()
            return None
        return Viewless(gathered), outputs


def viewless_layers():
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model = copy.deepcopy(plain)
    for layer in model:
        layer.weight = nn.Parameter(Viewless(layer.weight.detach().clone()))
        fully_shard(layer)
    fully_shard(model)
    # Prefetching in backward asks which layers' parameters it will reach.
    for layers in (plain, model):
        layers(torch.ones(2, 4)).square().sum().backward()
    for layer, expected in zip(model, plain, strict=True):
        parts = [torch.empty(2, 4) for _ in range(2)]
        dist.all_gather(parts, layer.weight.grad._local_tensor)
        torch.testing.assert_close(torch.cat(parts), expected.weight.grad)


def test_a_subclass_without_views_trains():
    run_ranks(viewless_layers, 2, kind="gloo")


class Scaled(nn.Parameter):
    """A parameter that says how its numbers are scaled, as libraries for quantized weights do."""

    scale: float

    def __new__(cls, data, scale):
        scaled = torch.Tensor._make_subclass(cls, data, False)
        scaled.scale = scale
        return scaled


class ScaledLinear(nn.Module):
    """Makes its weight a scaled one again in every forward, because a gathered weight is a plain parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Scaled(torch.randn(4, 4), 0.5)
        self.adapter = nn.Linear(4, 4)

    def forward(self, x):
        if not isinstance(self.weight, Scaled):
            self.weight = Scaled(self.weight, 0.5)
        return x @ (self.weight * self.weight.scale) + self.adapter(x)


def scaled_layers(keeps):
    torch.manual_seed(0)
    plain = nn.Sequential(ScaledLinear(), ScaledLinear())
    model = copy.deepcopy(plain)
    for layer in model:
        fully_shard(layer, reshard_after_forward=not keeps)
    fully_shard(model)
    assert not hasattr(model[0].weight, "scale"), "a shard is not scaled"
    for _ in range(2):
        for layers in (plain, model):
            layers(torch.ones(2, 4)).square().sum().backward()
    for layer, expected in zip(model, plain, strict=True):
        assert torch.equal(layer.weight.full_tensor(), expected.weight)
        assert torch.equal(layer.adapter.weight.grad.full_tensor(), expected.adapter.weight.grad)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_module_may_put_its_frozen_gathered_weight_into_another_class(keeps):
    run_ranks(scaled_layers, 2, keeps, kind="gloo")


def trained_weight_in_another_class():
    layer = nn.Linear(4, 4)
    fully_shard(layer)
    layer.unshard()
    layer.weight = nn.Parameter(layer.weight.detach())
    with pytest.raises(shardwise.StateError, match="'weight' was replaced by a plain tensor"):
        layer.reshard()


def test_a_trained_weight_in_another_object_is_refused_as_its_gradient_would_be_lost():
    run_ranks(trained_weight_in_another_class, 2, kind="threads")
