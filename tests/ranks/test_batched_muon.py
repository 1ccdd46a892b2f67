"""`shardwise.optim.BatchedMuon`: equal shapes in one batch, as close to float32 as torch's Muon."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import Muon

from shardwise.optim import BatchedMuon, whole

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def in_float32(gradient: torch.Tensor) -> torch.Tensor:
    wide = gradient.T if gradient.shape[0] > gradient.shape[1] else gradient
    x = wide.bfloat16().float()
    x = x / x.norm()
    for _ in range(5):
        square = x @ x.T
        x = COEFFICIENTS[0] * x + (COEFFICIENTS[1] * square + COEFFICIENTS[2] * square @ square) @ x
    return x.T if wide is not gradient else x


def updates_of(optimizer_class, gradients, **options):
    """What one step subtracts from zeros, with a learning rate of one."""
    params = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    optimizer = optimizer_class(params, lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0, **options)
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient.clone()
    optimizer.step()
    return [-param.detach() for param in params]


def draw(shape, kind):
    gradient = torch.randn(shape)
    if kind == "low rank":
        return torch.randn(shape[0], 2) @ torch.randn(2, shape[1])
    if kind == "ill-conditioned":
        left, values, right = torch.linalg.svd(gradient, full_matrices=False)
        return left @ torch.diag(torch.logspace(0, -6, len(values))) @ right
    return gradient


@pytest.mark.parametrize("kind", ["random", "low rank", "ill-conditioned"])
def test_updates_are_as_close_to_float32_as_those_of_muon(kind):
    torch.manual_seed(0)
    shapes = [(16, 16), (24, 40), (40, 24), (16, 16), (24, 40)]
    gradients = [draw(shape, kind) for shape in shapes]
    batched, plain = updates_of(BatchedMuon, gradients), updates_of(Muon, gradients)
    for shape, gradient, ours, torchs in zip(shapes, gradients, batched, plain, strict=True):
        exact = in_float32(gradient) * max(1.0, shape[0] / shape[1]) ** 0.5
        distance = (torchs - exact).norm()
        assert (ours - exact).norm() <= 1.25 * distance
        assert (ours - torchs).norm() <= 2.25 * distance


@pytest.mark.parametrize(
    "options",
    [
        {"adjust_lr_fn": "match_rms_adamw"},
        {"nesterov": False, "momentum": 0.5, "weight_decay": 0.3},
        {"ns_steps": 2, "eps": 1e-3},
    ],
)
def test_options_and_state_are_those_of_muon(options):
    torch.manual_seed(0)
    values = [torch.randn(8, 12) for _ in range(2)] + [torch.randn(12, 8)]
    found = []
    for optimizer_class in (BatchedMuon, Muon):
        params = [nn.Parameter(value.clone()) for value in values]
        optimizer = optimizer_class(params, lr=0.02, **options)
        for step in range(3):
            for number, param in enumerate(params):
                torch.manual_seed(10 * step + number)
                param.grad = torch.randn_like(param)
            optimizer.step()
        found.append((params, optimizer))
    (ours, batched), (torchs, plain) = found
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.02 * 0.05)
    plain.load_state_dict(batched.state_dict())
    for one, other in zip(ours, torchs, strict=True):
        assert torch.equal(batched.state[one]["momentum_buffer"], plain.state[other]["momentum_buffer"])


def count_products(optimizer_class):
    params = [nn.Parameter(torch.randn(8, 8)) for _ in range(8)]
    optimizer = whole(optimizer_class, params, lr=0.02, at_once=8)
    for param in params:
        param.grad = torch.randn(8, 8)
    with torch.profiler.profile() as profile:
        optimizer.step()
    names = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
    return sum(event.count for event in profile.key_averages() if event.key in names)


def test_an_owner_multiplies_equal_matrices_together():
    assert count_products(Muon) == 8 * 15
    # Two rounds of four.
    assert count_products(BatchedMuon) == 2 * 15


def test_a_matrix_without_a_gradient_is_left_alone():
    params = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    optimizer = BatchedMuon(params, lr=0.1)
    params[0].grad = torch.eye(4)
    loss = optimizer.step(lambda: torch.tensor(3.0))
    assert loss == 3.0
    assert torch.equal(params[1], torch.ones(4, 4))
    assert not torch.equal(params[0], torch.ones(4, 4))
    assert list(optimizer.state) == [params[0]]
