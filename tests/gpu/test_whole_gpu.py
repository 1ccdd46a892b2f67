"""Whole matrices on NCCL ranks: right whichever stream is slow, and wrong without the waits between them.

All numbers are small integers, so right means equal.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import fully_shard
from shardwise.optim import matrix_moves, whole
from shardwise.testing import run_ranks
from tests.ranks.models import full

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

SLEEP_CYCLES = 20_000_000  # about a hundredth of a second: far longer than the host takes to issue a round
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(48 + 3 * number, 40 - number) for number in range(10)]
STEPS = 4


class Term(nn.Module):
    def __init__(self, number: int, shape: tuple[int, int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, device=DEVICE))
        self.pattern = (torch.arange(self.weight.numel(), device=DEVICE) % (7 + number)).view(shape)

    def forward(self, factor: float) -> Tensor:
        return (self.weight * self.pattern).sum() * factor


class Terms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.terms = nn.ModuleList(Term(number, shape) for number, shape in enumerate(SHAPES))

    def forward(self, factor: float) -> Tensor:
        return torch.stack([term(factor) for term in self.terms]).sum()


class Turning(torch.optim.Optimizer):
    """Adds all gradients so far, turned by half a circle: each element needs one of another rank's shard."""

    sleeps = False

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if self.sleeps:
                    sleep()
                state = self.state[param]
                total = state["total"] = state.get("total", 0) + param.grad
                param.add_(total.flip(0, 1))


def slow_side_stream() -> Any:
    """Lets everything that is issued on the side stream begin late."""
    enter = matrix_moves._on

    def late(stream: Any) -> AbstractContextManager[Any]:
        if stream is not None:
            with torch.cuda.stream(stream):
                sleep()
        return enter(stream)

    return mock.patch.object(matrix_moves, "_on", late)


def unheard_movements() -> Any:
    """Lets compute go on before what it reads has come."""
    wait = matrix_moves.Movement.wait

    def at_once(self: Any) -> None:
        self.send()
        self._event = None
        wait(self)

    return mock.patch.object(matrix_moves.Movement, "wait", at_once)


def sleep() -> None:
    if DEVICE == "cuda":
        torch.cuda._sleep(SLEEP_CYCLES)


def trained(slow: str, in_backward: bool = False) -> bool:
    """Whether all parameters are what one process has. ``slow``: "compute", or what a patch makes slow."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh(DEVICE, (world,))
    model: Any = Terms()
    for unit in (*model.terms, model):
        fully_shard(unit, mesh=mesh)
    expected, totals = ([torch.zeros(shape, device=DEVICE) for shape in SHAPES] for _ in range(2))
    optimizer = whole(Turning, model.parameters(), at_once=2, in_backward=in_backward)
    Turning.sleeps = slow == "compute"
    for step in range(STEPS):
        model(2.0 * (rank + 1) * (step + 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        # Memory that was given back is written at once.
        for _ in range(4):
            torch.full((1 << 16,), torch.nan, device=DEVICE)
        for term, total, value in zip(model.terms, totals, expected, strict=True):
            total += term.pattern * ((world + 1) * (step + 1))
            value += total.flip(0, 1)
    # All of them, on every rank: each is gathered.
    found = [full(term.weight.detach()) for term in model.terms]
    return all(map(torch.equal, found, expected))


def outcomes() -> dict[str, bool]:
    found = {}
    for in_backward in (False, True):
        found[f"nothing slow, in_backward {in_backward}"] = trained("nothing", in_backward)
        found[f"compute slow, in_backward {in_backward}"] = trained("compute", in_backward)
        with slow_side_stream():
            found[f"side stream slow, in_backward {in_backward}"] = trained("side stream", in_backward)
    with slow_side_stream(), unheard_movements():
        found["unheard"] = trained("side stream")
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_matrices_are_right_whichever_stream_is_slow(world_size: int) -> None:
    for found in run_ranks(outcomes, world_size, kind="nccl", timeout_seconds=180):
        assert not found.pop("unheard"), "right though compute did not wait for what arrives"
        assert all(found.values()), f"wrong: {[name for name, is_right in found.items() if not is_right]}"
