"""`shardwise.clip_grad_norm_`: the norm of the unsharded model, over any mix of meshes, and gradients scaled by it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from shardwise import ConfigError, StateError, clip_grad_norm_
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import Layers, average_gradients, counted, data, full, same, same_shard
from tests.ranks.subject import beyond_torch, fully_shard
from tests.ranks.tables import cases_of, run_cases

pytestmark = beyond_torch

ORDERS = [1, 2, 2.5, math.inf, -math.inf]
ROUNDING = 1e-6


def close(got, want, what):
    assert type(got) is torch.Tensor, f"{what}: {type(got)}"
    same(got, want, what, ROUNDING)


def matches_torch(params, originals, what, num_reduces):
    """Clips `params` here and their unsharded `originals` with torch; norm and gradients must agree."""
    before = [(param.grad, full(param.grad).clone()) for param in params if param.grad is not None]
    for order in ORDERS:
        for foreach in (None, False):
            for max_norm in (0.25, 1e6):
                case = f"{what}, order {order}, foreach {foreach}, max_norm {max_norm}"
                for (grad, value), original in zip(before, originals, strict=True):
                    grad.copy_(distribute_like(value, grad))
                    original.grad = value.clone()
                with CommDebugMode() as mode:
                    norm = clip_grad_norm_(params, max_norm, order, foreach=foreach)
                if dist.get_backend() == "gloo":  # torch counts nothing where ranks are threads
                    assert sum(counted(mode).values()) == num_reduces, f"{case}: {counted(mode)}"
                close(norm, nn.utils.clip_grad_norm_(originals, max_norm, order), f"{case}: norm")
                for index, ((grad, _), original) in enumerate(zip(before, originals, strict=True)):
                    same_shard(grad, original.grad, f"{case}: gradient {index}", ROUNDING)


def distribute_like(value, like):
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def originals_of(params):
    return [nn.Parameter(full(param.detach()).clone()) for param in params if param.grad is not None]


class Mixed(Layers):
    """Sizes that do not divide, one smaller than the world, one that is not sharded, one that is never used."""

    def __init__(self):
        super().__init__(num_layers=2, width=5)
        self.scale = nn.Parameter(torch.full((1,), 1.5))
        self.plain = nn.Parameter(torch.ones(5))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return super().forward(x) * self.scale + self.plain


def trained(meshes):
    model = seeded(Mixed())
    for layer, mesh in zip(model.layers, meshes, strict=False):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=meshes[-1], ignored_params={model.plain})
    model(data(0, dist.get_rank(), 3, 5)).square().mean().backward()
    # A gradient that is not sharded is the same on all ranks, as DDP would leave it.
    dist.all_reduce(model.plain.grad)
    return model


def model_on_meshes(shapes, num_reduces):
    meshes = [init_device_mesh("cpu", shape) for shape in shapes]
    model = trained(meshes)
    params = list(model.parameters())
    assert model.unused.grad is None
    matches_torch(params, originals_of(params), f"meshes {shapes}", num_reduces)


@pytest.mark.parametrize("kind", ["threads", "gloo"])
@pytest.mark.parametrize(
    ("shapes", "num_reduces"), [([(4,)] * 3, 1), ([(2, 2)] * 3, 1), ([(4,), (2, 2), (4,)], 2)]
)
def test_the_norm_is_that_of_the_unsharded_model_with_one_all_reduce_a_mesh(shapes, num_reduces, kind):
    run_ranks(model_on_meshes, 4, shapes, num_reduces, kind=kind)


def norm_of_a_training_step():
    """From end to end: the plain model sees every rank's batch."""
    model, plain = seeded(Layers()), seeded(Layers())
    for unit in (*model.layers, model):
        fully_shard(unit)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optim, plain_optim = (torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain))
    for step in range(3):
        model(data(step, rank, 2, 6)).square().mean().backward()
        average_gradients(plain, lambda r: plain(data(step, r, 2, 6)).square().mean(), world_size)  # noqa: B023
        norm = clip_grad_norm_(model.parameters(), 0.1)
        close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1), f"step {step}: norm")
        assert norm > 0.1
        for each in (optim, plain_optim):
            each.step()
            each.zero_grad()
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            same_shard(param.detach(), expected.detach(), f"step {step}: {name}", 1e-5)


def test_steps_with_clipping_match_the_plain_model():
    run_ranks(norm_of_a_training_step, 3)


def placed_by_hand(mesh, placements):
    """One parameter for each list of placements, with a gradient placed likewise."""
    params = []
    for index, placing in enumerate(placements):
        generator = torch.Generator().manual_seed(index)
        value, grad = (torch.randn(7, 6, generator=generator) for _ in range(2))
        partial = [where.is_partial() for where in placing]
        known = [
            Replicate() if is_partial else where for is_partial, where in zip(partial, placing, strict=True)
        ]
        param = nn.Parameter(distribute_tensor(value, mesh, known, src_data_rank=None))
        placed = distribute_tensor(grad, mesh, known, src_data_rank=None)
        if any(partial):
            terms = math.prod(
                size for size, is_partial in zip(mesh.shape, partial, strict=True) if is_partial
            )
            placed = DTensor.from_local(
                placed.to_local() / terms, mesh, placing, shape=placed.shape, stride=(6, 1)
            )
        param.grad = placed
        params.append(param)
    return params


def asked_for_in_part():
    """A unit's gradients count as one only where all of them are asked for, once, as the engine left them."""
    model = trained([init_device_mesh("cpu", (3,))] * 3)
    params = [param for param in model.parameters() if param is not model.plain]
    for param in params:
        if param.grad is not None:
            param.grad.to_local().abs_().add_(0.1)  # no element is as small as padding
    changed, replaced = model.layers[0].in_proj, model.layers[1].out_proj
    frozen = model.layers[1].in_proj.bias.requires_grad_(False)
    cases = {
        "all": params,
        "one of a unit": [changed.weight],
        "all but one": [param for param in params if param is not changed.bias],
        "two parameters of one unit": [changed.bias, model.layers[0].out_proj.bias],
    }
    for what, chosen in cases.items():
        others = [param for param in params if all(param is not each for each in chosen)]
        left = [param.grad.to_local().clone() for param in others if param.grad is not None]
        matches_torch(chosen, originals_of(chosen), what, 1)
        for param, value in zip((p for p in others if p.grad is not None), left, strict=True):
            assert torch.equal(param.grad.to_local(), value), f"{what}: a gradient was scaled unasked"
    replaced.weight.grad = replaced.weight.grad.clone()
    changed.bias.grad = None
    assert frozen.grad is not None
    matches_torch(params, originals_of(params), "after changes", 1)


def not_finite_and_back():
    """What is not finite once must leave nothing behind where gradients are filled with zeros."""
    model = seeded(Layers(width=5))
    for unit in (*model.layers, model):
        fully_shard(unit)
    for scale in (math.nan, 1.0):
        (model(data(0, dist.get_rank(), 3, 5)).square().mean() * scale).backward()
        norm = clip_grad_norm_(model.parameters(), 0.1)
        if scale == 1.0:
            assert norm.isfinite()
            return
        assert norm.isnan()
        model.zero_grad(set_to_none=False)


def rows_of_units():
    asked_for_in_part()
    not_finite_and_back()


def test_a_units_gradients_are_summed_and_scaled_as_one_only_where_that_is_the_same():
    run_ranks(rows_of_units, 3)


def test_a_long_gradient_keeps_its_digits():
    weight = nn.Parameter(torch.zeros(3_000_000))
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    want = weight.grad.double().norm().float()
    close(clip_grad_norm_(weight, 1e9), want, "norm")  # in one piece torch is off by 1e-4


TENSOR_PARALLEL = [
    [Shard(0), Shard(1)],
    [Shard(0), Replicate()],
    [Replicate(), Shard(0)],
    [Replicate(), Replicate()],
    [Shard(0), Shard(0)],
]


def on_two_axes(ranks, num_reduces):
    mesh = DeviceMesh("cpu", ranks)
    params = placed_by_hand(mesh, TENSOR_PARALLEL) if mesh.get_coordinate() is not None else []
    params.append(nn.Parameter(torch.arange(3.0)))
    params[-1].grad = torch.arange(3.0) + 1
    if mesh.get_coordinate() is None:
        num_reduces = 0
    matches_torch(params, originals_of(params), f"two axes of {ranks}", num_reduces)


def test_gradients_sharded_over_two_axes_take_one_all_reduce_where_the_mesh_is_the_world():
    run_ranks(on_two_axes, 4, [[0, 1], [2, 3]], 1, kind="gloo")


def test_gradients_sharded_over_two_axes_take_one_all_reduce_an_axis_where_it_is_not():
    run_ranks(on_two_axes, 5, [[0, 1], [2, 3]], 2, kind="gloo")


def terms_of_a_sum():
    mesh = init_device_mesh("cpu", (2, 2))
    params = placed_by_hand(mesh, [[Shard(0), Partial()], [Replicate(), Partial()], [Shard(0), Shard(1)]])
    want = torch.stack([full(param.grad).norm() for param in params]).norm()
    close(clip_grad_norm_(params, 1.0), want, "norm")
    clipped = torch.stack([full(param.grad).norm() for param in params]).norm()
    same(clipped, torch.tensor(1.0), "norm after clipping", 1e-5)


def test_a_gradient_whose_terms_are_still_to_be_summed_counts_as_the_sum():
    run_ranks(terms_of_a_sum, 4)


def missing_on_some_ranks():
    """A rank whose gradients are missing takes part in the reduces of its peers."""
    mesh = init_device_mesh("cpu", (2,))
    params = placed_by_hand(mesh, [[Shard(0)], [Shard(0)]])
    squares = [torch.zeros(()), torch.zeros(())]
    if dist.get_rank() == 0:
        squares = [param.grad.to_local().norm().square() for param in params]
    else:
        for param in params:
            param.grad = None
    for square in squares:
        dist.broadcast(square, 0)
    close(clip_grad_norm_(params, 1.0), torch.stack(squares).sum().sqrt(), "norm")


def test_gradients_missing_on_one_rank_hang_nobody():
    run_ranks(missing_on_some_ranks, 2)


def no_gradient_at_all():
    params = placed_by_hand(init_device_mesh("cpu", (2,)), [[Shard(0)]])
    params[0].grad = None
    close(clip_grad_norm_(params, 1.0), torch.tensor(0.0), "norm of nothing")
    close(clip_grad_norm_([], 1.0), torch.tensor(0.0), "norm of no parameters")
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.full((4,), 2.0)
    close(clip_grad_norm_(weight, 1.0), torch.tensor(4.0), "norm of one tensor")


def test_parameters_without_gradients_have_norm_zero():
    run_ranks(no_gradient_at_all, 2)


def in_dtypes():
    mesh = init_device_mesh("cpu", (2,))
    for dtype, want_dtype in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        params = placed_by_hand(mesh, [[Shard(0)], [Shard(1)]])
        for param in params:
            grad = param.grad.to(dtype)
            param.data = param.data.to(dtype)
            param.grad = None
            param.grad_dtype = None
            param.grad = grad
        params[1].grad = None
        want = full(params[0].grad).to(want_dtype).norm()
        close(clip_grad_norm_(params, 1.0), want, f"norm in {dtype}")
    # The sum of squares leaves float32 although no norm does.
    large = placed_by_hand(mesh, [[Shard(0)]] * 10)
    for param in large:
        param.grad.mul_(2e18)
    want = torch.stack([full(param.grad).double().norm() for param in large]).norm().float()
    assert want.isfinite()
    close(clip_grad_norm_(large, 1.0), want, "norm of large values")


def test_the_norm_is_computed_in_float32_or_wider():
    run_ranks(in_dtypes, 2)


def with_an_empty_parameter():
    model = seeded(nn.Linear(4, 4))
    model.register_parameter("empty", nn.Parameter(torch.empty(0, 4, dtype=torch.float64)))
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    assert model.empty.grad is None
    assert clip_grad_norm_(model.parameters(), 1.0).dtype == torch.float32


def test_an_empty_parameter_without_a_gradient_does_not_widen_the_norm():
    run_ranks(with_an_empty_parameter, 2)


def not_finite(value):
    model = trained([init_device_mesh("cpu", (4,))] * 3)
    if dist.get_rank() == 2:
        model.layers[0].in_proj.weight.grad.to_local().view(-1)[0] = value
    before = [
        param.grad.to_local().clone() for param in model.parameters() if isinstance(param.grad, DTensor)
    ]
    with pytest.raises(StateError, match="cannot be clipped") as caught:
        clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)
    assert caught.value.fix
    after = [param.grad.to_local() for param in model.parameters() if isinstance(param.grad, DTensor)]
    for was, now in zip(before, after, strict=True):
        assert torch.equal(was.nan_to_num(), now.nan_to_num()), "a gradient was scaled"
    assert not clip_grad_norm_(model.parameters(), 0.1).isfinite()


def test_a_norm_that_is_not_finite_is_refused_on_every_rank_before_anything_is_scaled():
    run_cases(not_finite, 4, cases_of(value=[math.nan, math.inf]))


def refused_arguments():
    weight = nn.Parameter(torch.ones(4))
    with pytest.raises(TypeError, match="str"):
        clip_grad_norm_(["weight"], 1.0)
    for wrong in (-1.0, math.nan):
        with pytest.raises(ConfigError, match="max_norm"):
            clip_grad_norm_([weight], wrong)
    with pytest.raises(ConfigError, match="norm_type"):
        clip_grad_norm_([weight], 1.0, 0)


def test_arguments_that_mean_nothing_are_refused():
    refused_arguments()
