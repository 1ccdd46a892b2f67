"""Small neighbours that are stepped as one tensor are stepped to the same bits as one by one."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, optim
from torch.utils.dlpack import from_dlpack

from shardwise.optim.joined_step import JoinedStep
from tests.unit.optimizers import OPTIMIZERS

pytestmark = pytest.mark.arithmetic

# Shapes, most of them with an end that fills no vector; one is too large to be joined.
SHAPES = [(5, 7), (3,), (48, 48), (48,), (1,), (129, 65), (17, 16), (64,), (9, 3), (2, 31)]
FUSED = ("SGD", "SGD, nesterov", "Adam", "AdamW", "Adagrad")


class Twins:
    """Tensors side by side in a buffer, stepped joined, and copies of them, stepped one by one."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32, **kernels: bool) -> None:
        torch.manual_seed(0)
        self.make, self.options = OPTIMIZERS[name][0], {**OPTIMIZERS[name][1], **kernels}
        first = [torch.randn(shape, dtype=dtype) for shape in SHAPES]
        self.buffers = [lay_out(first)]
        self.joined = parts_of(self.buffers[0], first)
        self.alone = [tensor.clone() for tensor in first]
        self.optim = self.make(self.groups(self.joined), **self.options)
        self.step_joined = JoinedStep(self.optim)
        self.reference = self.make(self.groups(self.alone), **self.options)
        self.num_seen: list[int] = []
        self.optim.register_step_pre_hook(lambda it, *_: self.num_seen.append(num_tensors(it)))

    def groups(self, tensors: Sequence[Tensor]) -> list[dict[str, Any]]:
        return [{"params": tensors[:6]}, {"params": tensors[6:], "lr": 0.02}]

    def set_gradients(self, without: Sequence[int] = ()) -> None:
        for number, (joined, alone) in enumerate(zip(self.joined, self.alone, strict=True)):
            grad = torch.randn(alone.shape, dtype=alone.dtype)
            joined.grad, alone.grad = (grad, grad.clone()) if number not in without else (None, None)

    def step(self, num_steps: int = 1, without: Sequence[int] = ()) -> None:
        for _ in range(num_steps):
            self.set_gradients(without)
            self.step_joined(self.buffers)
            self.reference.step()

    def assert_equal(self) -> None:
        for number, (joined, alone) in enumerate(zip(self.joined, self.alone, strict=True)):
            assert torch.equal(joined, alone), f"tensor {number}"
        ours, theirs = self.optim.state_dict(), self.reference.state_dict()
        assert ours["param_groups"] == theirs["param_groups"]
        assert ours["state"].keys() == theirs["state"].keys()
        for number, values in theirs["state"].items():
            assert ours["state"][number].keys() == values.keys()
            for key, value in values.items():
                mine = ours["state"][number][key]
                same = torch.equal(mine, value) if isinstance(value, Tensor) else mine == value
                assert same, f"{key} of tensor {number}"


def lay_out(tensors: Sequence[Tensor]) -> Tensor:
    return torch.zeros(sum(tensor.nbytes for tensor in tensors) + 1024, dtype=torch.uint8)


def parts_of(buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in a buffer, end to end but for a gap after every third; the first begins where no page does."""
    parts, start = [], 64
    for number, tensor in enumerate(tensors):
        memory = buffer[start : start + tensor.nbytes].view(tensor.dtype)
        parts.append(from_dlpack(memory).view(tensor.shape).copy_(tensor))
        start += tensor.nbytes + (64 if number % 3 == 2 else 0)
    return parts


def num_tensors(optimizer: optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_neighbours_are_joined_by_plain_kernels(name: str, foreach: bool, dtype: torch.dtype) -> None:
    twins = Twins(name, dtype, foreach=foreach)
    twins.step(12)
    twins.assert_equal()
    # What lies before the large one and after it, in two groups, and the large one itself.
    assert set(twins.num_seen) == {3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FUSED)
def test_neighbours_that_fill_their_vectors_are_joined_by_fused_kernels(
    name: str, dtype: torch.dtype
) -> None:
    twins = Twins(name, dtype, fused=True)
    twins.step(40)
    twins.assert_equal()
    # (48, 48) with (48,), and (17, 16) with (64,); all others end within a vector.
    assert set(twins.num_seen) == {8}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fused", [False, True])
def test_short_floats_are_not_joined_because_their_last_bit_depends_on_it(
    fused: bool, dtype: torch.dtype
) -> None:
    twins = Twins("SGD", dtype, fused=fused)
    twins.step(3)
    twins.assert_equal()
    assert set(twins.num_seen) == {len(SHAPES)}


@pytest.mark.parametrize("name", ["SGD, nesterov", "AdamW", "Adagrad"])
def test_what_has_no_gradient_stays_where_it_is(name: str) -> None:
    twins = Twins(name)
    for without in ([1], [], [1, 7], [], [0, 1, 2], list(range(10)), []):
        twins.step(1, without)
        twins.assert_equal()
    # 0, 1, 2, 3 with 4, the large one, 6, 7, 8 with 9: wherever it was one alone, tensors stay apart.
    assert twins.num_seen == [5, 5, 7, 7, 8, 8, 8]


def test_gradients_that_cannot_be_laid_together_are_used_as_they_are() -> None:
    twins = Twins("SGD")
    twins.set_gradients()
    for tensors in (twins.joined, twins.alone):
        for number in (6, 7, 8, 9):
            tensors[number].grad = tensors[number].grad.to_sparse()
    twins.step_joined(twins.buffers)
    twins.reference.step()
    twins.assert_equal()
    assert twins.num_seen == [6]


@pytest.mark.parametrize("name", ["SGD, nesterov", "AdamW", "Adagrad", "NAdam"])
def test_state_that_was_loaded_is_gone_on_with(name: str) -> None:
    twins = Twins(name)
    twins.step(3)
    saved = copy.deepcopy(twins.reference.state_dict())
    twins.step(2)
    twins.optim.load_state_dict(copy.deepcopy(saved))
    twins.reference.load_state_dict(saved)
    twins.step(2)
    twins.assert_equal()
    # Of one tensor alone, by hand.
    for optimizer, tensor in ((twins.optim, twins.joined[2]), (twins.reference, twins.alone[2])):
        key = next(key for key, value in optimizer.state[tensor].items() if value.dim())
        optimizer.state[tensor][key] = torch.full_like(optimizer.state[tensor][key], 0.5)
    twins.step(2)
    twins.assert_equal()
    assert set(twins.num_seen) == {3}


def test_tensors_stepped_one_by_one_in_between_keep_their_own_count() -> None:
    twins = Twins("AdamW")
    twins.step(2)
    twins.set_gradients(without=[0, 1, 6])
    twins.optim.step()
    twins.reference.step()
    twins.step(2)
    twins.assert_equal()
    steps = [int(twins.optim.state[tensor]["step"]) for tensor in twins.joined]
    assert steps == [4, 4, 5, 5, 5, 5, 4, 5, 5, 5]


def test_tensors_that_move_are_joined_where_they_lie_then() -> None:
    twins = Twins("AdamW")
    twins.step(2)
    moved = lay_out(twins.alone)
    for tensor, part in zip(twins.joined, parts_of(moved, twins.joined), strict=True):
        tensor.data = part
    twins.buffers = [moved]
    twins.step(2)
    twins.assert_equal()
    assert set(twins.num_seen) == {3}


def test_kernels_that_are_changed_join_what_they_may() -> None:
    twins = Twins("SGD", fused=False)
    twins.step()
    for group in (*twins.optim.param_groups, *twins.reference.param_groups):
        group["fused"] = True
    twins.step()
    twins.assert_equal()
    assert twins.num_seen == [3, 8]


def test_state_of_one_saves_no_more_than_itself() -> None:
    twins = Twins("AdamW")
    twins.step()
    file = io.BytesIO()
    torch.save(twins.optim.state[twins.joined[1]], file)
    assert len(file.getvalue()) < 4096


def test_autograd_sees_that_joined_tensors_have_changed() -> None:
    twins = Twins("SGD")
    twins.step()
    before = [tensor._version for tensor in twins.joined]
    twins.step()
    assert all(tensor._version > was for tensor, was in zip(twins.joined, before, strict=True))
