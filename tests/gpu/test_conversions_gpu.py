"""What `.to()` and its like do to a model that is sharded on GPUs: the optimizer it had goes on with it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwise import fully_shard
from shardwise.testing.workloads import seeded
from tests.ranks.models import Layers, average_gradients, data, same_shard, same_shards, sgd
from tests.ranks.tables import cases_of, run_cases

pytestmark = pytest.mark.gpu

CONVERSIONS = {
    "to its device": (lambda model: model.to("cuda"), torch.float32),
    "cuda": (lambda model: model.cuda(), torch.float32),
    "to the host and back": (lambda model: model.cpu().cuda(), torch.float32),
    "double": (lambda model: model.double(), torch.float64),
    "half": (lambda model: model.half(), torch.float16),
    "to a device and a dtype": (
        lambda model: model.to("cuda", torch.bfloat16, non_blocking=True),
        torch.bfloat16,
    ),
}


def loss_of(model, step, rank, dtype):
    return model(data(step, rank, 2, 6).to("cuda", dtype)).square().mean()


def converted(how):
    convert, dtype = CONVERSIONS[how]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cuda", (world_size,))
    model, plain = seeded(Layers()).cuda(), seeded(Layers()).cuda()
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh)
    objects = list(model.parameters())
    optims = [sgd(each.parameters()) for each in (model, plain)]
    current = torch.float32
    for step in range(4):
        if step == 1:
            for each in (model, plain):
                convert(each)
            current = dtype
        loss_of(model, step, rank, current).backward()
        average_gradients(plain, lambda r: loss_of(plain, step, r, current), world_size)  # noqa: B023
        # A GPU's kernels may add up a whole and a shard in another order.
        tolerance = {2: 1e-2, 4: 1e-6, 8: 1e-12}[current.itemsize]
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert param.grad.device.type == "cuda"
            same_shard(param.grad, expected.grad, f"step {step}: gradient of {name}", 100 * tolerance)
        for each in optims:
            each.step()
            each.zero_grad()
        same_shards(model, plain, f"step {step}: ", tolerance)
    for param, was in zip(model.parameters(), objects, strict=True):
        assert param is was, "the optimizer holds another parameter"
        assert param.dtype == dtype
        assert param.to_local().device.type == "cuda"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_converted_model_trains_on_with_the_optimizer_it_had(world_size):
    run_cases(converted, world_size, cases_of(how=list(CONVERSIONS)), kind="nccl")
