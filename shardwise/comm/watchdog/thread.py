"""The watchdog's thread: finds out why this rank is waiting, and ends a wait that would never end.

It checks every channel a few times a second. While ranks make progress it only posts a heartbeat now and then. A rank
that has made no progress for a moment posts its status to the store; a rank that waits reads the statuses of the
others and passes them to ``diagnose``. A peer that is alive and merely late is logged, with its stack. The first
failure posted for an epoch counts: every rank that waits, now or later, raises it.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import re
import threading
import time
import weakref
from dataclasses import dataclass, field

import torch.distributed as dist

from shardwise import policies
from shardwise.comm.channels.channel import LogExcerpt, collective_name
from shardwise.comm.channels.watched import EpochFailure, Waiting, WatchedChannel, is_lost_connection
from shardwise.comm.watchdog.diagnosis import Evidence, collect_evidence, describe_late_ranks, diagnose
from shardwise.comm.watchdog.stacks import stack_of
from shardwise.comm.watchdog.store import Entry
from shardwise.errors import PeerFailure
from shardwise.torch_internals import num_issued

_LOGGER = logging.getLogger("shardwise")
_TICK_SECONDS = 0.05
# How long a rank may make no progress before it posts its status and, if it waits, asks why; less for short timeouts.
_IDLE_SECONDS = 0.4
_IDLES_IN_TIMEOUT = 20.0
# A rank posts its status at least this often, as a heartbeat.
_LONGEST_HEARTBEAT_SECONDS = 5.0
# The longer a rank has made no progress, the less often it is checked.
_LONGEST_BETWEEN_CHECKS_SECONDS = 1.0
_CHECKS_IN_STILL = 40.0
# How often, at least, the warning about a late rank is repeated.
_LONGEST_BETWEEN_WARNINGS_SECONDS = 300.0
# A rank posts its stack after this fraction of the timeout (and heartbeats are at least as frequent).
_LATE_FRACTION = 0.25
# For how long after a failure this rank helps its peers out of their collectives.
_HELP_PEERS_SECONDS = 15.0
_JOIN_SECONDS = 1.0
# How long the store may take to answer before this rank decides by itself; and when a store that failed is tried again.
_STORE_TIMEOUT_SECONDS = 5.0
_STORE_RETRY_SECONDS = 1.0
_SILENT_STORE_CHECK_SECONDS = 1.0
_NUM_EVENTS_POSTED = 64
# About how many ranks of a group read all statuses in each round.
_NUM_READERS = 16
# torch's collectives that no rank leaves long before the others.
_TORCH_COLLECTIVE = re.compile(
    r'File ".*torch/distributed/distributed_c10d\.py", line \d+, in '
    r"(barrier|monitored_barrier|all_reduce|all_gather|all_to_all|reduce_scatter)"
)
_STORE_SILENT = "the process group's store does not answer"
# Errors of the store for which this process is to blame: the store itself is still there.
_OUT_OF_RESOURCES = tuple(map(os.strerror, (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)))
_DEBUGGERS = ("pdb.py", "bdb.py", "pydevd", "debugpy", "ipdb")


@dataclass
class _Observation:
    """What the watchdog has seen of one channel."""

    position: tuple[int, ...] = ()
    still_since: float = 0.0
    last_status: float = 0.0
    num_statuses: int = 0
    num_beats: int = 0
    last_check: float = 0.0
    last_diagnosis: float = 0.0
    num_diagnoses: int = 0
    failed_at: float | None = None
    # After how long a wait the next warning about late ranks is due.
    warns_after: float = 0.0
    helps_peers_until: float = 0.0
    is_gone: bool = False
    # Per peer: its last heartbeat, and when that changed during this wait; and since when this rank has been listening.
    beats: dict[int, int] = field(default_factory=dict)
    heard_at: dict[int, float] = field(default_factory=dict)
    listening_since: float = 0.0
    # World ranks that this rank waits for, directly or through others; and group ranks whose processes it sees alive.
    blocked_on: set[int] = field(default_factory=set)
    sees: list[int] = field(default_factory=list)
    # The torch collective in which this rank was last found, with how many it had issued by then; and since when.
    inside: tuple[str, int] | None = None
    inside_since: float = 0.0
    # Since when the store fails, when it is tried again, whether it is gone for good, and its error if not.
    no_store_since: float | None = None
    retries_store_at: float = 0.0
    is_store_gone: bool = False
    store_error: str = ""
    last_error: str = ""

    def still_seconds(self, position: tuple[int, ...], now: float) -> float:
        """Returns for how long the rank has made no progress."""
        if position != self.position:
            self.position, self.still_since = position, now
            self.num_statuses, self.failed_at, self.warns_after = 0, None, 0.0
            self.listening_since = now
            for per_wait in (self.beats, self.heard_at, self.blocked_on, self.sees):
                per_wait.clear()
        return now - self.still_since

    def seconds_inside(self, stack: list[str], num_issued: int | None, now: float) -> float:
        """Returns for how long the rank has been inside the same call of a torch collective."""
        found = _TORCH_COLLECTIVE.search(stack[-1]) if stack else None
        inside = (stack[-1], num_issued) if found and num_issued is not None else None
        if inside is None or inside != self.inside:
            self.inside, self.inside_since = inside, now
        return now - self.inside_since


class Watchdog:
    """The watchdog of this process, over all its channels."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: weakref.WeakKeyDictionary[WatchedChannel, _Observation] = weakref.WeakKeyDictionary()
        self._thread: threading.Thread | None = None
        # Since when a channel is being checked: the thread may be waiting for its store.
        self._checking_since: float | None = None
        self._is_stopping = threading.Event()
        # A thread that uses a store while the interpreter shuts down would crash the process.
        atexit.register(self._stop)

    def watch(self, channel: WatchedChannel) -> None:
        with self._lock:
            self._seen[channel] = _Observation()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="shardwise watchdog", daemon=True)
                self._thread.start()
                threading.Thread(
                    target=self._check_for_silent_store, name="shardwise watchdog's store check", daemon=True
                ).start()

    def channels(self) -> list[WatchedChannel]:
        """Returns all channels that are being watched."""
        with self._lock:
            return list(self._seen)

    def _stop(self) -> None:
        self._is_stopping.set()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while not self._is_stopping.wait(_TICK_SECONDS):
            with self._lock:
                all_seen = list(self._seen.items())
            for channel, seen in all_seen:
                self._check_channel(channel, seen)
            self._checking_since = None
            all_seen.clear()

    def _check_channel(self, channel: WatchedChannel, seen: _Observation) -> None:
        self._checking_since = now = time.monotonic()
        try:
            if channel.is_over():
                with self._lock:
                    self._seen.pop(channel, None)
            elif now < seen.retries_store_at:
                self._check_without_store(channel, seen)
            else:
                self._check(channel, seen)
                if seen.no_store_since is not None:
                    # Until now the other ranks could not post either: their silence counts from here.
                    seen.no_store_since, seen.listening_since, channel.is_store_silent = None, now, False
        except Exception as error:  # noqa: BLE001  without its watchdog a rank could wait forever
            self._record_store_error(channel, seen, error, now)

    def _check_for_silent_store(self) -> None:
        """Takes over while the store's process is stopped: a call to it then blocks the watchdog without failing."""
        while not self._is_stopping.wait(_SILENT_STORE_CHECK_SECONDS):
            since = self._checking_since
            if since is None or time.monotonic() - since < _STORE_TIMEOUT_SECONDS:
                continue
            with self._lock:
                all_seen = list(self._seen.items())
            for channel, seen in all_seen:
                channel.is_store_silent = True
                if seen.no_store_since is None:
                    seen.no_store_since = since
                seen.is_store_gone, seen.store_error = True, _STORE_SILENT
                self._check_without_store(channel, seen)
            all_seen.clear()

    def end_rank(self, thread: int) -> None:
        """Tells peers that wait for the rank on this thread that it has ended."""
        with self._lock:
            ended = [(channel, seen) for channel, seen in self._seen.items() if channel.thread == thread]
        for channel, seen in ended:
            if not channel.is_over():
                seen.is_gone = True
                channel.post_to_peers(self._post_status, channel, seen, None, 0.0, time.monotonic())

    def _record_store_error(
        self, channel: WatchedChannel, seen: _Observation, error: Exception, now: float
    ) -> None:
        """Handles a failed check: the store died with the rank that hosts it, or this process is out of a resource."""
        if channel.is_over():
            return
        is_of_store = isinstance(error, dist.DistError) or is_lost_connection(error)
        seen.is_store_gone = is_of_store and not any(reason in str(error) for reason in _OUT_OF_RESOURCES)
        store_error = _STORE_SILENT if seen.is_store_gone else f"this rank cannot use the store: {error}"
        if not seen.is_store_gone and seen.store_error != store_error:
            _LOGGER.warning(
                "rank %d: the watchdog fails and will try again", channel.world_rank, exc_info=error
            )
        seen.store_error = store_error
        seen.retries_store_at = now + _STORE_RETRY_SECONDS
        if seen.no_store_since is None:
            seen.no_store_since = now
        self._check_without_store(channel, seen)

    def _check(self, channel: WatchedChannel, seen: _Observation) -> None:
        now = time.monotonic()
        # The training thread may leave this epoch at any moment; everything below is about this epoch.
        epoch, num_events = channel.log.epoch, channel.log.num_events
        waiting = channel.current_wait()
        if now < max(seen.helps_peers_until, channel.restarted_at + _HELP_PEERS_SECONDS):
            channel.help_peers()
        still_seconds = seen.still_seconds((epoch, num_events, channel.num_moves, id(waiting)), now)
        timeout_seconds = policies.trust().timeout_seconds
        idle_seconds = min(_IDLE_SECONDS, timeout_seconds / _IDLES_IN_TIMEOUT)
        heartbeat_seconds = min(_LONGEST_HEARTBEAT_SECONDS, timeout_seconds * _LATE_FRACTION)
        if still_seconds < idle_seconds:
            if now - seen.last_status >= heartbeat_seconds:
                self._post_status(channel, seen, waiting, still_seconds, now)
            return
        if channel.failure is None and now - seen.last_check < min(
            _LONGEST_BETWEEN_CHECKS_SECONDS, still_seconds / _CHECKS_IN_STILL
        ):
            return
        seen.last_check = now
        known: Entry | None = None
        if channel.failure is None:
            known = channel.store.failure(epoch)
            if known is not None and not channel.is_void(known, epoch):
                seen.helps_peers_until = now + _HELP_PEERS_SECONDS
                seen.failed_at = now
                if waiting is not None:
                    channel.set_failure(known, epoch)
        if waiting is not None and channel.failure is not None:
            seen.failed_at = now if seen.failed_at is None else seen.failed_at
            channel.release_wait(waiting, now - seen.failed_at)
            return
        backoff_seconds = min(heartbeat_seconds, idle_seconds * 2.0 ** min(seen.num_statuses, 10))
        post_interval_seconds = (
            max(idle_seconds, channel.world / 100) if waiting is not None else backoff_seconds
        )
        if now - seen.last_status >= post_interval_seconds:
            seen.num_statuses += 1
            self._post_status(channel, seen, waiting, still_seconds, now)
        if waiting is not None and self._is_its_turn(channel, seen, idle_seconds, now):
            own = channel.log.excerpt()
            # If the rank has made progress meanwhile, its new wait has only just begun.
            if (own.epoch, own.num_events) == (epoch, num_events):
                self._diagnose(channel, seen, waiting, own, still_seconds, known)

    def _diagnose(
        self,
        channel: WatchedChannel,
        seen: _Observation,
        waiting: Waiting,
        own: LogExcerpt,
        still_seconds: float,
        known: Entry | None,
    ) -> None:
        """Ends the epoch if the rank waits in vain; warns of late ranks if it has waited for long."""
        evidence = self._collect_evidence(channel, seen, own, still_seconds)
        failure = diagnose(channel, waiting, evidence)
        if failure is not None:
            channel.end_epoch(own.epoch, failure, void=known)
        elif still_seconds >= max(policies.trust().timeout_seconds, seen.warns_after):
            seen.warns_after = still_seconds + min(still_seconds, _LONGEST_BETWEEN_WARNINGS_SECONDS)
            late = describe_late_ranks(channel, waiting, evidence)
            if late is not None:
                _LOGGER.warning("rank %d is still waiting: %s", channel.world_rank, late)

    def _post_status(
        self,
        channel: WatchedChannel,
        seen: _Observation,
        waiting: Waiting | None,
        still_seconds: float,
        now: float,
    ) -> None:
        seen.last_status = now
        seen.num_beats += 1
        status = _status(channel, waiting, seen, still_seconds)
        status["blocked_on"] = self._blocked_on(channel)
        channel.store.post_status(status)

    def _blocked_on(self, channel: WatchedChannel) -> list[int]:
        """Returns the world ranks that this rank waits for, on any channel."""
        with self._lock:
            own = [
                seen
                for each, seen in self._seen.items()
                if each.world_rank == channel.world_rank and each.waiting
            ]
        return sorted(set().union(*(seen.blocked_on for seen in own)))

    def _collect_evidence(
        self, channel: WatchedChannel, seen: _Observation, own: LogExcerpt, still_seconds: float
    ) -> Evidence:
        now = time.monotonic()
        statuses, silent_seconds = {}, {}
        for rank, status in channel.store.statuses().items():
            if rank == channel.rank:
                continue
            if seen.beats.setdefault(rank, status["beat"]) != status["beat"]:
                seen.beats[rank], seen.heard_at[rank] = status["beat"], now
            if status["epoch"] == own.epoch:
                statuses[rank] = status
            elif status["gone"] and status["epoch"] < own.epoch:
                statuses[rank] = {**status, "num_events": 0, "events": []}
        for rank in range(channel.world):
            silent_seconds[rank] = min(
                still_seconds, now - max(seen.listening_since, seen.heard_at.get(rank, 0.0))
            )
        evidence = collect_evidence(channel, own, statuses, silent_seconds, still_seconds)
        seen.sees = [rank for rank, state in evidence.behind.items() if state == "alive"]
        seen.blocked_on = {channel.ranks[rank] for rank in evidence.behind}.union(
            *(statuses[rank]["blocked_on"] for rank in evidence.behind if rank in statuses)
        )
        return evidence

    def _is_its_turn(
        self, channel: WatchedChannel, seen: _Observation, idle_seconds: float, now: float
    ) -> bool:
        """Limits how many ranks read all statuses at the same time: the store has a single server.

        Some ranks read every time, so that they know who has been silent; the others take turns, in case these do not
        wait.
        """
        if now - seen.last_diagnosis < max(idle_seconds / 2, channel.world / 100):
            return False
        seen.last_diagnosis = now
        seen.num_diagnoses += 1
        turns = -(-channel.world // _NUM_READERS)
        return channel.rank % turns == 0 or (channel.rank + seen.num_diagnoses) % turns == 0

    def _check_without_store(self, channel: WatchedChannel, seen: _Observation) -> None:
        """Checks a channel while the store is unusable: nothing but the timeouts is left to go by."""
        try:
            self._fail_after_timeout(channel, seen)
        except Exception as error:
            if seen.last_error != repr(error):
                seen.last_error = repr(error)
                _LOGGER.exception("rank %d: the watchdog failed", channel.world_rank)

    def _fail_after_timeout(self, channel: WatchedChannel, seen: _Observation) -> None:
        epoch = channel.log.epoch
        waiting = channel.current_wait()
        now = time.monotonic()
        still_seconds = seen.still_seconds(
            (epoch, channel.log.num_events, channel.num_moves, id(waiting)), now
        )
        # If only this rank cannot use the store, the other ranks may be well, and the trouble may pass.
        limit_seconds = policies.trust().timeout_seconds if seen.is_store_gone else channel.late_seconds()
        no_store_seconds = 0.0 if seen.no_store_since is None else now - seen.no_store_since
        if waiting is None or min(still_seconds, no_store_seconds) < limit_seconds:
            return
        if channel.failure is None:
            seen.failed_at = now
            failure = EpochFailure(
                PeerFailure,
                f'other ranks did not reach "{collective_name(waiting.code)}" within {still_seconds:.1f} s, and their '
                f"state is unknown: {seen.store_error}",
                "look for the rank that died in the job's logs; restart from the last checkpoint",
            )
            channel.set_failure(failure.as_entry(), epoch)
        channel.release_wait_without_store(waiting)


def _status(
    channel: WatchedChannel, waiting: Waiting | None, seen: _Observation, still_seconds: float
) -> Entry:
    # Reading a stack interrupts the rank, and while a rank is merely busy nobody needs its stack.
    is_late = still_seconds >= policies.trust().timeout_seconds * _LATE_FRACTION
    stack = stack_of(channel.thread) if is_late else []
    group = channel.group_if_alive()
    issued = num_issued(group) if is_late and group is not None else None
    excerpt = channel.log.excerpt(_NUM_EVENTS_POSTED)
    return {
        "beat": seen.num_beats,
        "epoch": excerpt.epoch,
        "num_events": excerpt.num_events,
        "events": excerpt.names,
        "waiting": None if waiting is None else collective_name(waiting.code),
        "bytes": getattr(waiting, "message_bytes", 0),
        "still_seconds": round(still_seconds, 1),
        "stack": stack[-12:],
        "in_debugger": any(name in line for line in stack for name in _DEBUGGERS),
        "sits_seconds": seen.seconds_inside(stack, issued, time.monotonic()),
        "sees": seen.sees,
        "blocked_on": [],
        "gone": seen.is_gone,
    }


WATCHDOG = Watchdog()
