"""A wire: one group as this rank's collectives see it, with the path they take and what becomes of it.

All talk of the engine on a group goes over the group's one wire, whoever asks. The wire notes each collective on its
path. How a difference between the paths of ranks shows depends on what carries the data:

    tagged    gloo: messages carry a tag made of the path; ranks that part wait, and no data is mixed
    meeting   ranks as threads: the same, by a table in memory
    native    all others: the group's own collectives carry the data, and paths are compared before an optimizer
              uses a step

A rank that waits is watched (``comm/watchdog/thread``): the watch finds out why, and ends the epoch with a *verdict*
that all ranks raise. Then they begin a new path, and the group can be used again if no rank was lost.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
import torch.distributed as dist

from shardwise import policies, trace
from shardwise.comm.channels.collective_log import CollectiveLog, collective_code, collective_name
from shardwise.comm.watchdog.stacks import stack_of
from shardwise.comm.watchdog.store import Entry, WatchdogStore
from shardwise.errors import PeerFailure, RankDisagreement, ShardwiseError
from shardwise.torch_internals import is_destroyed, store_of, timeout_seconds_of

_LOGGER = logging.getLogger("shardwise")
UNNAMED = collective_code("communicate for no unit")
_ERRORS: dict[str, type[ShardwiseError]] = {
    "PeerFailure": PeerFailure,
    "RankDisagreement": RankDisagreement,
}
_WATCHDOG_KNOWS_SECONDS = 8.0
_LONGEST_REASON = 500
# How gloo, NCCL and sockets say that nobody is at the other end any more.
_LOSSES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
    "caused pair closure",
    "remote process",
    "ncclRemoteError",
    "communicator was aborted",
)


class LostConnection(RuntimeError):
    """Nobody is at the other end any more."""


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error is what a rank sees of the end of another."""
    if isinstance(error, (LostConnection, dist.DistNetworkError)):
        return True
    # Backends raise this very class for all that can go wrong.
    is_of_a_backend = type(error) is RuntimeError or isinstance(error, dist.DistError)
    return is_of_a_backend and any(sign in str(error) for sign in _LOSSES)


def _no_group() -> None:
    return None


class EpochFailure(NamedTuple):
    """How an epoch ended."""

    error: type[ShardwiseError]
    what: str
    fix: str
    details: str = ""
    # The event in which others were waited for in vain. If they come at the last moment, and all ranks get past it
    # before any of them has raised, there is nothing to raise.
    place: int | None = None

    def as_entry(self) -> Entry:
        """As it is put on the board."""
        return {**self._asdict(), "error": self.error.__name__}


class Waiting(Protocol):
    """What a training thread waits on."""

    @property
    def code(self) -> int: ...


class BackendWait:
    """A wait for collectives that are not the wire's; one that looks for the verdict itself need not be let out."""

    def __init__(self, code: int, *, polls_failure: bool) -> None:
        self.code = code
        self.polls_failure = polls_failure


class Channel:
    """One group's collectives on this rank. This one checks nothing: for groups of one, or with trust off."""

    # Whether data travels over the wire itself; otherwise the group's own collectives carry it.
    carries = False

    # How long whoever waits on it waits; None where the watch ends waits.
    patience_seconds: float | None = None

    # Whether all ranks can read what others send where it lies, at the moment.
    lends_rows = False

    # While a CUDA graph is recorded: nothing runs that one could wait for.
    is_recorded = False

    # A mark behind the collective issued last: a device that does not reach it is stuck, and its host may be, too.
    # The engine's lanes mark their collectives anyway, and leave the mark here.
    last_event: Any = None

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        # Weak: a wire lives as long as its group, and must not keep it.
        self.group = weakref.ref(group) if group is not None else _no_group
        self.device = device
        self.world = group.size() if group is not None else 1
        self.rank = group.rank() if group is not None else 0
        self.log = CollectiveLog()
        self.num_models = 0
        # Counts what shows that this rank is getting on, though it takes no place in the path.
        self.num_moves = 0

    def record(self, code: int) -> int:
        """Adds an event to the path."""
        return self.log.record(code)

    def agree(self, code: int) -> None:
        """Returns when all ranks have come here by the same path; otherwise all of them raise."""

    def follow(self) -> None:
        """Marks what was issued last on the current stream, where no lane does."""

    def admit(self, code: int) -> None:
        """Comes before a collective of the group's own, which must not meet another of other sizes."""
        self.record(code)

    @contextlib.contextmanager
    def watched(self, code: int, *, polls_failure: bool = False) -> Iterator[None]:
        """Around waits for the group's own collectives: those that lead nowhere end with what the watch found out.

        Waits that look for a verdict themselves leave the group's connections as they are.
        """
        self.record(code)
        yield

    def gather(self, output: torch.Tensor, own: torch.Tensor, code: int) -> Any:
        raise NotImplementedError

    def gather_lent(self, output: torch.Tensor, own: torch.Tensor, code: int) -> Any:
        """Lets every rank read every rank's ``own``; ``output`` only stands for all of them."""
        raise NotImplementedError

    def reduce_scatter(self, output: torch.Tensor, rows: torch.Tensor, code: int) -> Any:
        raise NotImplementedError

    def exchange(self, output: torch.Tensor, rows: torch.Tensor, code: int) -> Any:
        raise NotImplementedError

    def lend(self, num_bytes: int) -> torch.Tensor | None:
        """Memory that other ranks can read, to write there what is reduced or exchanged next; None if there is none."""
        return None

    def land(self, work: Any) -> bool:
        """Whether a collective of this wire that nobody will wait for is over, so that nothing more lands."""
        raise NotImplementedError

    def break_off(self, what: str) -> None:
        """Tells peers that this rank has left the path, and begins a new one."""
        self.log.restart()

    def fail(self, error: BaseException) -> NoReturn:
        """Raises the reason why a collective failed, which may be more than the error says."""
        raise error


class WatchedChannel(Channel):
    """A wire on which ranks notice that they part, or that one of them does not come."""

    # How much earlier than the group itself its ranks give up waiting.
    margin_seconds = 0.0

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self.ranks = dist.get_process_group_ranks(group)
        self.own_rank = self.ranks[self.rank]
        self.is_whole_world = self.world == dist.get_world_size()
        self.thread = threading.get_ident()
        self.checks = policies.trust().checks != "off"
        self.store = WatchdogStore(store_of(group, "shardwise"), self.rank, self.world)
        # Set by the training thread, read by the watch.
        self.waiting: Waiting | None = None
        # Set by the watch, taken by the training thread: an epoch, and what it ended with.
        self._epoch_failure: tuple[int, ShardwiseError] | None = None
        # Set by the watch when the store does not answer: whoever asked it would wait with it.
        self.is_alone = False
        # When this rank last began a new path; peers may need its help to leave the old one.
        self.restarted_at = -math.inf

    @property
    def failure(self) -> ShardwiseError | None:
        """How this epoch ended, if it has. The watch may be late with that of one which this rank has left already."""
        sentence = self._epoch_failure
        return sentence[1] if sentence is not None and sentence[0] == self.log.epoch else None

    @contextlib.contextmanager
    def watched(self, code: int, *, polls_failure: bool = False) -> Iterator[None]:
        self.record(code)
        self.waiting = BackendWait(code, polls_failure=polls_failure)
        epoch = self.log.epoch
        try:
            yield
        except BaseException as error:
            if self.log.epoch == epoch:
                self.fail(error)
            # This rank has broken off by itself, and told its peers: the error is its own.
            raise
        finally:
            self.waiting = None
        self.follow()
        if self.failure is not None:
            self.raise_failure()

    # --- what the watch asks of it --------------------------------------------------------------------------------

    def is_over(self) -> bool:
        """Whether the group has ended: nobody is there to be watched, and its store may be gone."""
        group = self.group()
        return group is None or is_destroyed(group)

    def late_seconds(self) -> float:
        """How long a rank that is alive and running is waited for."""
        policy = policies.trust()
        late_seconds = policy.late_seconds
        if late_seconds is None:
            group = self.group()
            late_seconds = (
                0.0 if group is None else timeout_seconds_of(group, self.device) - self.margin_seconds
            )
        return max(policy.timeout_seconds, late_seconds)

    def current_wait(self) -> Waiting | None:
        """What this rank waits on, if it does."""
        return self.waiting

    def release_wait(self, waiting: Waiting, seconds_since_failure: float) -> None:
        """Makes the training thread return from a wait that a verdict has ended."""

    def release_wait_alone(self, waiting: Waiting) -> None:
        """The same when no peer can be asked for help."""

    def help_peers(self) -> None:
        """Helps peers out of collectives that a verdict has ended."""

    def set_failure(self, failure: Entry, epoch: int) -> None:
        """Notes how an epoch ended, for the training thread to raise; it may be leaving that epoch at this moment."""
        error = _ERRORS[failure["error"]](failure["what"], where=self._where(), fix=failure["fix"])
        if failure["details"]:
            error.what = f"{error.what}\n{failure['details']}"
        self._epoch_failure = (epoch, error)

    def end_epoch(self, epoch: int, failure: EpochFailure, void: Entry | None = None) -> None:
        """Ends an epoch for all ranks, unless another rank has done so already."""
        self.store.end_epoch(epoch, failure.as_entry(), void)

    def is_void(self, failure: Entry, epoch: int) -> bool:
        """Whether what a verdict is about has passed, and no rank has raised it."""
        place = failure["place"]
        return place is not None and self.log.num_events > place and not self.store.is_taken(epoch)

    # --- failing --------------------------------------------------------------------------------------------------

    def raise_failure(self) -> None:
        """Raises the verdict, if there is one, and begins a new path."""
        error = self.failure
        if error is not None:
            # It will hold on to whatever the frames that it passes hold.
            self._epoch_failure = None
            self._save_events(error)
            self.tell_peers(self.store.take, self.log.epoch)
            self._restart_log()
            raise error

    def break_off(self, what: str) -> None:
        failure = EpochFailure(
            PeerFailure,
            f"rank {self.own_rank} broke off its step: {what}",
            "read that rank's own error; ranks that catch theirs can go on with the next step together",
        )
        self.tell_peers(self.end_epoch, self.log.epoch, failure)
        self._restart_log()

    def tell_peers(self, tell: Callable[..., None], *what: Any) -> None:
        """Leaves a note for peers. Whether that works or not, what this rank has to raise stands."""
        if self.is_alone:
            return
        try:
            tell(*what)
        except Exception as error:  # noqa: BLE001  the store may be gone, with the rank that kept it
            _LOGGER.info("rank %d could not tell its peers why it stops: %s", self.own_rank, _in_short(error))

    def _restart_log(self) -> None:
        self.log.restart()
        self.restarted_at = time.monotonic()

    def fail(self, error: BaseException) -> NoReturn:
        """Raises the verdict, if there is one; else the loss of a peer, if it is that; else the error as it is."""
        is_lost = is_lost_connection(error)
        deadline = time.monotonic() + _WATCHDOG_KNOWS_SECONDS
        while is_lost and self.checks and self.failure is None and time.monotonic() < deadline:
            # The watch finds out more than a closed connection tells.
            time.sleep(0.05)
        if isinstance(error, Exception):
            self.raise_failure()
        if not is_lost:
            waiting = self.current_wait()
            place = f" when it was to {collective_name(waiting.code)}" if waiting else ""
            self.break_off(f"{type(error).__name__}{place}: {_in_short(error)}"[:_LONGEST_REASON])
            raise error
        lost = PeerFailure(
            f"the connection to another rank is lost: {_in_short(error)}",
            where=self._where(),
            fix="look for the rank that died in the job's logs; restart from the last checkpoint",
        )
        self._save_events(lost)
        self._restart_log()
        raise lost from error

    def _where(self) -> str:
        waiting = self.current_wait()
        return f"rank {self.own_rank}" + (f", waiting to {collective_name(waiting.code)}" if waiting else "")

    def _save_events(self, error: ShardwiseError) -> None:
        now = time.perf_counter_ns()
        file = trace.save_failure(
            policies.trust().trace_dir,
            trace.Failure(
                rank=self.own_rank,
                ranks=self.ranks,
                error=f"{type(error).__name__}: {error}",
                stack=stack_of(self.thread),
                num_events=self.log.num_events,
                events=[
                    (collective_name(code), (now - at_ns) / 1e9) for _, code, at_ns in tuple(self.log.events)
                ],
            ),
        )
        if file is not None:
            error.where = f"{error.where}; its last events are in {file}"


def _in_short(error: BaseException) -> str:
    """The first line of a backend's error; NCCL says what went wrong further down."""
    first, _, rest = str(error).partition("\n")
    cause = rest.partition("Last error:")[2].strip().partition("\n")[0]
    return f"{first}: {cause}" if cause else first
