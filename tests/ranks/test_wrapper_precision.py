"""Mixed precision, loss scaling and communication hooks of wrapped models."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedGradScaler,
    ShardingStrategy,
)
from shardwise.errors import ConfigError, StateError
from shardwise.testing import run_ranks
from shardwise.testing.parity import BF16, BF16_REDUCED_IN_BF16, Accumulation, History, differences, run_plain
from shardwise.testing.workloads import WORKLOADS, seeded
from tests.ranks.models import Layers, data
from tests.ranks.wrapped import ONE_AXIS, device, train, wrap

FSDP = FullyShardedDataParallel
LAST_OF_TWO = Accumulation(2, sync_each=False)


def parity(tolerance=0.0):
    rank, wrong = dist.get_rank(), []
    workload = WORKLOADS["conv net"]
    for (first, precision), (second, accumulation) in itertools.product(
        enumerate((BF16, BF16_REDUCED_IN_BF16)), enumerate((Accumulation(), LAST_OF_TWO))
    ):
        plain = run_plain(
            workload, 2, precision=precision, accumulation=accumulation, steps=2, device=device()
        )
        expected = History([[losses[rank]] for losses in plain.losses], plain.grads, plain.params)
        for third, strategy in enumerate(ONE_AXIS):
            # Any two of the three choices meet parameters that are shown by their names, and ones that are not.
            orig = (first + second + third) % 2 == 1
            model = workload.model()
            model = wrap(
                model,
                workload.units(model),
                sharding_strategy=strategy,
                use_orig_params=orig,
                mixed_precision=MixedPrecision(
                    precision.param_dtype, precision.reduce_dtype, cast_forward_inputs=True
                ),
            )
            found = differences(expected, train(model, workload, 2, accumulation), tolerance=tolerance)
            wrong += (
                [f"{precision.label} {accumulation.label} {strategy} {orig}: {found[0]}"] if found else []
            )
    return wrong


def test_mixed_precision_matches_the_oracle_bit_for_bit():
    assert run_ranks(parity, 2, kind="gloo") == [[]] * 2


class Probe(nn.Module):
    """Notes the dtypes it is given and computes in."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.seen = []

    def forward(self, x):
        y = self.lin(x.to(self.lin.weight.dtype))
        normed = self.norm(y)
        self.seen = [x.dtype, self.lin.weight.dtype, self.norm.weight.dtype, normed.dtype, self.scale.dtype]
        return normed * self.scale.to(normed.dtype)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Probe()
        self.outer = Probe()

    def forward(self, x):
        return self.outer(self.inner(x).float())


def dtypes():
    bf16, fp32 = torch.bfloat16, torch.float32
    for orig in (False, True):

        def built(**precision):
            options = {"use_orig_params": orig, "mixed_precision": MixedPrecision(**precision)}  # noqa: B023
            model = seeded(Two())
            model.inner, model.outer = FSDP(model.inner, **options), FSDP(model.outer, **options)
            return FSDP(model, **options)

        x = torch.randn(6, 4)
        model = built(param_dtype=bf16, buffer_dtype=torch.float16)
        output = model(x)
        # Inputs of the outermost are cast, those of others as they come; norms compute in full precision.
        assert model.inner.seen == [bf16, bf16, fp32, bf16, torch.float16]
        assert model.outer.seen == [fp32, bf16, fp32, bf16, torch.float16]
        output.sum().backward()
        held = [param for param in model.parameters() if param.numel()]
        assert all(param.dtype == fp32 and param.grad.dtype == fp32 for param in held)
        state = model.state_dict()
        assert state["inner.scale"].dtype == fp32
        assert state["inner.count"].dtype == torch.int64
        with FSDP.summon_full_params(model):
            assert model.inner.lin.weight.dtype == fp32
        model = built(param_dtype=bf16, cast_root_forward_inputs=False)
        model(x)
        assert model.inner.seen[0] == fp32
        model = built(param_dtype=bf16, cast_forward_inputs=True)
        model(x)
        assert model.outer.seen[0] == bf16
        model = built(param_dtype=bf16, reduce_dtype=bf16, keep_low_precision_grads=True)
        # Weighted: what a batch norm gives adds up to a constant, which has no gradient but rounding.
        (model(x) * torch.linspace(-1, 1, x.numel()).view_as(x)).sum().backward()
        held = [param for param in model.parameters() if param.numel()]
        assert all(param.dtype == fp32 and param.grad.dtype == bf16 for param in held)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        before = model.state_dict()
        optim.step()
        assert not torch.equal(model.state_dict()["outer.norm.bias"], before["outer.norm.bias"])
        model = built(param_dtype=bf16, buffer_dtype=bf16, _module_classes_to_ignore=())
        model(x)
        assert model.inner.seen[2] == bf16


def test_each_option_of_mixed_precision_does_what_it_says():
    run_ranks(dtypes, 2)


def scales():
    """One rank's infinity is everybody's: all skip the step and halve the scale together."""
    for orig, strategy in itertools.product((False, True), ONE_AXIS):
        model = FSDP(nn.Linear(6, 8, bias=False), use_orig_params=orig, sharding_strategy=strategy)
        where = device()
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        optim = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = ShardedGradScaler(where.type, init_scale=4.0, growth_interval=2)
        scales, moved = [], []
        for step in range(5):
            before = model.state_dict()["weight"]
            scaler.scale(model(torch.ones(1, 6, device=where)).sum()).backward()
            if step == 1 and dist.get_rank() == 1:
                (param,) = model.parameters()
                param.grad.view(-1)[-1] = float("inf")
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
            scales.append(scaler.get_scale())
            moved.append((before - model.state_dict()["weight"]).unique().tolist())
        assert scales == [4.0, 2.0, 2.0, 4.0, 4.0], scales
        assert moved == [[1.0], [0.0], [1.0], [1.0], [1.0]], moved


def test_an_infinity_on_one_rank_is_one_for_all():
    run_ranks(scales, 2, kind="gloo")


def average(state, gradients, own=None):
    state.append(gradients.numel())
    world = dist.get_world_size()
    if own is None:
        dist.all_reduce(gradients)
        gradients.div_(world)
        return
    total = gradients.clone()
    dist.all_reduce(total)
    own.copy_(total.view(world, -1)[dist.get_rank()] / world)


def hooked():
    for strategy, orig in itertools.product(ONE_AXIS, (False, True)):
        gradients = []
        for uses_hook in (False, True):
            model = seeded(Layers())
            model = wrap(model, model.layers, sharding_strategy=strategy, use_orig_params=orig)
            calls = []
            if uses_hook:
                model.register_comm_hook(calls, average)
                with pytest.raises(StateError, match="registered already"):
                    model.register_comm_hook(calls, average)
                with pytest.raises(StateError, match="inside another one"):
                    model.layers[0].register_comm_hook(calls, average)
            model(data(0, dist.get_rank(), 2, 6)).sum().backward()
            gradients.append([param.grad for param in model.parameters() if param.numel()])
            assert len(calls) == (4 if uses_hook else 0)
        for one, other in zip(*gradients, strict=True):
            assert torch.allclose(one, other)
    model = FSDP(nn.Linear(8, 8), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh())
    with pytest.raises(ConfigError, match="two stages"):
        model.register_comm_hook([], average)


def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))


def test_a_communication_hook_reduces_in_the_engines_place():
    run_ranks(hooked, 2, kind="gloo")
