"""Users' own collectives and allocators, behind the same interface as a group's collectives.

The engine's own buffers do not change. A staged call copies its input into a buffer from the user's allocator, runs the
user's collective (or the group's) between such buffers, and copies the result out on the same stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardwise.comm.collectives.group import DONE, GroupCollectives, Work, WrappedCollectives
from shardwise.errors import ConfigError
from shardwise.torch_internals import backend_of, symmetric_memory

Allocate = Callable[..., torch.Tensor]


class Comm(Protocol):
    """Allocates the buffers of a collective."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...


class AllGather(Comm, Protocol):
    """A user's all-gather. Parameters of all dtypes travel as bytes."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Work | None: ...


class ReduceScatter(Comm, Protocol):
    """A user's reduce-scatter."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Work | None: ...


class StagedCollectives(WrappedCollectives):
    """A group whose gathers and reduces use a user's buffers; ``set_by`` names the setting that asked for it."""

    def __init__(
        self,
        inner: GroupCollectives,
        allocate: Allocate,
        all_gather: AllGather | None = None,
        reduce_scatter: ReduceScatter | None = None,
        *,
        set_by: str,
    ) -> None:
        super().__init__(inner)
        self.set_by = set_by
        self._allocate = allocate
        self._own_all_gather = all_gather
        self._own_reduce_scatter = reduce_scatter

    def issue_all_gather(self, output: torch.Tensor, own: torch.Tensor, code: int) -> Work:
        sent, received = self._staged(own), self._buffer_like(output)
        if self._own_all_gather is None:
            work: Work | None = self.inner.issue_all_gather(received, sent, code)
        else:
            self.channel.record(code)
            work = self._own_all_gather(received, sent, self.group, async_op=True)
        return _Staged(work, sent, received, output)

    def issue_reduce_scatter(
        self, output: torch.Tensor, rows: torch.Tensor, average: bool, code: int
    ) -> Work:
        sent, received = self._staged(rows), self._buffer_like(output)
        if self._own_reduce_scatter is None:
            work: Work | None = self.inner.issue_reduce_scatter(received, sent, average, code)
        else:
            self.channel.record(code)
            op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
            work = self._own_reduce_scatter(received, sent, self.group, op, async_op=True)
        return _Staged(work, sent, received, output)

    def _buffer_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._allocate(tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device)

    def _staged(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._buffer_like(tensor).copy_(tensor)


class HookedCollectives(WrappedCollectives):
    """A group whose reduces are a user's communication hook, as torch defines them; the hook also divides."""

    def __init__(self, inner: GroupCollectives, state: object, hook: Callable[..., object]) -> None:
        super().__init__(inner)
        self._state = state
        self._hook = hook

    def issue_reduce_scatter(
        self, output: torch.Tensor, rows: torch.Tensor, average: bool, code: int
    ) -> Work:
        if self.world == 1:
            # Nothing is scattered: a hook then averages in place, as without sharding.
            output.copy_(rows.view_as(output))
            self._hook(self._state, output)
        else:
            self._hook(self._state, rows, output)
        return DONE

    def issue_all_reduce(self, tensor: torch.Tensor, average: bool, code: int) -> Work:
        self._hook(self._state, tensor)
        return DONE


class _Staged:
    def __init__(
        self, work: Work | None, sent: torch.Tensor, received: torch.Tensor, output: torch.Tensor
    ) -> None:
        self._work = work
        self._sent = sent  # alive: until the collective has read it
        self._received = received
        self._output = output

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._output.copy_(self._received)


def group_allocate(calls: GroupCollectives) -> Allocate | None:
    """Returns the backend's allocator for communication buffers, if it has one."""
    backend = backend_of(calls.group, calls.device)
    if not backend.supports_tensor_alloc(calls.device):
        return None

    def allocate(size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        numel = torch.Size(size).numel()
        made: torch.Tensor = backend.allocate_tensor(numel, dtype=dtype, device=device)
        return made.view(size)

    return allocate


def symmetric_allocate(calls: GroupCollectives, backend: str, where: str) -> Allocate:
    """Returns an allocator of symmetric memory, which all ranks of the group can access."""
    if backend != "NCCL" or calls.backend != "nccl":
        raise ConfigError(
            f"symmetric memory needs NCCL, but '{backend}' was asked for on a '{calls.backend}' group",
            where=where,
            fix="initialise the process group with NCCL and pass backend='NCCL', or leave it off",
        )
    return symmetric_memory(calls.group)
