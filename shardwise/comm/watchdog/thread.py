"""The watch: a thread that finds out why a rank waits, and ends a wait that leads nowhere.

It looks a few times a second and, as long as ranks move, does nothing but leave a sign of life now and then. A rank
that has not moved for a moment says on the board what it is doing. A rank that waits reads there what the others do;
what that means is ``diagnose``'s business. Who waits long for a rank that is merely late logs where that is. The first
verdict counts; every rank that waits, or comes to wait later, raises it.
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
from typing import Any

import torch.distributed as dist

from shardwise import policies
from shardwise.comm.channels.channel import EpochFailure, Waiting, WatchedChannel, is_lost_connection
from shardwise.comm.channels.collective_log import LogExcerpt, collective_name
from shardwise.comm.watchdog.diagnosis import Evidence, collect_evidence, describe_late_ranks, diagnose
from shardwise.comm.watchdog.stacks import stack_of
from shardwise.comm.watchdog.store import Entry
from shardwise.errors import PeerFailure
from shardwise.torch_internals import num_issued

_LOGGER = logging.getLogger("shardwise")
_TICK_SECONDS = 0.05
# How long a rank may stand still before it says so, and before one that waits asks why; less where little time is set.
_MOMENT_SECONDS = 0.4
_MOMENTS_IN_TIMEOUT = 20.0
_LONGEST_SILENCE_SECONDS = 5.0
# The longer a rank has stood still, the less often is it looked at.
_LONGEST_NAP_SECONDS = 1.0
_STILL_IN_NAPS = 40.0
# How often at least it is said again that a rank is late.
_LONGEST_UNTOLD_SECONDS = 300.0
# The part of the time that others wait for it after which a rank tells where it is.
_LATE = 4.0
# How long peers are helped out after a verdict.
_AFTERMATH_SECONDS = 15.0
_LAST_LOOK_SECONDS = 1.0
# How long a store may take to answer before ranks are on their own; and when one that failed is asked again.
_STORE_ANSWERS_SECONDS = 5.0
_STORE_IS_ASKED_AGAIN_SECONDS = 1.0
_OVERSEE_SECONDS = 1.0
_EVENTS_TOLD = 64
_JUDGES = 16
# Collectives of torch's that no rank leaves long before the others.
_FOREIGN = re.compile(
    r'File ".*torch/distributed/distributed_c10d\.py", line \d+, in '
    r"(barrier|monitored_barrier|all_reduce|all_gather|all_to_all|reduce_scatter)"
)
# What this rank is out of when a store fails for want of it: the store itself has not gone.
_NO_STORE = "the store cannot be asked"
_WANTS = tuple(map(os.strerror, (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)))
_DEBUGGERS = ("pdb.py", "bdb.py", "pydevd", "debugpy", "ipdb")


@dataclass
class _Observation:
    """What the watch saw of one wire."""

    position: tuple[int, ...] = ()
    still_since: float = 0.0
    last_status: float = 0.0
    num_statuses: int = 0
    num_beats: int = 0
    last_look: float = 0.0
    last_judged: float = 0.0
    num_judged: int = 0
    failed_at: float | None = None
    # After how long a wait it is next said who is late.
    tells_after: float = 0.0
    aftermath_until: float = 0.0
    is_gone: bool = False
    # Each peer's sign of life as this wait found it; when another one came; and since when this rank listens.
    beats: dict[int, int] = field(default_factory=dict)
    heard_at: dict[int, float] = field(default_factory=dict)
    listens_since: float = 0.0
    # Whom this rank waits for, directly or through others, by their numbers in the world; and whom it sees alive.
    blocked_on: set[int] = field(default_factory=set)
    sees: list[int] = field(default_factory=list)
    # The collective of torch's that this rank was last found in, what it had issued then, and since when.
    sits_in: tuple[str, int] | None = None
    sits_since: float = 0.0
    # Since when the store cannot be asked, until when it is left alone, whether it has gone, and if not, why.
    alone_since: float | None = None
    alone_until: float = 0.0
    is_store_gone: bool = False
    trouble: str = ""
    last_error: str = ""

    def still_seconds(self, position: tuple[int, ...], now: float) -> float:
        """For how long the rank has been where it is."""
        if position != self.position:
            self.position, self.still_since = position, now
            self.num_statuses, self.failed_at, self.tells_after = 0, None, 0.0
            self.listens_since = now
            for seen in (self.beats, self.heard_at, self.blocked_on, self.sees):
                seen.clear()
        return now - self.still_since

    def sits_seconds(self, stack: list[str], num_issued: int | None, now: float) -> float:
        """For how long the rank has been in one and the same collective of torch's."""
        found = _FOREIGN.search(stack[-1]) if stack else None
        sits_in = (stack[-1], num_issued) if found and num_issued is not None else None
        if sits_in is None or sits_in != self.sits_in:
            self.sits_in, self.sits_since = sits_in, now
        return now - self.sits_since


class Watchdog:
    """The one watch of a process, over all its wires."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sights: weakref.WeakKeyDictionary[WatchedChannel, _Observation] = weakref.WeakKeyDictionary()
        self._thread: threading.Thread | None = None
        # Since when the watch is looking at a wire, and may be waiting for its store.
        self._looks_since: float | None = None
        self._is_over = threading.Event()
        # A thread that talks to a store while the interpreter takes it down would take the process down with it.
        atexit.register(self._end)

    def over(self, channel: WatchedChannel) -> None:
        with self._lock:
            self._sights[channel] = _Observation()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="shardwise watch", daemon=True)
                self._thread.start()
                threading.Thread(target=self._oversee, name="shardwise watch's watch", daemon=True).start()

    def channels(self) -> list[WatchedChannel]:
        """All that is watched now."""
        with self._lock:
            return list(self._sights)

    def _end(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(_LAST_LOOK_SECONDS)

    def _run(self) -> None:
        while not self._is_over.wait(_TICK_SECONDS):
            with self._lock:
                sights = list(self._sights.items())
            for channel, sight in sights:
                self._look_once(channel, sight)
            self._looks_since = None
            sights.clear()

    def _look_once(self, channel: WatchedChannel, sight: _Observation) -> None:
        self._looks_since = now = time.monotonic()
        try:
            if channel.is_over():
                self._leave(channel)
            elif now < sight.alone_until:
                self._look_alone(channel, sight)
            else:
                self._look(channel, sight)
                if sight.alone_since is not None:
                    # The others could say nothing either; from here on they can.
                    sight.alone_since, sight.listens_since, channel.is_alone = None, now, False
        except Exception as error:  # noqa: BLE001  a watch that ended would leave its rank waiting for ever
            self._note_trouble(channel, sight, error, now)

    def _oversee(self) -> None:
        """A store whose process was stopped neither answers nor fails: the watch would wait for it with all others."""
        while not self._is_over.wait(_OVERSEE_SECONDS):
            since = self._looks_since
            if since is None or time.monotonic() - since < _STORE_ANSWERS_SECONDS:
                continue
            with self._lock:
                sights = list(self._sights.items())
            for channel, sight in sights:
                channel.is_alone = True
                if sight.alone_since is None:
                    sight.alone_since = since
                sight.is_store_gone, sight.trouble = True, _NO_STORE
                self._look_alone(channel, sight)
            sights.clear()

    def _leave(self, channel: WatchedChannel) -> None:
        with self._lock:
            self._sights.pop(channel, None)

    def end_rank(self, thread: int) -> None:
        """The rank on this thread has ended: those that still wait for it are told so, at once."""
        with self._lock:
            ended = [(channel, sight) for channel, sight in self._sights.items() if channel.thread == thread]
        for channel, sight in ended:
            if not channel.is_over():
                sight.is_gone = True
                channel.tell_peers(self._say, channel, sight, None, 0.0, time.monotonic())

    def _note_trouble(
        self, channel: WatchedChannel, sight: _Observation, error: Exception, now: float
    ) -> None:
        """The board could not be asked: the store went with the rank that kept it, or this rank is out of something."""
        if channel.is_over():
            return
        is_of_store = isinstance(error, dist.DistError) or is_lost_connection(error)
        sight.is_store_gone = is_of_store and not any(want in str(error) for want in _WANTS)
        trouble = _NO_STORE if sight.is_store_gone else f"this rank cannot ask: {error}"
        if not sight.is_store_gone and sight.trouble != trouble:
            _LOGGER.warning("the watch of rank %d fails", channel.own_rank, exc_info=error)
        sight.trouble = trouble
        sight.alone_until = now + _STORE_IS_ASKED_AGAIN_SECONDS
        if sight.alone_since is None:
            sight.alone_since = now
        self._look_alone(channel, sight)

    def _look(self, channel: WatchedChannel, sight: _Observation) -> None:
        now = time.monotonic()
        # The training thread may leave the epoch at any moment: what is found out here is about this one.
        epoch, num_events = channel.log.epoch, channel.log.num_events
        waiting = channel.current_wait()
        if now < max(sight.aftermath_until, channel.restarted_at + _AFTERMATH_SECONDS):
            channel.help_peers()
        still_seconds = sight.still_seconds((epoch, num_events, channel.num_moves, id(waiting)), now)
        timeout_seconds = policies.trust().timeout_seconds
        moment_seconds = min(_MOMENT_SECONDS, timeout_seconds / _MOMENTS_IN_TIMEOUT)
        longest_silence_seconds = min(_LONGEST_SILENCE_SECONDS, timeout_seconds / _LATE)
        if still_seconds < moment_seconds:
            if now - sight.last_status >= longest_silence_seconds:
                self._say(channel, sight, waiting, still_seconds, now)
            return
        if channel.failure is None and now - sight.last_look < min(
            _LONGEST_NAP_SECONDS, still_seconds / _STILL_IN_NAPS
        ):
            return
        sight.last_look = now
        known: Entry | None = None
        if channel.failure is None:
            known = channel.store.failure(epoch)
            if known is not None and not channel.is_void(known, epoch):
                sight.aftermath_until = now + _AFTERMATH_SECONDS
                sight.failed_at = now
                if waiting is not None:
                    channel.set_failure(known, epoch)
        if waiting is not None and channel.failure is not None:
            sight.failed_at = now if sight.failed_at is None else sight.failed_at
            channel.release_wait(waiting, now - sight.failed_at)
            return
        silence_seconds = min(longest_silence_seconds, moment_seconds * 2.0 ** min(sight.num_statuses, 10))
        spoken_seconds = max(moment_seconds, channel.world / 100) if waiting is not None else silence_seconds
        if now - sight.last_status >= spoken_seconds:
            sight.num_statuses += 1
            self._say(channel, sight, waiting, still_seconds, now)
        if waiting is not None and self._is_judge(channel, sight, moment_seconds, now):
            own = channel.log.excerpt()
            if (own.epoch, own.num_events) != (epoch, num_events):
                # It has moved on just now: what it waits for there has had no time yet.
                return
            evidence = self._ask_others(channel, sight, own, still_seconds)
            failure = diagnose(channel, waiting, evidence)
            if failure is not None:
                channel.end_epoch(epoch, failure, void=known)
            elif still_seconds >= max(timeout_seconds, sight.tells_after):
                sight.tells_after = still_seconds + min(still_seconds, _LONGEST_UNTOLD_SECONDS)
                late = describe_late_ranks(channel, waiting, evidence)
                if late is not None:
                    _LOGGER.warning("rank %d goes on waiting: %s", channel.own_rank, late)

    def _say(
        self,
        channel: WatchedChannel,
        sight: _Observation,
        waiting: Waiting | None,
        still_seconds: float,
        now: float,
    ) -> None:
        sight.last_status = now
        sight.num_beats += 1
        status = _status(channel, waiting, sight, still_seconds)
        status["blocked_on"] = self._blocked_on(channel)
        channel.store.post_status(status)

    def _blocked_on(self, channel: WatchedChannel) -> list[int]:
        """Whom this rank's host waits for, on whichever wire."""
        with self._lock:
            own = [
                sight
                for each, sight in self._sights.items()
                if each.own_rank == channel.own_rank and each.waiting
            ]
        return sorted(set().union(*(sight.blocked_on for sight in own)))

    def _ask_others(
        self, channel: WatchedChannel, sight: _Observation, own: LogExcerpt, still_seconds: float
    ) -> Evidence:
        now = time.monotonic()
        statuses, silent_seconds = {}, {}
        for rank, note in channel.store.statuses().items():
            if rank == channel.rank:
                continue
            if sight.beats.setdefault(rank, note["beat"]) != note["beat"]:
                sight.beats[rank], sight.heard_at[rank] = note["beat"], now
            if note["epoch"] == own.epoch:
                statuses[rank] = note
            elif note["gone"] and note["epoch"] < own.epoch:
                statuses[rank] = {**note, "num_events": 0, "events": []}
        for rank in range(channel.world):
            silent_seconds[rank] = min(
                still_seconds, now - max(sight.listens_since, sight.heard_at.get(rank, 0.0))
            )
        evidence = collect_evidence(channel, own, statuses, silent_seconds, still_seconds)
        sight.sees = [rank for rank, state in evidence.behind.items() if state == "alive"]
        sight.blocked_on = {channel.ranks[rank] for rank in evidence.behind}.union(
            *(statuses[rank]["blocked_on"] for rank in evidence.behind if rank in statuses)
        )
        return evidence

    def _is_judge(
        self, channel: WatchedChannel, sight: _Observation, moment_seconds: float, now: float
    ) -> bool:
        """Not every rank asks for every other's doings at every moment: the store has but one server.

        Some ask each time, so that they know who has been silent; the others in turn, in case those do not wait.
        """
        if now - sight.last_judged < max(moment_seconds / 2, channel.world / 100):
            return False
        sight.last_judged = now
        sight.num_judged += 1
        turns = -(-channel.world // _JUDGES)
        return channel.rank % turns == 0 or (channel.rank + sight.num_judged) % turns == 0

    def _look_alone(self, channel: WatchedChannel, sight: _Observation) -> None:
        """Nobody can be asked; what is left is the time that is set."""
        try:
            self._count_time_alone(channel, sight)
        except Exception as error:
            if sight.last_error != repr(error):
                sight.last_error = repr(error)
                _LOGGER.exception("the watch of rank %d failed", channel.own_rank)

    def _count_time_alone(self, channel: WatchedChannel, sight: _Observation) -> None:
        epoch = channel.log.epoch
        waiting = channel.current_wait()
        now = time.monotonic()
        still_seconds = sight.still_seconds(
            (epoch, channel.log.num_events, channel.num_moves, id(waiting)), now
        )
        # As long as it is this rank's own trouble, the others may be well, and it may pass.
        limit_seconds = policies.trust().timeout_seconds if sight.is_store_gone else channel.late_seconds()
        alone_seconds = 0.0 if sight.alone_since is None else now - sight.alone_since
        if waiting is None or min(still_seconds, alone_seconds) < limit_seconds:
            return
        if channel.failure is None:
            sight.failed_at = now
            failure = EpochFailure(
                PeerFailure,
                f"other ranks did not come to {collective_name(waiting.code)} within {still_seconds:.1f} s, and where "
                f"they are is not known: {sight.trouble}",
                "look for the rank that died in the job's logs; restart from the last checkpoint",
            )
            channel.set_failure(failure.as_entry(), epoch)
        channel.release_wait_alone(waiting)


def _status(
    channel: WatchedChannel, waiting: Waiting | None, sight: _Observation, still_seconds: float
) -> Entry:
    # Late, because it interrupts the rank, and nobody needs to know where one is that is merely busy.
    is_late = still_seconds >= policies.trust().timeout_seconds / _LATE
    stack = stack_of(channel.thread) if is_late else []
    group = channel.group()
    issued = num_issued(group) if is_late and group is not None else None
    excerpt = channel.log.excerpt(_EVENTS_TOLD)
    return {
        "beat": sight.num_beats,
        "epoch": excerpt.epoch,
        "num_events": excerpt.num_events,
        "events": excerpt.words,
        "waiting": None if waiting is None else collective_name(waiting.code),
        "bytes": getattr(waiting, "message_bytes", 0),
        "still_seconds": round(still_seconds, 1),
        "stack": stack[-12:],
        "in_debugger": any(name in line for line in stack for name in _DEBUGGERS),
        "sits_seconds": sight.sits_seconds(stack, issued, time.monotonic()),
        "sees": sight.sees,
        "blocked_on": [],
        "gone": sight.is_gone,
    }


WATCHDOG = Watchdog()


def start_watching(channel: Any) -> None:
    WATCHDOG.over(channel)
