"""What `.to()` and its like do to a sharded model, and the tools of a training loop that look at gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import (
    Layers,
    average_gradients,
    data,
    full,
    same,
    same_shard,
    same_shards,
    sgd,
)
from tests.ranks.subject import beyond_torch, fully_shard
from tests.ranks.tables import cases_of, run_cases

WIDTH = 5


def build():
    return Layers(num_layers=2, width=WIDTH)


def sharded():
    model = seeded(build())
    for unit in (*model.layers, model):
        fully_shard(unit)
    return model


def loss_of(model, step, rank, dtype=torch.float32):
    return model(data(step, rank, 2, WIDTH).to(dtype)).square().mean()


def step_both(models, optims, step, what, dtype=torch.float32):
    model, plain = models
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loss_of(model, step, rank, dtype).backward()
    average_gradients(plain, lambda r: loss_of(plain, step, r, dtype), world_size)
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        if step < 2 or dtype.itemsize > 2:
            same_shard(param.grad, expected.grad, f"{what}, step {step}: gradient of {name}")
    for each in optims:
        each.step()
        each.zero_grad()
    # torch's CPU kernels round the tail of a tensor in another way than the rest, and a shard ends elsewhere.
    tolerance = 1e-2 if dtype.itemsize == 2 else 0.0
    same_shards(model, plain, f"{what}, step {step}: ", tolerance)


# --- .to() and its like -----------------------------------------------------------------------------------------

CONVERSIONS = {
    "double": (lambda model: model.double(), torch.float64),
    "half": (lambda model: model.half(), torch.float16),
    "bfloat16": (lambda model: model.bfloat16(), torch.bfloat16),
    "to a dtype": (lambda model: model.to(torch.bfloat16), torch.bfloat16),
    "to a device and a dtype": (
        lambda model: model.to("cpu", torch.float64, non_blocking=True),
        torch.float64,
    ),
    "like a tensor": (lambda model: model.to(torch.empty(0, dtype=torch.float64)), torch.float64),
    "unit by unit": (lambda model: [unit.double() for unit in (*model.layers, model)], torch.float64),
    "there and back": (lambda model: model.double().float(), torch.float32),
    "to its device": (lambda model: model.to("cpu"), torch.float32),
    "from around": (lambda model: nn.Sequential(model).double(), torch.float64),
}


def converted(how, moment):
    """An optimizer made before stays valid: its parameters are the model's, and its state goes on."""
    convert, dtype = CONVERSIONS[how]
    models = sharded(), seeded(build())
    optims = [sgd(each.parameters()) for each in models]
    objects = list(models[0].parameters())
    what = f"{how}, {moment}"
    for index, param in enumerate(objects):
        param.number = index
    if moment != "at the start":
        step_both(models, optims, 0, what)
    if moment == "kept after a forward":
        loss_of(models[0], 0, 0)
    for model in models:
        convert(model)
    if moment == "kept after a forward":
        models[0].reshard()
    for index, (param, was) in enumerate(zip(models[0].parameters(), objects, strict=True)):
        assert param is was, f"{what}: the optimizer holds another parameter"
        assert param.dtype == dtype
        assert param.requires_grad
        assert param.number == index, f"{what}: an attribute of the parameter is gone"
    for step in range(1, 4):
        step_both(models, optims, step, what, dtype)
    for param in models[0].parameters():
        assert param.to_local().dtype == dtype
        assert param.to_local().untyped_storage().nbytes() == param.to_local().nbytes


@beyond_torch  # which goes on with the weights of before
def test_a_converted_model_trains_on_with_the_optimizer_it_had():
    moments = ["at the start", "after a step", "kept after a forward"]
    # Two ranks: their average is exact in any dtype.
    run_cases(converted, 2, cases_of(how=list(CONVERSIONS), moment=moments))


@beyond_torch
def test_a_converted_model_trains_on_where_ranks_are_processes():
    cases = cases_of(how=["half", "unit by unit"], moment=["after a step"])
    run_cases(converted, 2, cases, kind="gloo")


def gradients_converted():
    model, plain = sharded(), seeded(build())
    loss_of(model, 0, dist.get_rank()).backward()
    average_gradients(plain, lambda r: loss_of(plain, 0, r), dist.get_world_size())
    for each in (model, plain):
        each.double()
    loss_of(model, 1, dist.get_rank(), torch.float64).backward()
    average_gradients(plain, lambda r: loss_of(plain, 1, r, torch.float64), dist.get_world_size())
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        same_shard(param.grad, expected.grad, f"gradient of {name}")


@beyond_torch
def test_gradients_are_converted_with_their_parameters_and_accumulate_on():
    run_ranks(gradients_converted, 2)


def emptied():
    """`to_empty` after training: new memory, the same parameters, to be filled again."""
    models = sharded(), seeded(build())
    optims = [sgd(each.parameters()) for each in models]
    step_both(models, optims, 0, "before")
    model, plain = models
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param, value in zip(model.parameters(), plain.parameters(), strict=True):
            local = distribute_tensor(value.detach(), param.device_mesh, param.placements, src_data_rank=None)
            param.copy_(local)
    for step in range(1, 3):
        step_both(models, optims, step, "after to_empty")


def test_a_model_emptied_and_filled_again_trains_on():
    run_ranks(emptied, 3)


# --- GradScaler -------------------------------------------------------------------------------------------------


def scaled():
    """Loss scaling on both sides; in one step a single rank overflows, and every rank must skip it."""
    models = sharded(), seeded(build())
    optims = [sgd(each.parameters()) for each in models]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) for _ in models]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(6):
        model, plain = models

        def loss_in(model, rank, scaler, step=step):
            loss = loss_of(model, step, rank)
            if step == 2 and rank == world_size - 1:
                loss = loss * torch.inf
            return scaler.scale(loss)

        before = [full(param.detach()).clone() for param in model.parameters()]
        loss_in(model, rank, scalers[0]).backward()
        average_gradients(plain, lambda r: loss_in(plain, r, scalers[1]), world_size)  # noqa: B023
        for optim, scaler in zip(optims, scalers, strict=True):
            scaler.unscale_(optim)
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            if step != 2:
                same_shard(param.grad, expected.grad, f"step {step}: unscaled gradient of {name}")
        for optim, scaler in zip(optims, scalers, strict=True):
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale(), f"step {step}: scale"
        same_shards(model, plain, f"step {step}: ")
        unchanged = all(
            torch.equal(full(param.detach()), was)
            for param, was in zip(model.parameters(), before, strict=True)
        )
        assert unchanged == (step == 2), f"step {step}: skipped is {unchanged}"
    return scalers[0].get_scale()


def test_a_grad_scaler_scales_and_skips_alike_on_all_ranks():
    # Halved once where a rank overflowed, doubled once after three good steps.
    assert run_ranks(scaled, 3, kind="gloo") == [1024.0] * 3


# --- torch's own clipping ---------------------------------------------------------------------------------------


def clipped(norm_type, foreach):
    model, plain = sharded(), seeded(build())
    loss_of(model, 0, dist.get_rank()).backward()
    average_gradients(plain, lambda r: loss_of(plain, 0, r), dist.get_world_size())
    norms = [
        nn.utils.clip_grad_norm_(each.parameters(), 0.01, norm_type, foreach=foreach)
        for each in (model, plain)
    ]
    assert isinstance(norms[0], DTensor)
    same(norms[0].full_tensor(), norms[1], "norm", 1e-6)
    assert norms[1] > 0.01
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        same_shard(param.grad, expected.grad, f"gradient of {name}", 1e-6)


def test_torchs_own_clip_grad_norm_sees_the_unsharded_norm():
    # More ranks than some parameters have rows: torch has no norm "inf" of an empty shard.
    for norm_type, foreach, world_size in [
        (2.0, None, 4),
        (2.0, False, 4),
        (1.0, None, 4),
        (torch.inf, None, 2),
    ]:
        run_ranks(clipped, world_size, norm_type, foreach)


def clipped_by_value():
    model, plain = sharded(), seeded(build())
    loss_of(model, 0, dist.get_rank()).backward()
    average_gradients(plain, lambda r: loss_of(plain, 0, r), dist.get_world_size())
    for each in (model, plain):
        nn.utils.clip_grad_value_(each.parameters(), 0.01)
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        same_shard(param.grad, expected.grad, f"gradient of {name}")


def test_torchs_own_clip_grad_value_works_on_shards():
    run_ranks(clipped_by_value, 3)
