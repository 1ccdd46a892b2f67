"""The watch: a thread that finds out why a rank waits, and ends a wait that leads nowhere.

It looks a few times a second and, as long as ranks move, does nothing. A rank that has not moved for a moment says on
the board what it is doing. A rank that waits reads there what the others do; what that means is ``judge``'s business.
The first verdict counts; every rank that waits, or comes to wait later, raises it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

from shardwise import policies
from shardwise.comm.board import Note
from shardwise.comm.judge import Evidence, judge, missed_at_start
from shardwise.comm.path import Story, words_of
from shardwise.comm.patience import asked_by
from shardwise.comm.stacks import stack_of
from shardwise.comm.wire import Verdict, Waiting, WatchedWire
from shardwise.errors import PeerFailure

_LOGGER = logging.getLogger("shardwise")
_TICK_SECONDS = 0.05
# How long a rank may stand still before it says so, and before one that waits asks why; less where little time is set.
_MOMENT_SECONDS = 0.4
_MOMENTS_IN_TIMEOUT = 20.0
_LONGEST_SILENCE_SECONDS = 5.0
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
_DEBUGGERS = ("pdb.py", "bdb.py", "pydevd", "debugpy", "ipdb")


@dataclass
class _Sight:
    """What the watch saw of one wire."""

    position: tuple[int, ...] = ()
    still_since: float = 0.0
    last_status: float = 0.0
    num_statuses: int = 0
    last_judged: float = 0.0
    num_judged: int = 0
    verdict_at: float | None = None
    has_told: bool = False
    aftermath_until: float = 0.0
    # Each peer's sign of life as this wait found it; and who has given another one since.
    beats: dict[int, tuple[int, int]] = field(default_factory=dict)
    heard: set[int] = field(default_factory=set)
    # Until when the store is left alone, because it has failed.
    alone_until: float = 0.0

    def still_seconds(self, position: tuple[int, ...], now: float) -> float:
        """For how long the rank has been where it is."""
        if position != self.position:
            self.position, self.still_since = position, now
            self.num_statuses, self.verdict_at, self.has_told = 0, None, False
            self.beats.clear()
            self.heard.clear()
        return now - self.still_since


class Watch:
    """The one watch of a process, over all its wires."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sights: weakref.WeakKeyDictionary[WatchedWire, _Sight] = weakref.WeakKeyDictionary()
        self._thread: threading.Thread | None = None
        # Since when the watch is looking at a wire, and may be waiting for its store.
        self._looks_since: float | None = None
        self._is_over = threading.Event()
        # A thread that talks to a store while the interpreter takes it down would take the process down with it.
        atexit.register(self._end)

    def over(self, wire: WatchedWire) -> None:
        with self._lock:
            self._sights[wire] = _Sight()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="shardwise watch", daemon=True)
                self._thread.start()
                threading.Thread(target=self._oversee, name="shardwise watch's watch", daemon=True).start()

    def wires(self) -> list[WatchedWire]:
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
            for wire, sight in sights:
                self._looks_since = now = time.monotonic()
                try:
                    if wire.is_over():
                        self._leave(wire)
                    elif now < sight.alone_until:
                        self._look_alone(wire, sight)
                    else:
                        self._look(wire, sight)
                except Exception:  # noqa: BLE001  the store went with the rank that kept it, or the group has ended
                    sight.alone_until = now + _STORE_IS_ASKED_AGAIN_SECONDS
                    self._look_alone(wire, sight)
            self._looks_since = None
            sights.clear()

    def _oversee(self) -> None:
        """A store whose process was stopped neither answers nor fails: the watch would wait for it with all others."""
        while not self._is_over.wait(_OVERSEE_SECONDS):
            since = self._looks_since
            if since is None or time.monotonic() - since < _STORE_ANSWERS_SECONDS:
                continue
            with self._lock:
                sights = list(self._sights.items())
            for wire, sight in sights:
                wire.is_alone = True
                with contextlib.suppress(Exception):
                    self._look_alone(wire, sight)
            sights.clear()

    def _leave(self, wire: WatchedWire) -> None:
        with self._lock:
            self._sights.pop(wire, None)

    def _look(self, wire: WatchedWire, sight: _Sight) -> None:
        now = time.monotonic()
        # The training thread may leave the epoch at any moment: what is found out here is about this one.
        epoch = wire.path.epoch
        waiting = wire.stuck_on()
        if now < max(sight.aftermath_until, wire.left_at + _AFTERMATH_SECONDS):
            wire.serve_peers()
        still_seconds = sight.still_seconds((epoch, wire.path.num_events, wire.num_moves, id(waiting)), now)
        moment_seconds = min(_MOMENT_SECONDS, policies.trust().timeout_seconds / _MOMENTS_IN_TIMEOUT)
        if still_seconds < moment_seconds:
            return
        known: Note | None = None
        if wire.verdict is None:
            known = wire.board.verdict(epoch)
            if known is not None and not wire.is_void(known, epoch):
                sight.aftermath_until = now + _AFTERMATH_SECONDS
                sight.verdict_at = now
                if waiting is not None:
                    wire.sentence(known, epoch)
        if waiting is not None and wire.verdict is not None:
            sight.verdict_at = now if sight.verdict_at is None else sight.verdict_at
            wire.let_out(waiting, now - sight.verdict_at)
            return
        silence_seconds = min(_LONGEST_SILENCE_SECONDS, moment_seconds * 2.0**sight.num_statuses)
        spoken_seconds = max(moment_seconds, wire.world / 100) if waiting is not None else silence_seconds
        if now - sight.last_status >= spoken_seconds:
            sight.last_status = now
            sight.num_statuses += 1
            wire.board.post_status(_status(wire, waiting, sight.num_statuses, still_seconds))
        if waiting is not None and self._is_judge(wire, sight, moment_seconds, now):
            own = wire.path.story()
            evidence = self._ask_others(wire, sight, own, still_seconds)
            verdict = judge(wire, waiting, evidence)
            if verdict is not None and own.epoch == epoch:
                wire.end_epoch(epoch, verdict, void=known)
            elif not sight.has_told and (missed := missed_at_start(wire, waiting, evidence)) is not None:
                sight.has_told = True
                _LOGGER.warning("rank %d goes on waiting: %s", wire.own_rank, missed)

    def _ask_others(self, wire: WatchedWire, sight: _Sight, own: Story, still_seconds: float) -> Evidence:
        statuses = {
            rank: note
            for rank, note in wire.board.statuses().items()
            if rank != wire.rank and note["epoch"] == own.epoch
        }
        for rank, note in statuses.items():
            if sight.beats.setdefault(rank, beat := (note["beat"], note["num_events"])) != beat:
                sight.heard.add(rank)
        return Evidence(own, statuses, sight.heard, still_seconds)

    def _is_judge(self, wire: WatchedWire, sight: _Sight, moment_seconds: float, now: float) -> bool:
        """Not every rank asks for every other's doings at every moment: the store has but one server."""
        if now - sight.last_judged < max(moment_seconds / 2, wire.world / 100):
            return False
        sight.last_judged = now
        sight.num_judged += 1
        return (wire.rank + sight.num_judged) % -(-wire.world // _JUDGES) == 0

    def _look_alone(self, wire: WatchedWire, sight: _Sight) -> None:
        """Without a store nobody can be asked; what is left is the time that is set."""
        epoch = wire.path.epoch
        waiting = wire.stuck_on()
        now = time.monotonic()
        still_seconds = sight.still_seconds((epoch, wire.path.num_events, wire.num_moves, id(waiting)), now)
        if waiting is None or still_seconds < policies.trust().timeout_seconds:
            return
        if wire.verdict is None:
            sight.verdict_at = now
            verdict = Verdict(
                PeerFailure,
                f"other ranks did not come to {words_of(waiting.code)} within {policies.trust().timeout_seconds:g} s, "
                "and the store cannot be asked where they are",
                "look for the rank that died in the job's logs; restart from the last checkpoint",
            )
            wire.sentence(verdict.note(), epoch)
        wire.let_out_alone(waiting)


def _status(wire: WatchedWire, waiting: Waiting | None, beat: int, still_seconds: float) -> Note:
    # Late, because it interrupts the rank, and nobody needs to know where one is that is merely busy.
    is_late = still_seconds >= policies.trust().timeout_seconds / _LATE
    stack = stack_of(wire.thread) if is_late else []
    story = wire.path.story()
    return {
        "beat": beat,
        "epoch": story.epoch,
        "num_events": story.num_events,
        "events": story.words[-_EVENTS_TOLD:],
        "waiting": None if waiting is None else words_of(waiting.code),
        "bytes": getattr(waiting, "message_bytes", 0),
        "still_seconds": round(still_seconds, 1),
        "stack": stack[-12:],
        "patience_seconds": asked_by(wire.thread),
        "in_debugger": any(name in line for line in stack for name in _DEBUGGERS),
    }


WATCH = Watch()


def watch_over(wire: Any) -> None:
    WATCH.over(wire)
