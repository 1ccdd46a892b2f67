"""A process group's collectives, looked up once and called directly.

``torch.distributed``'s own functions check and translate their arguments on every call; here that is done once per
group. Two properties of a group decide how the engine uses it:

``ordered_by_stream``: a collective is ordered by the stream it is issued on, and waiting for it does not block the host
(NCCL). Otherwise waiting blocks the host (gloo), so the engine waits as late as possible.

``averages``: the group divides by its size while it sums.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import AllreduceOptions, AllToAllOptions, ReduceScatterOptions

from shardwise import policies
from shardwise.comm.channels.backend import BackendChannel
from shardwise.comm.channels.gloo import GlooChannel
from shardwise.comm.channels.threads import ThreadChannel
from shardwise.comm.channels.watched import UNNAMED, Channel, WatchedChannel
from shardwise.comm.watchdog.thread import WATCHDOG
from shardwise.torch_internals import AllgatherOptions, all_gather_call, backend_name, reduce_scatter_call

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


_channels_lock = threading.Lock()
_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Channel]] = weakref.WeakKeyDictionary()


def channel_of(group: dist.ProcessGroup, device: torch.device) -> Channel:
    """Returns the one channel of a group: everything sent over the group must be in one log."""
    with _channels_lock:
        channels = _channels.setdefault(group, {})
        if device.type not in channels:
            channels[device.type] = channel = _make_channel(group, device)
            if isinstance(channel, WatchedChannel) and channel.checks:
                WATCHDOG.watch(channel)
        return channels[device.type]


def _make_channel(group: dist.ProcessGroup, device: torch.device) -> Channel:
    backend = backend_name(group, device)
    if group.size() == 1 or backend == "fake":
        return Channel(group, device)
    if device.type == "cpu" and backend == "gloo":
        return GlooChannel(group, device)
    if device.type == "cpu" and backend == "threaded":
        return ThreadChannel(group, device)
    return Channel(group, device) if policies.trust().checks == "off" else BackendChannel(group, device)


class GroupCollectives:
    """The collectives of one process group, as the engine calls them."""

    # Whether many tensors can be gathered in one operation, each into its own output.
    gathers_each = False
    # Whether there are no other ranks to ask: a dry run (``comm/dry_run``).
    is_dry = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        backend = backend_name(group, device)
        self.backend = backend
        self.device = device
        self.group = group
        self.world = group.size()
        self.rank = group.rank()
        self.ordered_by_stream = device.type == "cuda" and backend in ("nccl", "fake")
        # The fake group stands in for NCCL: it accepts any operation and transfers nothing.
        self.averages = backend in ("nccl", "fake")
        self.gathers_each = self.ordered_by_stream
        self.channel = channel_of(group, device)
        self._all_gather = all_gather_call(group)
        self._reduce_scatter = reduce_scatter_call(group)
        self._gather_options = AllgatherOptions()
        self._sum_options = _reduce_scatter_options(dist.ReduceOp.SUM)
        self._average_options = _reduce_scatter_options(dist.ReduceOp.AVG)
        self._exchange_options = AllToAllOptions()
        if self.ordered_by_stream:
            # The collective runs on the stream it is issued on, our side stream: it needs no stream of its own and no
            # events to synchronize the two.
            for options in (
                self._gather_options,
                self._sum_options,
                self._average_options,
                self._exchange_options,
            ):
                options.asyncOp = False

    def issue_all_gather(self, output: torch.Tensor, own: torch.Tensor, code: int = UNNAMED) -> Work:
        """Gathers every rank's ``own`` into ``output``, in rank order; ``code`` is its event in the log."""
        channel = self.channel
        if channel.carries_data:
            gathered: Work = channel.gather(output, own, code)
            return gathered
        channel.record(code)
        try:
            return self._all_gather(output, own, self._gather_options) or DONE
        except dist.DistBackendError as error:
            channel.fail(error)

    @property
    def lends_rows(self) -> bool:
        """Whether all ranks can currently read each other's rows in shared memory."""
        return self.channel.lends_rows

    def issue_all_gather_lent(self, output: torch.Tensor, own: torch.Tensor, code: int = UNNAMED) -> LentRows:
        """Lets every rank read every rank's ``own`` in shared memory; ``output`` only has the shape of the result."""
        lent: LentRows = self.channel.gather_lent(output, own, code)
        return lent

    def lend(self, num_bytes: int) -> torch.Tensor | None:
        """Returns shared memory for rows that other ranks will read, or None if there is none."""
        return self.channel.lend(num_bytes)

    def issue_all_gather_each(
        self, outputs: list[torch.Tensor], owns: list[torch.Tensor], code: int = UNNAMED
    ) -> Work:
        """Gathers every rank's ``owns``, each into its output, in one operation."""
        self.channel.record(code)
        return self._issue(self.group.allgather_into_tensor_coalesced, outputs, owns, self._gather_options)

    def issue_reduce_scatter(
        self, output: torch.Tensor, rows: torch.Tensor, average: bool, code: int = UNNAMED
    ) -> Work:
        """Reduces the rows of all ranks; this rank's row arrives in ``output``."""
        channel = self.channel
        if channel.carries_data:
            reduced: Work = channel.reduce_scatter(output, rows, code)
            return reduced
        channel.record(code)
        options = self._average_options if average else self._sum_options
        try:
            return self._reduce_scatter(output, rows, options) or DONE
        except dist.DistBackendError as error:
            channel.fail(error)

    def issue_exchange(self, output: torch.Tensor, rows: torch.Tensor, code: int = UNNAMED) -> Work:
        """Sends each rank its row; the rows of all ranks for this one arrive in ``output``, in rank order."""
        channel = self.channel
        if channel.carries_data:
            exchanged: Work = channel.exchange(output, rows, code)
            return exchanged
        channel.record(code)
        return self._issue(self.group.alltoall_base, output, rows, [], [], self._exchange_options)

    def issue_all_reduce(self, tensor: torch.Tensor, average: bool, code: int = UNNAMED) -> Work:
        self.channel.before_backend_collective(code)
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
        work = self._issue(self.group.allreduce, [tensor], options)
        self.channel.after_backend_collective()
        return work

    def _issue(self, call: Callable[..., Any], *args: Any) -> Work:
        """Calls one of the group's own collectives; if it raises because the epoch has failed, raises that failure.

        The two calls that every unit makes in every step do this inline.
        """
        try:
            return call(*args) or DONE
        except dist.DistBackendError as error:
            self.channel.fail(error)


class SingleRankCollectives(GroupCollectives):
    """The collectives of a single rank: no group, no communication."""

    def __init__(self, device: torch.device, ordered_by_stream: bool) -> None:
        self.backend = "solo"
        self.channel = Channel(None, device)
        self.device = device
        self.world = 1
        self.rank = 0
        self.ordered_by_stream = ordered_by_stream
        self.averages = True

    def issue_all_gather(self, output: torch.Tensor, own: torch.Tensor, code: int = UNNAMED) -> Work:
        if output.data_ptr() != own.data_ptr():
            output.copy_(own)
        return DONE

    def issue_reduce_scatter(
        self, output: torch.Tensor, rows: torch.Tensor, average: bool, code: int = UNNAMED
    ) -> Work:
        output.copy_(rows)
        return DONE

    def issue_all_reduce(self, tensor: torch.Tensor, average: bool, code: int = UNNAMED) -> Work:
        return DONE


def _reduce_scatter_options(op: Any) -> Any:
    options = ReduceScatterOptions()
    options.reduceOp = op
    return options
