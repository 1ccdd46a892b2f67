"""The collectives of a process group, as the engine calls them: a channel, or what a user has put around one.

``Channel`` (``comm/channels``) has the group's own. ``WrappedCollectives`` does some of them in another way and leaves
the rest to what it wraps: a user's collectives (``custom``), or sums in a fixed order (``engine/reduce/exact_sums``).

Two properties of a group decide how the engine uses it:

``ordered_by_stream``: a collective is ordered by the stream it is issued on, and waiting for it does not block the host
(NCCL). Otherwise waiting blocks the host (gloo), so the engine waits as late as possible.

``averages``: the group divides by its size while it sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from shardwise.comm.channels.channel import Channel

AllReduceHook = Callable[[torch.Tensor], None]


class Work(Protocol):
    """An issued collective."""

    def wait(self) -> Any: ...


class LentRows(Work, Protocol):
    """A gather whose rows are read in shared memory, between ``wait`` and ``release_rows``."""

    def row(self, rank: int) -> torch.Tensor: ...

    def release_rows(self) -> None: ...


class _Done:
    """A collective that is over or ordered by a stream: there is nothing to wait for."""

    def wait(self) -> None:
        pass


DONE = _Done()


def drain(work: Any) -> bool:
    """Returns whether an abandoned collective is over, so that its buffers can be reused; waits for it a moment."""
    work = getattr(work, "carried_by", work)
    channel: Channel | None = getattr(work, "channel", None)
    if channel is not None:
        return channel.drain(work)
    work.wait()
    return True


class GroupCollectives:
    """The collectives of one process group. ``code`` is a collective's event in the log."""

    device: torch.device
    backend: str
    world: int
    rank: int
    ordered_by_stream: bool
    averages: bool
    # Whether many tensors can be gathered in one operation, each into its own output.
    gathers_each = False
    # Whether all ranks can currently read each other's rows in shared memory.
    lends_rows = False
    # Whether there are no other ranks to ask: a dry run (``comm/dry_run``).
    is_dry = False

    @property
    def channel(self) -> Channel:
        """The group's channel, with the log of its collectives."""
        raise NotImplementedError

    @property
    def group(self) -> dist.ProcessGroup:
        raise NotImplementedError

    def lend(self, num_bytes: int) -> torch.Tensor | None:
        """Returns shared memory for rows that other ranks will read, or None if there is none."""
        raise NotImplementedError

    def issue_all_gather(self, output: torch.Tensor, own: torch.Tensor, code: int) -> Work:
        """Gathers every rank's ``own`` into ``output``, in rank order."""
        raise NotImplementedError

    def issue_all_gather_lent(self, output: torch.Tensor, own: torch.Tensor, code: int) -> LentRows:
        """Lets every rank read every rank's ``own`` in shared memory; ``output`` only has the shape of the result."""
        raise NotImplementedError

    def issue_all_gather_each(self, outputs: list[torch.Tensor], owns: list[torch.Tensor], code: int) -> Work:
        """Gathers every rank's ``owns``, each into its output, in one operation."""
        raise NotImplementedError

    def issue_reduce_scatter(
        self, output: torch.Tensor, rows: torch.Tensor, average: bool, code: int
    ) -> Work:
        """Reduces the rows of all ranks; this rank's row arrives in ``output``."""
        raise NotImplementedError

    def issue_exchange(self, output: torch.Tensor, rows: torch.Tensor, code: int) -> Work:
        """Sends each rank its row; the rows of all ranks for this one arrive in ``output``, in rank order."""
        raise NotImplementedError

    def issue_all_reduce(self, tensor: torch.Tensor, average: bool, code: int) -> Work:
        raise NotImplementedError


class WrappedCollectives(GroupCollectives):
    """The collectives of ``inner``, of which a subclass does some in another way."""

    def __init__(self, inner: GroupCollectives) -> None:
        self.inner = inner
        self.device, self.backend = inner.device, inner.backend
        self.world, self.rank = inner.world, inner.rank
        self.ordered_by_stream, self.averages = inner.ordered_by_stream, inner.averages

    @property
    def channel(self) -> Channel:
        return self.inner.channel

    @property
    def group(self) -> dist.ProcessGroup:
        return self.inner.group

    def lend(self, num_bytes: int) -> torch.Tensor | None:
        return None

    def issue_all_gather(self, output: torch.Tensor, own: torch.Tensor, code: int) -> Work:
        return self.inner.issue_all_gather(output, own, code)

    def issue_reduce_scatter(
        self, output: torch.Tensor, rows: torch.Tensor, average: bool, code: int
    ) -> Work:
        return self.inner.issue_reduce_scatter(output, rows, average, code)

    def issue_exchange(self, output: torch.Tensor, rows: torch.Tensor, code: int) -> Work:
        return self.inner.issue_exchange(output, rows, code)

    def issue_all_reduce(self, tensor: torch.Tensor, average: bool, code: int) -> Work:
        return self.inner.issue_all_reduce(tensor, average, code)
