"""Channels on which ranks notice that they have diverged, or that one of them is missing.

The watchdog (``comm/watchdog/thread``) finds out why a rank waits, and may end the epoch with a failure that all ranks
raise. Then they start new logs, and the group is usable again unless a rank was lost.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
import torch.distributed as dist

from shardwise import policies, trace
from shardwise.comm.channels.channel import GroupChannel, collective_name
from shardwise.comm.watchdog.stacks import stack_of
from shardwise.comm.watchdog.store import Entry, WatchdogStore
from shardwise.errors import LOST_PEER_TEXTS, PeerFailure, RankDisagreement, ShardwiseError
from shardwise.torch_internals import is_destroyed, store_of, timeout_seconds_of

_LOGGER = logging.getLogger("shardwise")
_ERRORS: dict[str, type[ShardwiseError]] = {
    "PeerFailure": PeerFailure,
    "RankDisagreement": RankDisagreement,
}
_WATCHDOG_KNOWS_SECONDS = 8.0
_LONGEST_REASON = 500
_LOST_CONNECTION_TEXTS = (
    *LOST_PEER_TEXTS,
    "caused pair closure",
    "remote process",
    "ncclRemoteError",
    "communicator was aborted",
)


class LostConnection(RuntimeError):
    """The peer is gone."""


def is_lost_connection(error: BaseException) -> bool:
    """Returns whether an error shows that another rank has gone."""
    if isinstance(error, (LostConnection, dist.DistNetworkError)):
        return True
    # Backends raise plain RuntimeError for everything.
    is_of_a_backend = type(error) is RuntimeError or isinstance(error, dist.DistError)
    return is_of_a_backend and any(sign in str(error) for sign in _LOST_CONNECTION_TEXTS)


class EpochFailure(NamedTuple):
    """The error that ended an epoch."""

    error: type[ShardwiseError]
    what: str
    fix: str
    details: str = ""
    # The number of the event in which this rank waited in vain. If all ranks get past it after all, before any of them
    # has raised, the failure is void.
    place: int | None = None

    def as_entry(self) -> Entry:
        """Returns the failure as JSON for the store."""
        return {**self._asdict(), "error": self.error.__name__}


class Waiting(Protocol):
    """What a training thread is waiting in."""

    @property
    def code(self) -> int: ...


class BackendWait:
    """A wait for the group's own collectives. One that polls for a failure needs no help to end."""

    def __init__(self, code: int, *, polls_failure: bool) -> None:
        self.code = code
        self.polls_failure = polls_failure


class WatchedChannel(GroupChannel):
    """A channel on which ranks notice that they have diverged, or that one of them is missing."""

    # How much earlier than the group's own timeout its ranks give up waiting.
    margin_seconds = 0.0

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self.ranks = dist.get_process_group_ranks(group)
        self.world_rank = self.ranks[self.rank]
        self.is_whole_world = self.world == dist.get_world_size()
        self.thread = threading.get_ident()
        self.checks = policies.trust().checks != "off"
        self.store = WatchdogStore(store_of(group, "shardwise"), self.rank, self.world)
        # Written by the training thread, read by the watchdog.
        self.waiting: Waiting | None = None
        # Written by the watchdog, read by the training thread: an epoch, and the error it ended with.
        self._epoch_failure: tuple[int, ShardwiseError] | None = None
        # Set by the watchdog while the store does not answer: a call to it would block.
        self.is_store_silent = False
        # When this rank last started a new log; peers may need its help to leave the old one.
        self.restarted_at = -math.inf

    @property
    def failure(self) -> ShardwiseError | None:
        """The error that ended this epoch, if any. The watchdog may be late, with one of an epoch already left."""
        ended = self._epoch_failure
        return ended[1] if ended is not None and ended[0] == self.log.epoch else None

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
            # This rank has aborted its step and told its peers: the error is its own.
            raise
        finally:
            self.waiting = None
        self.after_backend_collective()
        if self.failure is not None:
            self.raise_failure()

    # --- for the watchdog -----------------------------------------------------------------------------------------

    def is_over(self) -> bool:
        """Returns whether the group has been destroyed: there is nobody left to watch, and maybe no store."""
        group = self.group_if_alive()
        return group is None or is_destroyed(group)

    def late_seconds(self) -> float:
        """Returns how long to wait for a rank that is alive and running."""
        policy = policies.trust()
        late_seconds = policy.late_seconds
        if late_seconds is None:
            group = self.group_if_alive()
            late_seconds = (
                0.0 if group is None else timeout_seconds_of(group, self.device) - self.margin_seconds
            )
        return max(policy.timeout_seconds, late_seconds)

    def current_wait(self) -> Waiting | None:
        """Returns what this rank is waiting in, or None."""
        return self.waiting

    def release_wait(self, waiting: Waiting, seconds_since_failure: float) -> None:
        """Makes the training thread return from a wait after a failure."""

    def release_wait_without_store(self, waiting: Waiting) -> None:
        """Does the same when peers cannot be asked for help."""

    def help_peers(self) -> None:
        """Helps peers out of collectives that a failure has ended."""

    def set_failure(self, failure: Entry, epoch: int) -> None:
        """Keeps an epoch's failure for the training thread, which may be leaving that epoch at this moment."""
        error = _ERRORS[failure["error"]](failure["what"], where=self._where(), fix=failure["fix"])
        if failure["details"]:
            error.what = f"{error.what}\n{failure['details']}"
        self._epoch_failure = (epoch, error)

    def end_epoch(self, epoch: int, failure: EpochFailure, void: Entry | None = None) -> None:
        """Posts the failure that ends an epoch for all ranks, unless another rank has posted one."""
        self.store.end_epoch(epoch, failure.as_entry(), void)

    def is_void(self, failure: Entry, epoch: int) -> bool:
        """Returns whether this rank has got past the wait that the failure is about, and no rank has raised it."""
        place = failure["place"]
        return place is not None and self.log.num_events > place and not self.store.is_raised(epoch)

    # --- failures -------------------------------------------------------------------------------------------------

    def raise_failure(self) -> None:
        """Raises the epoch's failure, if there is one, and starts a new log."""
        error = self.failure
        if error is not None:
            # The error keeps alive whatever is held by the frames it passes through.
            self._epoch_failure = None
            self._save_events(error)
            self.post_to_peers(self.store.mark_raised, self.log.epoch)
            self._restart_log()
            raise error

    def abort_step(self, what: str) -> None:
        failure = EpochFailure(
            PeerFailure,
            f"rank {self.world_rank} aborted its step: {what}",
            "read that rank's own error; ranks that catch the error can go on with the next step together",
        )
        self.post_to_peers(self.end_epoch, self.log.epoch, failure)
        self._restart_log()

    def post_to_peers(self, post: Callable[..., None], *what: Any) -> None:
        """Posts something for the peers. If that fails, this rank still raises what it has to raise."""
        if self.is_store_silent:
            return
        try:
            post(*what)
        except Exception as error:  # noqa: BLE001  the store may have died with the rank that hosts it
            _LOGGER.info(
                "rank %d could not tell its peers why it stops: %s", self.world_rank, _summary(error)
            )

    def _restart_log(self) -> None:
        self.log.restart()
        self.restarted_at = time.monotonic()

    def fail(self, error: BaseException) -> NoReturn:
        """Raises the epoch's failure if there is one, else a PeerFailure if a connection was lost, else ``error``."""
        is_lost = is_lost_connection(error)
        deadline = time.monotonic() + _WATCHDOG_KNOWS_SECONDS
        while is_lost and self.checks and self.failure is None and time.monotonic() < deadline:
            # The watchdog finds out more than a closed connection shows.
            time.sleep(0.05)
        if isinstance(error, Exception):
            self.raise_failure()
        if not is_lost:
            waiting = self.current_wait()
            place = f' in "{collective_name(waiting.code)}"' if waiting else ""
            self.abort_step(f"{type(error).__name__}{place}: {_summary(error)}"[:_LONGEST_REASON])
            raise error
        lost = PeerFailure(
            f"lost the connection to another rank: {_summary(error)}",
            where=self._where(),
            fix="look for the rank that died in the job's logs; restart from the last checkpoint",
        )
        self._save_events(lost)
        self._restart_log()
        raise lost from error

    def _where(self) -> str:
        waiting = self.current_wait()
        return f"rank {self.world_rank}" + (
            f', waiting in "{collective_name(waiting.code)}"' if waiting else ""
        )

    def _save_events(self, error: ShardwiseError) -> None:
        now = time.perf_counter_ns()
        file = trace.save_failure(
            policies.trust().trace_dir,
            trace.Failure(
                rank=self.world_rank,
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


def _summary(error: BaseException) -> str:
    """Returns the first line of a backend's error; NCCL names the cause further down."""
    first, _, rest = str(error).partition("\n")
    cause = rest.partition("Last error:")[2].strip().partition("\n")[0]
    return f"{first}: {cause}" if cause else first
