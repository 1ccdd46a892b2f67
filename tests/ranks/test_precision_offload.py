"""What a unit computes and reduces in, and where its shards live."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import ConfigError, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from shardwise.testing import run_ranks
from shardwise.testing.parity import (
    BF16,
    FP32,
    ONE_BATCH,
    Accumulation,
    Precision,
    differences,
    gather_histories,
    run_plain,
    run_sharded,
)
from shardwise.testing.workloads import WORKLOADS, seeded
from tests.ranks.models import Traffic, data, same, same_shard

EACH_OF_THREE = Accumulation(3)
LAST_OF_THREE = Accumulation(3, sync_each=False)

HALF = torch.float16
BRAIN = torch.bfloat16
SINGLE = torch.float32
DOUBLE = torch.float64


# --- parity in every combination of dtypes --------------------------------------------------------------------------


def parity(name, precisions, accumulations, offload=None):
    workload = WORKLOADS[name]
    cases = [(precision, accumulation) for precision in precisions for accumulation in accumulations]
    local = [
        run_sharded(
            workload,
            partial(
                fully_shard,
                mp_policy=MixedPrecisionPolicy(precision.param_dtype, precision.reduce_dtype),
                offload_policy=offload or OffloadPolicy(),
            ),
            accumulation=accumulation,
            steps=2,
        )
        for precision, accumulation in cases
    ]
    wrong = []
    for number, (case, history) in enumerate(zip(cases, gather_histories(local), strict=True)):
        if number % dist.get_world_size() != dist.get_rank():
            continue  # another rank judges it
        precision, accumulation = case
        expected = run_plain(
            workload, dist.get_world_size(), precision=precision, accumulation=accumulation, steps=2
        )
        found = differences(expected, history)
        wrong += [f"{precision.label}, {accumulation.label}: {found[0]}"] if found else []
    return wrong


COMBINATIONS = [
    Precision(param, reduce)
    for param in (None, BRAIN, SINGLE, DOUBLE)
    for reduce in (None, BRAIN, SINGLE, DOUBLE)
    if (param, reduce) != (None, None)
]


def test_every_pair_of_param_and_reduce_dtype_matches_the_oracle_bitwise():
    accumulations = (ONE_BATCH, EACH_OF_THREE, LAST_OF_THREE)
    assert run_ranks(parity, 2, "odd MLP", COMBINATIONS, accumulations, kind="gloo") == [[]] * 2


@pytest.mark.slow
def test_every_pair_of_dtypes_matches_the_oracle_with_ranks_as_threads():
    assert run_ranks(parity, 2, "odd MLP", COMBINATIONS, (ONE_BATCH, LAST_OF_THREE)) == [[]] * 2


# --- what is cast and what is not -----------------------------------------------------------------------------------


class Witness(nn.Module):
    """Notes the dtypes it is called with and computes in."""

    def __init__(self, width=4):
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.register_buffer("scale", torch.ones(width))
        self.register_buffer("count", torch.tensor([2**40 + 1]))
        self.seen = {}

    def forward(self, x, extra=None, *, mask=None):
        self.seen = {
            "x": x.dtype,
            "extra": [value.dtype for value in extra] if extra else None,
            "mask": None if mask is None else mask.dtype,
            "weight": self.lin.weight.dtype,
            "scale": self.scale.dtype,
            "count": self.count.dtype,
        }
        return self.lin(x.to(self.lin.weight.dtype)), {"ids": torch.arange(3), "x": x.double()}


def witness(policy, *args, **kwargs):
    model = fully_shard(seeded(Witness()), mp_policy=policy)
    out, side = model(data(0, dist.get_rank(), 2, 4), *args, **kwargs)
    out.float().sum().backward()
    assert model.lin.weight.grad.dtype == model.lin.weight.dtype == SINGLE
    assert int(model.count) == 2**40 + 1
    return model.seen, out.dtype, {key: value.dtype for key, value in side.items()}


def test_floating_inputs_are_cast_at_any_depth_and_integers_and_buffers_are_not():
    policy = MixedPrecisionPolicy(param_dtype=BRAIN)
    extra = [torch.zeros(2), torch.zeros(2, dtype=torch.long), torch.zeros(2, dtype=DOUBLE)]
    mask = torch.ones(2, dtype=torch.bool)
    for seen, out, side in run_ranks(witness, 2, policy, extra, mask=mask, kind="gloo"):
        assert seen == {
            "x": BRAIN,
            "extra": [BRAIN, torch.long, BRAIN],
            "mask": torch.bool,
            "weight": BRAIN,
            "scale": SINGLE,
            "count": torch.long,
        }
        assert out == BRAIN
        assert side == {"ids": torch.long, "x": DOUBLE}


def test_inputs_come_as_they_are_if_casting_them_is_off():
    policy = MixedPrecisionPolicy(param_dtype=BRAIN, cast_forward_inputs=False)
    for seen, out, _ in run_ranks(witness, 2, policy, [torch.zeros(2, dtype=HALF)], kind="gloo"):
        assert (seen["x"], seen["extra"], seen["weight"]) == (SINGLE, [HALF], BRAIN)
        assert out == BRAIN


def test_inputs_are_left_alone_without_a_param_dtype():
    policy = MixedPrecisionPolicy(reduce_dtype=BRAIN)
    for seen, out, _ in run_ranks(witness, 2, policy, [torch.zeros(2, dtype=HALF)], kind="gloo"):
        assert (seen["x"], seen["extra"], seen["weight"]) == (SINGLE, [HALF], SINGLE)
        assert out == SINGLE


@pytest.mark.parametrize("output", [HALF, DOUBLE])
def test_floating_outputs_are_cast_at_any_depth_and_integers_are_not(output):
    policy = MixedPrecisionPolicy(param_dtype=BRAIN, output_dtype=output)
    for _, out, side in run_ranks(witness, 2, policy, kind="gloo"):
        assert out == output
        assert side == {"ids": torch.long, "x": output}


def bytes_sent(policy):
    model = seeded(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)))
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    with Traffic() as traffic:
        loss = model(data(0, 0, 2, 8)).float().sum()
    gathered = [size for _, _, size in traffic.seen]
    with Traffic() as traffic:
        loss.backward()
    return gathered, [size for op, _, size in traffic.seen if op == "_reduce_scatter_base_"]


@pytest.mark.parametrize(
    ("policy", "gathered", "reduced"),
    [
        (MixedPrecisionPolicy(), 256, 256),
        (MixedPrecisionPolicy(BRAIN), 128, 128),
        (MixedPrecisionPolicy(BRAIN, SINGLE), 128, 256),
        (MixedPrecisionPolicy(None, HALF), 256, 128),
        (MixedPrecisionPolicy(DOUBLE, BRAIN), 512, 128),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else f"{value.param_dtype}-{value.reduce_dtype}",
)
def test_parameters_travel_in_the_param_dtype_and_gradients_in_the_reduce_dtype(policy, gathered, reduced):
    for gathers, reduces in run_ranks(bytes_sent, 2, policy, kind="gloo"):
        assert gathers == [gathered] * 2
        assert reduces == [reduced] * 2


class Widening(nn.Linear):
    """Casts by itself, as a unit without a policy has to."""

    def forward(self, x):
        return super().forward(x.to(self.weight.dtype))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_brain = nn.Linear(6, 6)
        self.in_single = Widening(6, 6)
        self.in_half = nn.Linear(6, 6)
        self.in_last = nn.Linear(6, 6)

    def forward(self, x):
        x = torch.tanh(self.in_brain(x))
        x = torch.tanh(self.in_single(x))
        x = torch.tanh(self.in_half(x))
        return self.in_last(x)


def nested_policies():
    """Units of different policies in one model, beside a plain one that casts by hand."""
    model, master = seeded(Nested()), seeded(Nested())
    fully_shard(model.in_brain, mp_policy=MixedPrecisionPolicy(BRAIN, SINGLE))
    fully_shard(model.in_single)
    fully_shard(model.in_half, mp_policy=MixedPrecisionPolicy(HALF, SINGLE, output_dtype=SINGLE))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=DOUBLE))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    plain_optim = torch.optim.SGD(master.parameters(), lr=0.1)

    def plain_loss(step, r):
        brain, single, half, last = (
            {name: value.detach().to(dtype).requires_grad_() for name, value in layer.named_parameters()}
            for layer, dtype in (
                (master.in_brain, BRAIN),
                (master.in_single, SINGLE),
                (master.in_half, HALF),
                (master.in_last, SINGLE),
            )
        )
        call = torch.nn.functional.linear
        x = data(step, r, 3, 6)
        x = torch.tanh(call(x.to(BRAIN), brain["weight"], brain["bias"]))
        x = torch.tanh(call(x.to(SINGLE), single["weight"], single["bias"]))
        x = torch.tanh(call(x.to(HALF), half["weight"], half["bias"]).to(SINGLE))
        loss = call(x, last["weight"], last["bias"]).to(DOUBLE).sum()
        grads = torch.autograd.grad(
            loss, [v for group in (brain, single, half, last) for v in group.values()]
        )
        return loss.detach(), [grad.to(SINGLE) for grad in grads]

    for step in range(4):
        loss = model(data(step, rank, 3, 6)).sum()
        loss.backward()
        everyone = [plain_loss(step, r) for r in range(world_size)]
        same(loss.detach(), everyone[rank][0], f"step {step}: loss")
        for index, param in enumerate(master.parameters()):
            param.grad = sum(grads[index] for _, grads in everyone) / world_size
        for (name, param), expected in zip(model.named_parameters(), master.parameters(), strict=True):
            same_shard(param.grad, expected.grad, f"step {step}: gradient of {name}")
        for each in (optim, plain_optim):
            each.step()
            each.zero_grad()


@pytest.mark.parametrize("kind", ["gloo", "threads"])
def test_units_of_different_policies_compose(kind):
    run_ranks(nested_policies, 2, kind=kind)


# --- bad policies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "output_dtype"])
@pytest.mark.parametrize("bad", [torch.int32, torch.bool, "bfloat16", 16, float, torch.complex64], ids=str)
def test_a_dtype_that_is_not_floating_point_is_refused(field, bad):
    with pytest.raises(ConfigError, match=f"MixedPrecisionPolicy.{field} is .*not a floating-point dtype"):
        MixedPrecisionPolicy(**{field: bad})


def policies_of_another_kind():
    layer = nn.Linear(4, 4)
    for bad in (torch.bfloat16, "bf16", CPUOffloadPolicy()):
        with pytest.raises(TypeError, match=r"is not a MixedPrecisionPolicy\n.*mp_policy of fully_shard"):
            fully_shard(layer, mp_policy=bad)
    for bad in (True, "cpu", MixedPrecisionPolicy()):
        with pytest.raises(TypeError, match=r"is not a OffloadPolicy\n.*offload_policy of fully_shard"):
            fully_shard(layer, offload_policy=bad)
    assert type(layer) is nn.Linear, "a refusal leaves the module as it was"
    assert type(layer.weight) is nn.Parameter


def test_a_policy_of_another_kind_is_refused():
    run_ranks(policies_of_another_kind, 2, kind="gloo")


def test_a_device_budget_is_taken_unit_by_unit_and_by_each_rank_for_itself():
    policy = CPUOffloadPolicy(device_budget_gb=1.0)
    quarter = 2**28 // 4  # with its gradient and two states: a quarter of a GiB
    for rank in (0, 1):
        assert [policy.keeps_on_device(rank, quarter) for _ in range(3)] == [True] * 3
        assert not policy.keeps_on_device(rank, 2 * quarter)
        assert policy.keeps_on_device(rank, quarter)
        assert not policy.keeps_on_device(rank, 1)
    assert not CPUOffloadPolicy().keeps_on_device(0, 1)
    for bad in (-1.0, float("nan"), "8"):
        with pytest.raises(ConfigError, match="device_budget_gb"):
            CPUOffloadPolicy(device_budget_gb=bad)


# --- shards on the host ---------------------------------------------------------------------------------------------

# On a CPU mesh host and device are the same memory: the policy changes nothing, not even the bits.


@pytest.mark.parametrize("pin_memory", [True, False])
def test_on_a_cpu_mesh_shards_on_the_host_train_as_always(pin_memory):
    accumulations = (ONE_BATCH, EACH_OF_THREE, LAST_OF_THREE)
    offload = CPUOffloadPolicy(pin_memory=pin_memory)
    for name in ("tied transformer", "adapters"):
        assert run_ranks(parity, 2, name, (FP32, BF16), accumulations, offload, kind="gloo") == [[]] * 2


def shards_of_an_offloaded_model():
    model = fully_shard(seeded(nn.Linear(5, 3)), offload_policy=CPUOffloadPolicy())
    model(data(0, dist.get_rank(), 2, 5)).sum().backward()
    for param in model.parameters():
        assert param.device.type == param.grad.device.type == "cpu"
        assert not param.to_local().is_pinned()


def test_on_a_cpu_mesh_nothing_is_pinned():
    run_ranks(shards_of_an_offloaded_model, 2, kind="gloo")
