"""Why does a rank wait? From what ranks say of themselves to a verdict, in words.

    parted      their paths differ, or the sizes of what they send
    dead        a process is gone
    stalled     nobody parted, but a rank does not come within the time that is set

Nothing here talks or waits: ``watch`` brings what ranks have said, and makes the verdict known.
"""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import NamedTuple

from shardwise import policies
from shardwise.comm.board import Note
from shardwise.comm.path import Story, first_parting, words_of
from shardwise.comm.wire import Verdict, Waiting, WatchedWire
from shardwise.errors import PeerFailure, RankDisagreement

# How long one waits for all ranks to say what they do, once it is clear that some have parted or do not come.
_TELLING_SECONDS = 3.0

Paths = dict[int, tuple[int, list[str]]]


class Evidence(NamedTuple):
    """What one rank that waits knows of the others."""

    own: Story
    # What others in this epoch last said of themselves; and who has said something new since the wait began.
    statuses: dict[int, Note]
    heard: set[int]
    seconds: float


def judge(wire: WatchedWire, waiting: Waiting, evidence: Evidence) -> Verdict | None:
    """How the epoch ends, if it is to end."""
    own, statuses, seconds = evidence.own, evidence.statuses, evidence.seconds
    paths = {rank: (note["num_events"], note["events"]) for rank, note in statuses.items()}
    paths[wire.rank] = (own.num_events, own.words)
    parting = first_parting(list(paths.values()))
    if parting is not None:
        has_heard_all = len(paths) == wire.world or seconds > _TELLING_SECONDS
        return _parted(wire, paths, parting) if has_heard_all else None
    states = _behind(wire, evidence)
    gone = [rank for rank, state in states.items() if state == "dead"]
    if gone:
        return _lost(wire, waiting, evidence, states, gone)
    sizes = {wire.rank: getattr(waiting, "message_bytes", 0)}
    for rank, note in statuses.items():
        if note["num_events"] == own.num_events and note["waiting"] == words_of(waiting.code):
            sizes[rank] = note["bytes"]
    if len(sizes) == wire.world and len(set(sizes.values())) > 1:
        return _sized(wire, waiting, sizes)
    if seconds < _seconds_to_wait(evidence, states):
        return None
    return _lost(wire, waiting, evidence, states, [*states])._replace(place=own.num_events)


def missed_at_start(wire: WatchedWire, waiting: Waiting, evidence: Evidence) -> str | None:
    """Who is late to begin, in words, for the first of those that wait to tell; all of them go on waiting."""
    if evidence.seconds < policies.trust().timeout_seconds:
        return None
    states = _behind(wire, evidence)
    is_first_to_wait = all(rank in states for rank in range(wire.rank))
    if not is_first_to_wait or not _are_yet_to_begin(evidence, states):
        return None
    return _lost(wire, waiting, evidence, states, [*states]).what


def _behind(wire: WatchedWire, evidence: Evidence) -> dict[int, str]:
    """The ranks that have not come to where this one waits, and how they are."""
    own, statuses = evidence.own, evidence.statuses
    return {
        rank: _process_state(wire, rank)
        for rank in range(wire.world)
        if rank != wire.rank and (rank not in statuses or statuses[rank]["num_events"] < own.num_events)
    }


def _are_yet_to_begin(evidence: Evidence, states: dict[int, str]) -> bool:
    """Whether this rank waits in the first thing it does, for some that have done nothing and are free to."""
    is_first = evidence.own.epoch == 0 and evidence.own.num_events == 1
    return is_first and bool(states) and not any(state.startswith("stopped") for state in states.values())


def _seconds_to_wait(evidence: Evidence, states: dict[int, str]) -> float:
    """How long those that are behind are waited for."""
    policy = policies.trust()
    said = [evidence.statuses[rank] for rank in states if rank in evidence.statuses]
    patience_seconds = max((note["patience_seconds"] for note in said), default=0.0)
    if any(note["in_debugger"] for note in said):
        return max(policy.debugger_grace_seconds, patience_seconds)
    if patience_seconds:
        return policy.timeout_seconds + patience_seconds
    if _are_yet_to_begin(evidence, states):
        return max(policy.timeout_seconds, policy.start_seconds)
    if any(state == "alive" and rank not in evidence.heard for rank, state in states.items()):
        # On a busy machine the watch of one that lives may be late to say where it is.
        return policy.timeout_seconds + _TELLING_SECONDS
    return policy.timeout_seconds


# --- words ---------------------------------------------------------------------------------------------------------


def _parted(wire: WatchedWire, paths: Paths, parting: int) -> Verdict:
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
    return Verdict(
        RankDisagreement,
        what,
        fix,
        "the paths that ranks took, from just before they parted:\n" + "\n".join(lines),
    )


def _sized(wire: WatchedWire, waiting: Waiting, sizes: dict[int, int]) -> Verdict:
    told = "; ".join(f"rank {wire.ranks[rank]} sends {size} bytes" for rank, size in sorted(sizes.items()))
    what = f"ranks do not mean the same when they {words_of(waiting.code)}: {told}"
    return Verdict(RankDisagreement, what, "use the same parameters, dtypes and settings on every rank")


def _lost(
    wire: WatchedWire, waiting: Waiting, evidence: Evidence, states: dict[int, str], missing: list[int]
) -> Verdict:
    told, stacks = [], []
    for rank in missing:
        note = evidence.statuses.get(rank)
        name = wire.ranks[rank]
        where = "it has said nothing of itself"
        if note is not None:
            where = f"the last it did was to {note['events'][-1]}" if note["events"] else "it has not begun"
            if note["waiting"]:
                where += f", it waits to {note['waiting']}"
            if note["stack"]:
                stacks.append(f"rank {name} is at\n" + "\n".join(note["stack"]))
        told.append(f"rank {name} is {states.get(rank, 'alive')}, {where}")
    if not missing:
        told.append("all of them have come")
    names = _ranks([wire.ranks[rank] for rank in missing]) if missing else "the data of ranks"
    what = (
        f"{names} did not come to {words_of(waiting.code)} within {evidence.seconds:.1f} s: {'; '.join(told)}"
    )
    fix = (
        "look at what that rank was doing; if it is to work alone for a while, let it do so in shardwise.patience(), "
        "or raise timeout_seconds with set_trust(), start_seconds if it has not begun; if it is gone, restart from "
        "the last checkpoint"
    )
    return Verdict(PeerFailure, what, fix, "\n".join(stacks))


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
