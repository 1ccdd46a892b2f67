"""What ranks of a run tell each other besides tensors of the model: problems, choices, numbers of a step.

It has a gloo group of its own, so that it works the same on CPUs and GPUs and never waits in a device's queue.
"""

from __future__ import annotations

import datetime
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise.errors import ShardwiseError

__all__ = ["Team"]

Result = TypeVar("Result")


class Team:
    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.group = self.new_group()

    @staticmethod
    def new_group() -> dist.ProcessGroup:
        """A gloo group of all ranks."""
        group = dist.new_group(backend="gloo", timeout=datetime.timedelta(hours=1))
        assert isinstance(group, dist.ProcessGroup)
        return group

    def together(self, work: Callable[[], Result]) -> Result:
        """Does something on every rank; a problem that any rank finds is raised on all, before anyone goes on.

        Such an error is marked as ``agreed``: one rank will do to tell it.
        """
        result, problem = None, None
        try:
            result = work()
        except (ShardwiseError, OSError) as error:
            problem = error
            # Attributes travel with an error, its traceback does not.
            error.raised_at = f"on rank {self.rank}\n{traceback.format_exc()}"  # type: ignore[union-attr]
        problems: list[Any] = [None] * self.world_size
        dist.all_gather_object(problems, problem, group=self.group)
        first = next((found for found in problems if found is not None), None)
        if first is not None:
            first.agreed = True
            raise first
        return result  # type: ignore[return-value]

    def from_first(self, work: Callable[[], Result]) -> Result:
        """Does something on rank 0 alone; what it returns, or raises, on all."""
        found: list[Any] = [None]

        def on_first() -> None:
            if self.rank == 0:
                found[0] = work()

        self.together(on_first)
        dist.broadcast_object_list(found, 0, group=self.group)
        result: Result = found[0]
        return result

    def sum(self, *values: float) -> list[float]:
        """Adds numbers up over the ranks, in double precision."""
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers, group=self.group)
        return numbers.tolist()

    def collect(self, value: Result) -> list[Result]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values
