"""The watch: a thread that finds out why a rank waits, and ends a wait that leads nowhere.

It looks a few times a second and, as long as ranks move, does nothing. A rank that has not moved for a moment says on
the board what it is doing. A rank that waits reads there what the others do, and tells apart

    parted      their paths differ: the epoch ends with ``RankDisagreement``
    dead        the process is gone: ``PeerFailure``, at once
    stalled     nobody parted, but a rank does not come within the time that is set: ``PeerFailure``

The first verdict counts; every rank that waits, or comes to wait later, raises it.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from shardwise import policies
from shardwise.comm.board import Note
from shardwise.comm.path import first_parting, words_of
from shardwise.comm.wire import Waiting, WatchedWire, stack_of
from shardwise.errors import PeerFailure, RankDisagreement

_TICK_SECONDS = 0.05
# How long a rank may stand still before it says so, and before one that waits asks why; less where little time is set.
_MOMENT_SECONDS = 0.4
_MOMENTS_IN_TIMEOUT = 20.0
# How long one waits for all ranks to say what they do, once it is clear that some have parted or do not come.
_TELLING_SECONDS = 3.0
_LONGEST_SILENCE_SECONDS = 5.0
# How long peers are helped out after a verdict.
_AFTERMATH_SECONDS = 15.0
_LAST_LOOK_SECONDS = 1.0
_EVENTS_TOLD = 64
_JUDGES = 16
_DEBUGGERS = ("pdb.py", "bdb.py", "pydevd", "debugpy", "ipdb")


@dataclass
class _Sight:
    """What the watch saw of one wire."""

    position: tuple[int, int, int] = (-1, -1, -1)
    still_since: float = 0.0
    last_status: float = 0.0
    num_statuses: int = 0
    last_judged: float = 0.0
    num_judged: int = 0
    verdict_at: float | None = None
    aftermath_until: float = 0.0
    # Each peer's sign of life as this wait found it; and who has given another one since.
    beats: dict[int, tuple[int, int]] = field(default_factory=dict)
    heard: set[int] = field(default_factory=set)


class Watch:
    """The one watch of a process, over all its wires."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sights: weakref.WeakKeyDictionary[WatchedWire, _Sight] = weakref.WeakKeyDictionary()
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        # A thread that talks to a store while the interpreter takes it down would take the process down with it.
        atexit.register(self._end)

    def over(self, wire: WatchedWire) -> None:
        with self._lock:
            self._sights[wire] = _Sight()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="shardwise watch", daemon=True)
                self._thread.start()

    def _end(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(_LAST_LOOK_SECONDS)

    def _run(self) -> None:
        while not self._is_over.wait(_TICK_SECONDS):
            with self._lock:
                sights = list(self._sights.items())
            for wire, sight in sights:
                try:
                    if wire.is_over():
                        self._leave(wire)
                    else:
                        self._look(wire, sight)
                except Exception:  # noqa: BLE001  the store went with the rank that kept it, or the group has ended
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
        position = (epoch, wire.path.num_events, id(waiting))
        if now < max(sight.aftermath_until, wire.left_at + _AFTERMATH_SECONDS):
            wire.serve_peers()
        if position != sight.position:
            sight.position, sight.still_since = position, now
            sight.num_statuses, sight.verdict_at = 0, None
            sight.beats.clear()
            sight.heard.clear()
            return
        still_seconds = now - sight.still_since
        moment_seconds = min(_MOMENT_SECONDS, policies.trust().timeout_seconds / _MOMENTS_IN_TIMEOUT)
        if still_seconds < moment_seconds:
            return
        if wire.verdict is None:
            verdict = wire.board.verdict(epoch)
            if verdict is not None:
                sight.aftermath_until = now + _AFTERMATH_SECONDS
                sight.verdict_at = now
                if waiting is not None:
                    wire.sentence(verdict, epoch)
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
            _judge(wire, waiting, sight, still_seconds, epoch)

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
        if waiting is None or now - sight.still_since < policies.trust().timeout_seconds:
            return
        if wire.verdict is None:
            sight.verdict_at = now
            wire.sentence(
                {
                    "error": "PeerFailure",
                    "what": f"other ranks did not come to {words_of(waiting.code)} within "
                    f"{policies.trust().timeout_seconds:g} s, and the store cannot be asked where they are",
                    "fix": "look for the rank that died in the job's logs; restart from the last checkpoint",
                },
                epoch,
            )
        wire.let_out_alone(waiting)


def _status(wire: WatchedWire, waiting: Waiting | None, beat: int, still_seconds: float) -> Note:
    stack = stack_of(wire.thread)
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
        "in_debugger": any(name in line for line in stack for name in _DEBUGGERS),
    }


def _judge(wire: WatchedWire, waiting: Waiting, sight: _Sight, still_seconds: float, epoch: int) -> None:
    own = wire.path.story()
    if own.epoch != epoch:
        return
    statuses = {
        rank: note
        for rank, note in wire.board.statuses().items()
        if rank != wire.rank and note["epoch"] == epoch
    }
    for rank, note in statuses.items():
        if sight.beats.setdefault(rank, beat := (note["beat"], note["num_events"])) != beat:
            sight.heard.add(rank)
    paths = {rank: (note["num_events"], note["events"]) for rank, note in statuses.items()}
    paths[wire.rank] = (own.num_events, own.words)
    parting = first_parting(list(paths.values()))
    if parting is not None:
        if len(paths) == wire.world or still_seconds > _TELLING_SECONDS:
            wire.end_epoch(epoch, RankDisagreement, *_parted(wire, paths, parting))
        return
    behind = [
        rank
        for rank in range(wire.world)
        if rank != wire.rank and (rank not in paths or paths[rank][0] < own.num_events)
    ]
    gone = {rank: state for rank in behind if (state := _process_state(wire, rank)) in ("dead", "exited")}
    if gone:
        wire.end_epoch(epoch, PeerFailure, *_lost(wire, waiting, statuses, gone, list(gone), still_seconds))
        return
    sizes = {wire.rank: getattr(waiting, "message_bytes", 0)}
    for rank, note in statuses.items():
        if note["num_events"] == own.num_events and note["waiting"] == words_of(waiting.code):
            sizes[rank] = note["bytes"]
    if len(sizes) == wire.world and len(set(sizes.values())) > 1:
        wire.end_epoch(epoch, RankDisagreement, *_sized(wire, waiting, sizes))
        return
    policy = policies.trust()
    if still_seconds < policy.timeout_seconds:
        return
    if still_seconds < policy.debugger_grace_seconds and any(
        statuses[rank]["in_debugger"] for rank in behind if rank in statuses
    ):
        return
    states = {rank: _process_state(wire, rank) for rank in behind}
    if still_seconds < policy.timeout_seconds + _TELLING_SECONDS and any(
        state == "alive" and rank not in sight.heard for rank, state in states.items()
    ):
        # On a busy machine the watch of one that lives may be late to say where it is.
        return
    wire.end_epoch(epoch, PeerFailure, *_lost(wire, waiting, statuses, states, behind, still_seconds))


# --- words ---------------------------------------------------------------------------------------------------------


def _parted(wire: WatchedWire, paths: dict[int, tuple[int, list[str]]], parting: int) -> tuple[str, str, str]:
    takers: dict[str, list[int]] = {}
    lines = []
    for rank, (num_events, events) in sorted(paths.items()):
        last = num_events - len(events)
        if parting < num_events:
            takers.setdefault(events[parting - num_events], []).append(wire.ranks[rank])
        told = events[max(0, parting - last - 3) :][:8]
        lines.append(f"rank {wire.ranks[rank]}: ... {' > '.join(told)}")
    ways = "; ".join(f"{_ranks(ranks)} went on to {words}" for words, ranks in takers.items())
    what = f"ranks do not do the same: {ways}"
    fix = (
        "make every rank run the same modules in the same order, as often, with the same settings; where ranks are "
        "meant to take different branches, call set_safe_participation() on them; no optimizer has used this step"
    )
    return what, fix, "the paths that ranks took, from just before they parted:\n" + "\n".join(lines)


def _sized(wire: WatchedWire, waiting: Waiting, sizes: dict[int, int]) -> tuple[str, str]:
    told = "; ".join(f"rank {wire.ranks[rank]} sends {size} bytes" for rank, size in sorted(sizes.items()))
    what = f"ranks do not mean the same when they {words_of(waiting.code)}: {told}"
    return what, "use the same parameters, dtypes and settings on every rank"


def _lost(
    wire: WatchedWire,
    waiting: Waiting,
    statuses: dict[int, Note],
    states: dict[int, str],
    missing: list[int],
    seconds: float,
) -> tuple[str, str, str]:
    told, stacks = [], []
    for rank in missing:
        note = statuses.get(rank)
        name = wire.ranks[rank]
        where = "it has said nothing of itself"
        if note is not None:
            last = note["events"][-1] if note["events"] else "start the step"
            where = f"the last it did was to {last}"
            if note["waiting"]:
                where += f", it waits to {note['waiting']}"
            if note["stack"]:
                stacks.append(f"rank {name} is at\n" + "\n".join(note["stack"]))
        told.append(f"rank {name} is {states.get(rank, 'alive')}, {where}")
    if not missing:
        told.append("all of them have come")
    names = _ranks([wire.ranks[rank] for rank in missing]) if missing else "the data of ranks"
    what = f"{names} did not come to {words_of(waiting.code)} within {seconds:.1f} s: {'; '.join(told)}"
    fix = (
        "look at what that rank was doing; if it is only slow, raise timeout_seconds with set_trust(); if it is gone, "
        "restart from the last checkpoint"
    )
    return what, fix, "\n".join(stacks)


def _ranks(ranks: list[int]) -> str:
    names = ", ".join(map(str, sorted(ranks)))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


def _process_state(wire: WatchedWire, rank: int) -> str:
    """Whether a rank's process lives, as far as can be told from here."""
    home = wire.board.home(rank)
    if home is None:
        return "not started yet"
    if home["processes"] != wire.board.processes:
        return f"out of sight on {home['host']}"
    try:
        stat = FilePath(f"/proc/{home['pid']}/stat").read_text()
    except OSError:
        return "dead"
    letter = stat.rpartition(")")[2].split()[0]
    return {"Z": "dead", "X": "dead", "T": "stopped", "t": "stopped in a debugger"}.get(letter, "alive")


WATCH = Watch()


def watch_over(wire: Any) -> None:
    WATCH.over(wire)
