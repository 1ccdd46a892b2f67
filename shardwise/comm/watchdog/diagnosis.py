"""Why does a rank wait? From what ranks say of themselves to a verdict, in words.

    parted      their paths differ, or the sizes of what they send
    dead        a process is gone
    deadlocked  ranks wait for each other, in different collectives
    lost        a rank was stopped, or gives no sign of life
    late        a rank is alive and running, and does not come within the group's own timeout

A rank that is alive and running is merely late: those that wait say so, and go on waiting. All else ends the wait in
seconds. Nothing here talks or waits: ``comm/watchdog/thread`` brings what ranks have said, and makes the verdict known.
"""

from __future__ import annotations

import os
from pathlib import Path as FilePath
from typing import NamedTuple

from shardwise import policies
from shardwise.comm.channels.channel import EpochFailure, Waiting, WatchedChannel
from shardwise.comm.channels.collective_log import LogExcerpt, collective_name, first_divergence
from shardwise.comm.watchdog.store import START_TIME_FIELD, Entry
from shardwise.errors import PeerFailure, RankDisagreement

# How long one waits for all ranks to say what they do, once it is clear that some have parted or do not come.
_TELLING_SECONDS = 3.0

_DEAD = ("dead", "gone")
_ALIVE = "alive"
_TRACED = "stopped in a debugger"
_UNKNOWN = "not started yet"

Logs = dict[int, tuple[int, list[str]]]


class Evidence(NamedTuple):
    """What one rank that waits knows of the others."""

    own: LogExcerpt
    # What others in this epoch last said of themselves; and how long ago the last sign of life came that was new.
    statuses: dict[int, Entry]
    silent_seconds: dict[int, float]
    # The ranks that have not come to where this one waits, and how their processes are.
    behind: dict[int, str]
    seconds: float

    def is_heard(self, rank: int) -> bool:
        return self.silent_seconds[rank] < self.seconds

    def is_running(self, rank: int) -> bool:
        """Whether a rank's process is known to be alive, and free to run."""
        state = self.behind[rank]
        if state == _ALIVE:
            return True
        if state == _UNKNOWN or state.startswith("stopped"):
            return False
        limit = policies.trust().timeout_seconds
        # Its watch speaks for it; or, when that cannot, ranks of its host do, which see its process.
        return self.silent_seconds[rank] < limit or any(
            rank in note["sees"] and self.silent_seconds[witness] < limit
            for witness, note in self.statuses.items()
        )


def collect_evidence(
    channel: WatchedChannel,
    own: LogExcerpt,
    statuses: dict[int, Entry],
    silent_seconds: dict[int, float],
    seconds: float,
) -> Evidence:
    behind = {
        rank: "gone" if rank in statuses and statuses[rank]["gone"] else _process_state(channel, rank)
        for rank in range(channel.world)
        if rank != channel.rank and (rank not in statuses or statuses[rank]["num_events"] < own.num_events)
    }
    return Evidence(own, statuses, silent_seconds, behind, seconds)


def diagnose(channel: WatchedChannel, waiting: Waiting, evidence: Evidence) -> EpochFailure | None:
    """How the epoch ends, if it is to end."""
    own, statuses, seconds = evidence.own, evidence.statuses, evidence.seconds
    logs = {rank: (note["num_events"], note["events"]) for rank, note in statuses.items()}
    logs[channel.rank] = (own.num_events, own.words)
    divergence = first_divergence(list(logs.values()))
    if divergence is not None:
        has_heard_all = len(logs) == channel.world or seconds > _TELLING_SECONDS
        return _diverged(channel, logs, divergence) if has_heard_all else None
    dead = [rank for rank, state in evidence.behind.items() if state in _DEAD]
    if dead:
        return _lost(channel, waiting, evidence, dead)
    sizes = {channel.rank: getattr(waiting, "message_bytes", 0)}
    for rank, note in statuses.items():
        if note["num_events"] == own.num_events and note["waiting"] == collective_name(waiting.code):
            sizes[rank] = note["bytes"]
    if len(sizes) == channel.world and len(set(sizes.values())) > 1:
        return _sizes_differ(channel, waiting, sizes)
    if seconds < policies.trust().timeout_seconds:
        return None
    stuck = _stuck(channel, evidence)
    if stuck:
        return _deadlocked(channel, waiting, evidence, stuck)._replace(place=own.num_events)
    given_up = [rank for rank in evidence.behind if _is_given_up(channel, evidence, rank)]
    if given_up or (not evidence.behind and seconds >= channel.late_seconds()):
        return _lost(channel, waiting, evidence, given_up)._replace(place=own.num_events)
    return None


def describe_late_ranks(channel: WatchedChannel, waiting: Waiting, evidence: Evidence) -> str | None:
    """Who is late and where it is, in words, for the first of those that wait to tell; all of them go on waiting."""
    is_first_to_wait = all(rank in evidence.behind for rank in range(channel.rank))
    if not is_first_to_wait:
        return None
    told = _lost(channel, waiting, evidence, [*evidence.behind])
    return f"{told.what}\n{told.details}" if told.details else told.what


def _stuck(channel: WatchedChannel, evidence: Evidence) -> list[int]:
    """Those behind that cannot come, because they wait for this rank in another collective."""
    limit = policies.trust().timeout_seconds
    notes = {rank: evidence.statuses[rank] for rank in evidence.behind if rank in evidence.statuses}
    # What was said before this rank had waited for long may be about where it was before.
    fresh = {rank: note for rank, note in notes.items() if evidence.silent_seconds[rank] < limit / 2}
    in_a_ring = [rank for rank, note in fresh.items() if channel.own_rank in note["blocked_on"]]
    if in_a_ring or not channel.is_whole_world or len(fresh) < len(evidence.behind):
        return in_a_ring
    # Collectives that are not the engine's: when nobody in the whole world runs, nobody will.
    sitting = [rank for rank, note in fresh.items() if note["sits_seconds"] >= limit]
    is_anybody_running = any(
        rank not in sitting and note["waiting"] is None and not note["blocked_on"]
        for rank, note in fresh.items()
    )
    return [] if is_anybody_running else sitting


def _is_given_up(channel: WatchedChannel, evidence: Evidence, rank: int) -> bool:
    """Whether a rank has had the time that it is given."""
    policy, state = policies.trust(), evidence.behind[rank]
    note = evidence.statuses.get(rank)
    if state == _TRACED or (note is not None and note["in_debugger"]):
        return evidence.seconds >= max(policy.debugger_grace_seconds, channel.late_seconds())
    is_running = evidence.is_running(rank)
    limit = channel.late_seconds() if is_running else policy.timeout_seconds
    own = evidence.own
    if own.epoch == 0 and own.num_events == 1 and not state.startswith("stopped"):
        # This rank waits in the first thing it does, for one that has done nothing yet.
        limit = max(limit, policy.start_seconds)
    elif not is_running:
        return evidence.silent_seconds[rank] >= limit
    if is_running and not evidence.is_heard(rank):
        # On a busy machine the watch of one that lives may be late to say where it is.
        limit += _TELLING_SECONDS
    return evidence.seconds >= limit


# --- words ---------------------------------------------------------------------------------------------------------


def _diverged(channel: WatchedChannel, logs: Logs, divergence: int) -> EpochFailure:
    takers: dict[str, list[int]] = {}
    lines = []
    for rank, (num_events, events) in sorted(logs.items()):
        last = num_events - len(events)
        if divergence < num_events:
            takers.setdefault(events[divergence - num_events], []).append(channel.ranks[rank])
        told = events[max(0, divergence - last - 3) :][:8]
        lines.append(f"rank {channel.ranks[rank]}: ... {' > '.join(told)}")
    ways = "; ".join(f"{_ranks(ranks)} went on to {words}" for words, ranks in takers.items())
    what = f"ranks do not do the same: {ways}"
    fix = (
        "make every rank run the same modules in the same order, as often, with the same settings; where ranks are "
        "meant to take different branches, call set_safe_participation() on them; no optimizer has used this step"
    )
    return EpochFailure(
        RankDisagreement,
        what,
        fix,
        "the paths that ranks took, from just before they parted:\n" + "\n".join(lines),
    )


def _sizes_differ(channel: WatchedChannel, waiting: Waiting, sizes: dict[int, int]) -> EpochFailure:
    told = "; ".join(f"rank {channel.ranks[rank]} sends {size} bytes" for rank, size in sorted(sizes.items()))
    what = f"ranks do not mean the same when they {collective_name(waiting.code)}: {told}"
    return EpochFailure(RankDisagreement, what, "use the same parameters, dtypes and settings on every rank")


def _lost(channel: WatchedChannel, waiting: Waiting, evidence: Evidence, missing: list[int]) -> EpochFailure:
    told, stacks = _whereabouts(channel, evidence, missing)
    names = _ranks([channel.ranks[rank] for rank in missing]) if missing else "the data of ranks"
    what = f"{names} did not come to {collective_name(waiting.code)} within {evidence.seconds:.1f} s: {told}"
    fix = (
        "look at what that rank was doing; if it may take so long, raise late_seconds with set_trust(), or the "
        "timeout of the process group; start_seconds if it has not begun; if it is gone, restart from the last "
        "checkpoint"
    )
    return EpochFailure(PeerFailure, what, fix, stacks)


def _deadlocked(
    channel: WatchedChannel, waiting: Waiting, evidence: Evidence, stuck: list[int]
) -> EpochFailure:
    told, stacks = _whereabouts(channel, evidence, stuck)
    names = _ranks([channel.ranks[rank] for rank in stuck])
    what = (
        f"ranks wait for each other: {names} did not come to {collective_name(waiting.code)} within "
        f"{evidence.seconds:.1f} s, and waits for others in another collective: {told}"
    )
    fix = "make every rank call the same collectives in the same order, on all process groups"
    return EpochFailure(RankDisagreement, what, fix, stacks)


def _whereabouts(channel: WatchedChannel, evidence: Evidence, ranks: list[int]) -> tuple[str, str]:
    """What is known of some ranks, and their stacks."""
    told, stacks = [], []
    for rank in ranks:
        note = evidence.statuses.get(rank)
        name = channel.ranks[rank]
        where = "it has said nothing of itself"
        if note is not None:
            where = f"the last it did was to {note['events'][-1]}" if note["events"] else "it has not begun"
            if note["waiting"]:
                where += f", it waits to {note['waiting']}"
            if note["stack"]:
                stacks.append(f"rank {name} is at\n" + "\n".join(note["stack"]))
        told.append(f"rank {name} is {evidence.behind.get(rank, _ALIVE)}, {where}")
    return "; ".join(told) if told else "all of them have come", "\n".join(stacks)


def _ranks(ranks: list[int]) -> str:
    names = ", ".join(map(str, sorted(ranks)))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


def _process_state(channel: WatchedChannel, rank: int) -> str:
    """Whether a rank's process lives, as far as can be told from here."""
    home = channel.store.home(rank)
    if home is None:
        return _UNKNOWN
    if home["processes"] != channel.store.processes:
        return f"out of sight on {home['host']}"
    try:
        stat = FilePath(f"/proc/{home['pid']}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "dead"
    except OSError:
        # No descriptor is left to look with. That it exists can be told without.
        return _ALIVE if _exists(home["pid"]) else "dead"
    letter, *fields = stat.rpartition(")")[2].split()
    if home["began"] not in (None, fields[START_TIME_FIELD]):
        # Its number is another process's by now.
        return "dead"
    return {"Z": "dead", "X": "dead", "T": "stopped", "t": _TRACED}.get(letter, _ALIVE)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
