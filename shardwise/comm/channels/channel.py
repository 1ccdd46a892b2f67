"""A channel: a process group's collectives on this rank, with the log of what has been issued.

Everything that shardwise sends over a group goes through the group's one channel (``registry``), which records each
collective in its log. How ranks notice that their logs differ depends on what carries the data:

    gloo      messages carry a tag made from the log: ranks that diverge wait, and no data is mixed
    threads   the same, with a table in memory
    backend   all others: the group's own collectives carry the data, and logs are compared before an optimizer uses
              a step

The log is a digest and the last events. Each collective is an event, identified by a code that is made once from its
name. The digest mixes the codes of all events in order: ranks with equal digests have issued the same events. An
*epoch* lasts from one failure to the next: after a failure that was caught, all ranks start a new log, whose digests
differ from those of the old one.

    digest   d0 ──code a──▶ d1 ──code b──▶ d2        ring   [..., (1, a, t), (2, b, t)]
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import AllreduceOptions, AllToAllOptions, ReduceScatterOptions

from shardwise.comm.collectives.group import DONE, GroupCollectives, Work
from shardwise.errors import StateError
from shardwise.torch_internals import AllgatherOptions, all_gather_call, backend_name, reduce_scatter_call

_MASK = (1 << 61) - 1
_MIX = 0x9E3779B97F4A7C1
_MAX_EVENTS = 4096
# Longer lists of names are abbreviated to the first two.
_LONGEST_LIST = 4

# Of the whole process, and never removed from: a name has the same code everywhere.
_names: dict[int, str] = {}


def collective_code(name: str) -> int:
    """Returns the code of an event with this name."""
    code = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") & _MASK
    _names[code] = name
    return code


def listed(names: Sequence[object]) -> str:
    """Returns a list as part of an event's name: short, and different for every list."""
    if len(names) <= _LONGEST_LIST:
        return repr([*names])
    first = ", ".join(map(repr, names[:2]))
    checksum = hashlib.blake2b(repr([*names]).encode(), digest_size=4).hexdigest()
    return f"[{first} and {len(names) - 2} more; checksum {checksum}]"


def collective_name(code: int) -> str:
    return _names[code]


class LogExcerpt(NamedTuple):
    """A log as it is posted: the number of its events, and the names of the last ones."""

    epoch: int
    num_events: int
    names: list[str]


class CollectiveLog:
    """What this rank has issued on one group since the last failure."""

    __slots__ = ("digest", "epoch", "events", "num_events")

    def __init__(self) -> None:
        self.epoch = -1
        self.restart()

    def restart(self) -> None:
        # The epoch last: another thread that reads the new one then finds no events of the old one.
        self.events: deque[tuple[int, int, int]] = deque(maxlen=_MAX_EVENTS)
        self.num_events = 0
        self.digest = self.epoch + 1
        self.epoch += 1

    def record(self, code: int) -> int:
        """Adds an event and returns the new digest."""
        self.digest = digest = (self.digest * _MIX + code) & _MASK
        self.num_events = number = self.num_events + 1
        self.events.append((number, code, time.perf_counter_ns()))
        return digest

    def excerpt(self, num_shown: int = _MAX_EVENTS) -> LogExcerpt:
        """Returns a consistent excerpt, for another thread, while this one may go on recording."""
        while True:
            epoch, events = self.epoch, tuple(self.events)
            if epoch == self.epoch:
                shown = [_names[code] for _, code, _ in events[-num_shown:]]
                return LogExcerpt(epoch, events[-1][0] if events else 0, shown)


def first_divergence(logs: Sequence[tuple[int, list[str]]]) -> int | None:
    """Returns the number of the first event in which logs differ, or None.

    A log is the number of its events and the names of the last ones. One that is merely shorter does not differ.
    """
    start = max(num_events - len(names) for num_events, names in logs)
    stop = max(num_events for num_events, _ in logs)
    for number in range(start, stop):
        known = {names[number - num_events] for num_events, names in logs if number < num_events}
        if len(known) > 1:
            return number
    return None


UNNAMED = collective_code("communicate outside a unit")


class Channel(GroupCollectives):
    """A group's collectives on this rank, with their log. This class checks nothing; its kinds transfer the data."""

    # Whether the channel itself carries the data; otherwise the group's own collectives do.
    carries_data = False

    # How long a wait may take; None where the watchdog ends waits.
    wait_timeout_seconds: float | None = None

    # Whether a CUDA graph is being captured: then nothing runs that one could wait for.
    is_capturing = False

    # An event behind the collective issued last: a device that does not reach it is stuck, and perhaps its host too.
    # The engine's side streams record such events anyway, and leave the last one here.
    last_event: Any = None

    def __init__(
        self,
        device: torch.device,
        backend: str,
        world: int = 1,
        rank: int = 0,
        *,
        ordered_by_stream: bool = False,
        averages: bool = False,
    ) -> None:
        self.device, self.backend = device, backend
        self.world, self.rank = world, rank
        self.ordered_by_stream, self.averages = ordered_by_stream, averages
        self.log = CollectiveLog()
        self.num_models = 0
        # Counts progress of this rank that is not an event in the log.
        self.num_moves = 0

    @property
    def channel(self) -> Channel:
        return self

    def lend(self, num_bytes: int) -> torch.Tensor | None:
        return None

    def record(self, code: int) -> int:
        """Adds an event to the log and returns the new digest."""
        return self.log.record(code)

    def agree(self, code: int) -> None:
        """Returns once all ranks are here with equal logs; otherwise all of them raise."""

    def after_backend_collective(self) -> None:
        """Records an event behind what was issued last on the current stream, where no side stream does."""

    def before_backend_collective(self, code: int) -> None:
        """Is called before one of the group's own collectives, which must not meet one of another size."""
        self.record(code)

    @contextlib.contextmanager
    def watched(self, code: int, *, polls_failure: bool = False) -> Iterator[None]:
        """Watches a wait for the group's own collectives: one that would never end raises what the watchdog found.

        A wait with ``polls_failure`` looks for the failure itself, so the group's connections are left alone.
        """
        self.record(code)
        yield

    def drain(self, work: Any) -> bool:
        """Returns whether an abandoned collective is over, so that it will write to no more memory."""
        raise NotImplementedError

    def abort_step(self, what: str) -> None:
        """Tells peers that this rank has abandoned its step, and starts a new log."""
        self.log.restart()

    def fail(self, error: BaseException) -> NoReturn:
        """Raises why a collective failed, which may say more than its error."""
        raise error


class SingleRankChannel(Channel):
    """A single rank: no group, no communication."""

    def __init__(self, device: torch.device, ordered_by_stream: bool) -> None:
        super().__init__(device, "solo", ordered_by_stream=ordered_by_stream, averages=True)

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


class GroupChannel(Channel):
    """A group whose own collectives carry the data, unchecked: a fake group, one of one rank, or with trust off.

    ``torch.distributed``'s own functions check and translate their arguments on every call; here that is done once.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        backend = backend_name(group, device)
        super().__init__(
            device,
            backend,
            group.size(),
            group.rank(),
            ordered_by_stream=device.type == "cuda" and backend in ("nccl", "fake"),
            # The fake group stands in for NCCL: it accepts any operation and transfers nothing.
            averages=backend in ("nccl", "fake"),
        )
        # Weak, and functions of its class: a channel lives as long as its group, and must not keep it alive.
        self._group = weakref.ref(group)
        self._all_gather = all_gather_call(type(group))
        self._reduce_scatter = reduce_scatter_call(type(group))
        self.gathers_each = self.ordered_by_stream
        self._gather_options = AllgatherOptions()
        self._sum_options = _reduce_scatter_options(dist.ReduceOp.SUM)
        self._average_options = _reduce_scatter_options(dist.ReduceOp.AVG)
        self._exchange_options = AllToAllOptions()
        if self.ordered_by_stream:
            # The collective runs on the stream it is issued on, our side stream: it needs no stream of its own and no
            # events to synchronize the two.
            everything = (
                self._gather_options,
                self._sum_options,
                self._average_options,
                self._exchange_options,
            )
            for options in everything:
                options.asyncOp = False

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise StateError(
                "a process group was used after it had been destroyed",
                where=f"rank {self.rank} of {self.world} of that group",
                fix="call destroy_process_group() only when the models sharded over the group are no longer used",
            )
        return group

    def group_if_alive(self) -> dist.ProcessGroup | None:
        return self._group()

    def issue_all_gather(self, output: torch.Tensor, own: torch.Tensor, code: int = UNNAMED) -> Work:
        self.record(code)
        try:
            return self._all_gather(self._group() or self.group, output, own, self._gather_options) or DONE
        except dist.DistBackendError as error:
            self.fail(error)

    def issue_all_gather_each(
        self, outputs: list[torch.Tensor], owns: list[torch.Tensor], code: int = UNNAMED
    ) -> Work:
        self.record(code)
        return self._issue(self.group.allgather_into_tensor_coalesced, outputs, owns, self._gather_options)

    def issue_reduce_scatter(
        self, output: torch.Tensor, rows: torch.Tensor, average: bool, code: int = UNNAMED
    ) -> Work:
        self.record(code)
        options = self._average_options if average else self._sum_options
        try:
            return self._reduce_scatter(self._group() or self.group, output, rows, options) or DONE
        except dist.DistBackendError as error:
            self.fail(error)

    def issue_exchange(self, output: torch.Tensor, rows: torch.Tensor, code: int = UNNAMED) -> Work:
        self.record(code)
        return self._issue(self.group.alltoall_base, output, rows, [], [], self._exchange_options)

    def issue_all_reduce(self, tensor: torch.Tensor, average: bool, code: int = UNNAMED) -> Work:
        self.before_backend_collective(code)
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
        work = self._issue(self.group.allreduce, [tensor], options)
        self.after_backend_collective()
        return work

    def _issue(self, call: Callable[..., Any], *args: Any) -> Work:
        """Calls one of the group's own collectives; if it raises because the epoch has failed, raises that failure.

        The two calls that every unit makes in every step do this inline, and ask for the group without a call.
        """
        try:
            return call(*args) or DONE
        except dist.DistBackendError as error:
            self.fail(error)


def _reduce_scatter_options(op: Any) -> Any:
    options = ReduceScatterOptions()
    options.reduceOp = op
    return options
