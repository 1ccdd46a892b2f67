"""Which kernels step an element to the same bits wherever it lies in a tensor.

Shardwise steps tensors joined, in blocks and as shards of any size. A kernel of torch takes a tensor vector by vector,
finishes its end element by element, and splits it among threads, so an element that lies elsewhere may be computed by
other instructions. Whether the result is the same depends on how the kernel is written: its two loops must round alike,
both fusing a product with the sum that follows, or neither. `shardwise.optim` relies on what is tested here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, optim

from tests.rounding import stepped
from tests.unit.optimizers import OPTIMIZERS

pytestmark = pytest.mark.arithmetic

FUSED: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (optim.Adam, {"amsgrad": True, "weight_decay": 0.01}),
    "AdamW": (optim.AdamW, {"lr": 1e-2}),
    "Adagrad": (optim.Adagrad, {"lr_decay": 0.1}),
}
# More than kernels leave to one thread.
NUMEL = 70_001
# Ends of all lengths within a vector, one after another; what is left is large enough for several threads again.
SIZES = [*range(1, 130), NUMEL - sum(range(1, 130))]


def step_whole_and_apart(
    make: type[optim.Optimizer], options: dict[str, Any], dtype: torch.dtype, sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Three steps of one tensor, and of the same elements in tensors of these sizes, each in memory of its own."""
    random = torch.Generator().manual_seed(0)
    whole = torch.randn(NUMEL, generator=random, dtype=dtype)
    parts = [part.clone() for part in whole.split(sizes)]
    together, apart = make([whole], **options), make(parts, **options)
    for _ in range(3):
        whole.grad = torch.randn(NUMEL, generator=random, dtype=dtype)
        for part, grad in zip(parts, whole.grad.split(sizes), strict=True):
            part.grad = grad.clone()
        together.step()
        apart.step()
    return whole, torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_plain_kernels_step_an_element_to_the_same_bits_wherever_it_lies(
    name: str, foreach: bool, dtype: torch.dtype
) -> None:
    make, options = OPTIMIZERS[name]
    whole, apart = step_whole_and_apart(make, {**options, "foreach": foreach}, dtype, SIZES)
    assert torch.equal(whole, apart)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", FUSED)
def test_fused_kernels_do_where_tensors_are_cut_between_vectors(name: str, dtype: torch.dtype) -> None:
    make, options = FUSED[name]
    vector = 64 // dtype.itemsize
    sizes = [vector, 3 * vector, 2 * vector] * 40
    sizes.append(NUMEL - sum(sizes))
    whole, apart = step_whole_and_apart(make, {**options, "fused": True}, dtype, sizes)
    assert torch.equal(whole, apart)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("sizes", [[NUMEL], SIZES], ids=["whole", "apart"])
def test_anywhere_else_they_step_within_the_roundings_of_their_formula(sizes: list[int], name: str) -> None:
    make, options = FUSED[name]
    random = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=random) for size in sizes]
    optimizer = make(tensors, **options, fused=True)
    for number in (1, 2, 3):
        expected = []
        for tensor in tensors:
            tensor.grad = torch.randn(tensor.shape, generator=random)
            state = optimizer.state[tensor]
            expected.append(stepped(make, tensor, tensor.grad, state, number, optimizer.defaults))
        optimizer.step()
        for tensor, (value, made) in zip(tensors, expected, strict=True):
            assert value.holds(tensor)
            assert all(state.holds(optimizer.state[tensor][key]) for key, state in made.items())
