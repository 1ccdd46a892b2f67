"""Exchanges what the ranks of a run share besides the model's tensors: errors, decisions, numbers of a step.

It uses a gloo group of its own, which works the same on CPUs and GPUs and never waits in a device's queue.
"""

from __future__ import annotations

import contextlib
import datetime
import struct
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise.comm.channels.channel import collective_code
from shardwise.comm.channels.registry import channel_of
from shardwise.comm.collectives.agreement import gather_bytes
from shardwise.errors import ShardwiseError

__all__ = ["Team"]

Result = TypeVar("Result")
_SECONDS_BETWEEN_SIGNS = 60.0
_SUM = collective_code("sum what ranks know of a step")


class Team:
    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.group = self.new_group()
        # Used in every step: a rank that waits there must find out why, as in the model's own collectives.
        self._watched = channel_of(self.new_group(), torch.device("cpu")) if self.world_size > 1 else None

    @staticmethod
    def new_group() -> dist.ProcessGroup:
        """Creates a gloo group of all ranks."""
        group = dist.new_group(backend="gloo", timeout=datetime.timedelta(hours=1))
        assert isinstance(group, dist.ProcessGroup)
        return group

    def together(self, work: Callable[[], Result]) -> Result:
        """Runs ``work`` on every rank; a ShardwiseError or OSError of any rank is raised on all before any continues.

        Such an error is marked as ``agreed``: it is enough if one rank reports it.
        """
        result, problem = None, None
        try:
            result = work()
        except (ShardwiseError, OSError) as error:
            problem = error
            # Pickling keeps the attributes of an error, but not its traceback.
            error.raised_at = f"on rank {self.rank}\n{traceback.format_exc()}"  # type: ignore[union-attr]
        problems: list[Any] = [None] * self.world_size
        dist.all_gather_object(problems, problem, group=self.group)
        first = next((found for found in problems if found is not None), None)
        if first is not None:
            first.agreed = True
            raise first
        return result  # type: ignore[return-value]

    def from_first(self, work: Callable[[], Result]) -> Result:
        """Runs ``work`` on rank 0 alone, and returns its result or raises its error on all ranks.

        It may take longer than a group's timeout, as making tokens of much data does.
        """
        found: list[Any] = [None]

        def on_first() -> None:
            if self.rank == 0:
                with self._signs_of_life():
                    found[0] = work()
            else:
                self._wait_for_first()

        self.together(on_first)
        dist.broadcast_object_list(found, 0, group=self.group)
        result: Result = found[0]
        return result

    @contextlib.contextmanager
    def _signs_of_life(self) -> Iterator[None]:
        """Tells the other ranks again and again, by a thread, that this one is still at work."""
        if self.world_size == 1:
            yield
            return
        is_over = threading.Event()

        def tell() -> None:
            # A rank that is gone is found out by those who wait for it, not here.
            with contextlib.suppress(RuntimeError):
                ended = False
                while not ended:
                    ended = is_over.wait(_SECONDS_BETWEEN_SIGNS)
                    dist.broadcast(torch.tensor([float(ended)]), 0, group=self.group)

        teller = threading.Thread(target=tell, name="signs of life", daemon=True)
        teller.start()
        try:
            yield
        finally:
            is_over.set()
            teller.join()

    def _wait_for_first(self) -> None:
        is_over = torch.zeros(1)
        while not is_over:
            dist.broadcast(is_over, 0, group=self.group)

    def sum(self, *values: float) -> list[float]:
        """Sums each number over all ranks, in double precision.

        Raises:
            PeerFailure: a rank is gone, or gives no sign of life.
        """
        if self._watched is None:
            return list(values)
        own = struct.pack(f"{len(values)}d", *values)
        gathered = gather_bytes(own, self._watched, torch.device("cpu"), _SUM)
        return [
            sum(column)
            for column in zip(*(struct.unpack(f"{len(values)}d", row) for row in gathered), strict=True)
        ]

    def collect(self, value: Result) -> list[Result]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values
