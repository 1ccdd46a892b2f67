"""Diagnoses why a rank is waiting, from the statuses that ranks have posted, and words the failure.

    diverged    collective logs differ, or the sizes of messages
    dead        a process is gone
    deadlocked  ranks wait for each other, in different collectives
    lost        a rank was stopped, or its heartbeat has ceased
    late        a rank is alive and running, and does not arrive within the group's own timeout

Waits for a rank that is alive and running continue, with a warning in the log; all others end within seconds.
Nothing here communicates: ``comm/watchdog/thread`` reads the statuses and posts the failure.
"""

from __future__ import annotations

import os
from pathlib import Path as FilePath
from typing import NamedTuple

from shardwise import policies
from shardwise.comm.channels.channel import LogExcerpt, collective_name, first_divergence
from shardwise.comm.channels.watched import EpochFailure, Waiting, WatchedChannel
from shardwise.comm.watchdog.store import START_TIME_FIELD, Entry
from shardwise.errors import PeerFailure, RankDisagreement

# How long to wait for the statuses of all ranks once it is clear that some have diverged or are missing.
_STATUS_GRACE_SECONDS = 3.0

_DEAD = ("dead", "gone")
_ALIVE = "alive"
_TRACED = "stopped in a debugger"
_UNKNOWN = "not known to have started"

Logs = dict[int, tuple[int, list[str]]]


class Evidence(NamedTuple):
    """What a rank that waits knows about the others."""

    own: LogExcerpt
    # The last status of each peer that is in this epoch; and how long ago a new heartbeat was seen.
    statuses: dict[int, Entry]
    silent_seconds: dict[int, float]
    # The ranks that have not reached the event in which this one waits, and the state of their processes.
    behind: dict[int, str]
    seconds: float

    def has_been_heard(self, rank: int) -> bool:
        return self.silent_seconds[rank] < self.seconds

    def is_running(self, rank: int) -> bool:
        """Returns whether a rank's process is known to be alive and free to run."""
        state = self.behind[rank]
        if state == _ALIVE:
            return True
        if state == _UNKNOWN or state.startswith("stopped"):
            return False
        limit = policies.trust().timeout_seconds
        # Either its own watchdog posts, or other ranks of its host see its process.
        return self.silent_seconds[rank] < limit or any(
            rank in status["sees"] and self.silent_seconds[witness] < limit
            for witness, status in self.statuses.items()
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
    """Returns the failure that ends the epoch, or None to go on waiting."""
    own, statuses, seconds = evidence.own, evidence.statuses, evidence.seconds
    logs = {rank: (status["num_events"], status["events"]) for rank, status in statuses.items()}
    logs[channel.rank] = (own.num_events, own.names)
    divergence = first_divergence(list(logs.values()))
    if divergence is not None:
        has_heard_all = len(logs) == channel.world or seconds > _STATUS_GRACE_SECONDS
        return _describe_divergence(channel, logs, divergence) if has_heard_all else None
    dead = [rank for rank, state in evidence.behind.items() if state in _DEAD]
    if dead:
        return _describe_missing(channel, waiting, evidence, dead)
    sizes = {channel.rank: getattr(waiting, "message_bytes", 0)}
    for rank, status in statuses.items():
        if status["num_events"] == own.num_events and status["waiting"] == collective_name(waiting.code):
            sizes[rank] = status["bytes"]
    if len(sizes) == channel.world and len(set(sizes.values())) > 1:
        return _describe_sizes(channel, waiting, sizes)
    if seconds < policies.trust().timeout_seconds:
        return None
    deadlocked = _find_deadlocked(channel, evidence)
    if deadlocked:
        return _describe_deadlock(channel, waiting, evidence, deadlocked)._replace(place=own.num_events)
    out_of_time = [rank for rank in evidence.behind if _is_out_of_time(channel, evidence, rank)]
    if out_of_time or (not evidence.behind and seconds >= channel.late_seconds()):
        return _describe_missing(channel, waiting, evidence, out_of_time)._replace(place=own.num_events)
    return None


def describe_late_ranks(channel: WatchedChannel, waiting: Waiting, evidence: Evidence) -> str | None:
    """Describes the late ranks for a warning; returns None unless this is the first of the ranks that wait."""
    is_first_to_wait = all(rank in evidence.behind for rank in range(channel.rank))
    if not is_first_to_wait:
        return None
    late = _describe_missing(channel, waiting, evidence, [*evidence.behind])
    return f"{late.what}\n{late.details}" if late.details else late.what


def _find_deadlocked(channel: WatchedChannel, evidence: Evidence) -> list[int]:
    """Returns the ranks that cannot arrive because they wait for this rank in another collective."""
    limit = policies.trust().timeout_seconds
    posted = {rank: evidence.statuses[rank] for rank in evidence.behind if rank in evidence.statuses}
    # A status posted before this rank had waited for long may be about an earlier wait.
    fresh = {rank: status for rank, status in posted.items() if evidence.silent_seconds[rank] < limit / 2}
    in_a_cycle = [rank for rank, status in fresh.items() if channel.world_rank in status["blocked_on"]]
    if in_a_cycle or not channel.is_whole_world or len(fresh) < len(evidence.behind):
        return in_a_cycle
    # torch's own collectives: if no rank of the world is running, none of them will end.
    inside_torch = [rank for rank, status in fresh.items() if status["sits_seconds"] >= limit]
    is_anybody_running = any(
        rank not in inside_torch and status["waiting"] is None and not status["blocked_on"]
        for rank, status in fresh.items()
    )
    return [] if is_anybody_running else inside_torch


def _is_out_of_time(channel: WatchedChannel, evidence: Evidence, rank: int) -> bool:
    """Returns whether a rank has used up the time that a rank in its state is given."""
    policy, state = policies.trust(), evidence.behind[rank]
    status = evidence.statuses.get(rank)
    if state == _TRACED or (status is not None and status["in_debugger"]):
        return evidence.seconds >= max(policy.debugger_grace_seconds, channel.late_seconds())
    is_running = evidence.is_running(rank)
    limit = channel.late_seconds() if is_running else policy.timeout_seconds
    own = evidence.own
    if own.epoch == 0 and own.num_events == 1 and not state.startswith("stopped"):
        # This rank waits in its first event, for a rank that has issued nothing yet.
        limit = max(limit, policy.start_seconds)
    elif not is_running:
        return evidence.silent_seconds[rank] >= limit
    if is_running and not evidence.has_been_heard(rank):
        # On a busy machine the watchdog of a live rank may post late.
        limit += _STATUS_GRACE_SECONDS
    return evidence.seconds >= limit


# --- messages ------------------------------------------------------------------------------------------------------


def _describe_divergence(channel: WatchedChannel, logs: Logs, divergence: int) -> EpochFailure:
    ranks_by_event: dict[str, list[int]] = {}
    lines = []
    for rank, (num_events, events) in sorted(logs.items()):
        last = num_events - len(events)
        if divergence < num_events:
            ranks_by_event.setdefault(events[divergence - num_events], []).append(channel.ranks[rank])
        shown = events[max(0, divergence - last - 3) :][:8]
        lines.append(f"rank {channel.ranks[rank]}: ... {' > '.join(shown)}")
    ways = "; ".join(f"{_ranks(ranks)} went on to {name}" for name, ranks in ranks_by_event.items())
    what = f"ranks diverged: {ways}"
    fix = (
        "make every rank run the same modules in the same order, equally often, with the same settings, on inputs that "
        "need gradients alike; if ranks are meant to take different branches, call set_safe_participation() on them; "
        "no optimizer has used this step"
    )
    return EpochFailure(
        RankDisagreement,
        what,
        fix,
        "the events of each rank, from just before they diverged:\n" + "\n".join(lines),
    )


def _describe_sizes(channel: WatchedChannel, waiting: Waiting, sizes: dict[int, int]) -> EpochFailure:
    sent = "; ".join(f"rank {channel.ranks[rank]} sends {size} bytes" for rank, size in sorted(sizes.items()))
    what = f'ranks send messages of different sizes in "{collective_name(waiting.code)}": {sent}'
    return EpochFailure(RankDisagreement, what, "use the same parameters, dtypes and settings on every rank")


def _describe_missing(
    channel: WatchedChannel, waiting: Waiting, evidence: Evidence, missing: list[int]
) -> EpochFailure:
    states, stacks = _describe_ranks(channel, evidence, missing)
    name, within = collective_name(waiting.code), f"within {evidence.seconds:.1f} s"
    what = f'all ranks reached "{name}", but its data did not arrive {within}'
    if missing:
        what = (
            f'{_ranks([channel.ranks[rank] for rank in missing])} did not reach "{name}" {within}: {states}'
        )
    fix = (
        "find out what that rank was doing; if it is dead, restart from the last checkpoint; if it may take that long, "
        "raise late_seconds with set_trust() or the timeout of the process group, or start_seconds if it has not "
        "started yet"
    )
    return EpochFailure(PeerFailure, what, fix, stacks)


def _describe_deadlock(
    channel: WatchedChannel, waiting: Waiting, evidence: Evidence, deadlocked: list[int]
) -> EpochFailure:
    states, stacks = _describe_ranks(channel, evidence, deadlocked)
    names = _ranks([channel.ranks[rank] for rank in deadlocked])
    what = (
        f'ranks are waiting for each other: {names} did not reach "{collective_name(waiting.code)}" within '
        f"{evidence.seconds:.1f} s, waiting in another collective instead: {states}"
    )
    fix = "make every rank call the same collectives in the same order, on all process groups"
    return EpochFailure(RankDisagreement, what, fix, stacks)


def _describe_ranks(channel: WatchedChannel, evidence: Evidence, ranks: list[int]) -> tuple[str, str]:
    """Returns the states and the stacks of some ranks, as text."""
    states, stacks = [], []
    for rank in ranks:
        status = evidence.statuses.get(rank)
        name = channel.ranks[rank]
        last = "it has posted no status"
        if status is not None:
            last = "it has issued no collective yet"
            if status["events"]:
                last = f'its last event was "{status["events"][-1]}"'
            if status["waiting"]:
                last += f', it is waiting in "{status["waiting"]}"'
            if status["stack"]:
                stacks.append(f"stack of rank {name}:\n" + "\n".join(status["stack"]))
        states.append(f"rank {name} is {evidence.behind.get(rank, _ALIVE)}, {last}")
    return "; ".join(states), "\n".join(stacks)


def _ranks(ranks: list[int]) -> str:
    names = ", ".join(map(str, sorted(ranks)))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


def _process_state(channel: WatchedChannel, rank: int) -> str:
    """Returns the state of a rank's process, as far as it is visible from here."""
    home = channel.store.home(rank)
    if home is None:
        return _UNKNOWN
    if home["processes"] != channel.store.namespace:
        return f"on host {home['host']}"
    try:
        stat = FilePath(f"/proc/{home['pid']}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "dead"
    except OSError:
        # Out of file descriptors; whether the process exists can be asked without one.
        return _ALIVE if _process_exists(home["pid"]) else "dead"
    letter, *fields = stat.rpartition(")")[2].split()
    if home["began"] not in (None, fields[START_TIME_FIELD]):
        # The PID belongs to another process by now.
        return "dead"
    return {"Z": "dead", "X": "dead", "T": "stopped", "t": _TRACED}.get(letter, _ALIVE)


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
