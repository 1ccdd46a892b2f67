"""Who is waited for, and for how long: from what ranks post about themselves to a failure."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest

from shardwise import PeerFailure, RankDisagreement
from shardwise.comm.channels.channel import LogExcerpt, collective_code
from shardwise.comm.watchdog import diagnosis
from shardwise.comm.watchdog.diagnosis import Evidence, collect_evidence, describe_late_ranks, diagnose

HERE = os.getpid()
GATHER = collective_code("gather 'a' in forward")
WAITING = SimpleNamespace(code=GATHER, message_bytes=8)
OWN = LogExcerpt(0, 3, ["x", "y", "gather 'a' in forward"])
LATE_SECONDS = 1800.0


def channel_of(homes=None, world=3):
    store = SimpleNamespace(namespace="this table", home=(homes or {}).get)
    return SimpleNamespace(
        rank=0,
        world_rank=0,
        world=world,
        ranks=list(range(world)),
        is_whole_world=True,
        late_seconds=lambda: LATE_SECONDS,
        store=store,
    )


def note_of(**changes):
    return {
        "num_events": 2,
        "events": ["x", "y"],
        "waiting": None,
        "bytes": 0,
        "stack": [],
        "in_debugger": False,
        "sits_seconds": 0.0,
        "sees": [],
        "blocked_on": [],
        "gone": False,
        **changes,
    }


def here(**changes):
    return note_of(num_events=3, events=OWN.names, waiting="gather 'a' in forward", bytes=8, **changes)


def failure(state, seconds, silent=1.0, note=None, others=None, witness_silent=1.0):
    """What becomes of a wait for rank 1, with rank 2 waiting too."""
    statuses = {1: note_of() if note is None else note, 2: others or here()}
    evidence = Evidence(OWN, statuses, {0: 0.0, 1: silent, 2: witness_silent}, {1: state}, seconds)
    return diagnose(channel_of(), WAITING, evidence)


@pytest.mark.parametrize(("state", "silent"), [("alive", 1.0), ("alive", 700.0), ("on host there", 4.0)])
def test_a_rank_that_runs_is_waited_for_as_long_as_the_group_waits(state, silent):
    assert failure(state, 25.0, silent) is None
    assert failure(state, 1700.0, silent) is None
    given_up = failure(state, 1810.0, silent)
    assert given_up.error is PeerFailure
    assert "rank 1 did not reach \"gather 'a' in forward\" within 1810.0 s" in given_up.what


@pytest.mark.parametrize("state", ["stopped", "on host there"])
def test_a_rank_without_heartbeat_is_given_up_in_seconds(state):
    assert failure(state, 19.0, 19.0) is None
    # A debugger that looked at it for a moment stopped it, too; and beats come a few seconds apart.
    assert failure(state, 500.0, 6.0) is None
    assert failure(state, 500.0, 21.0).error is PeerFailure


def test_ranks_of_its_host_vouch_for_one_whose_watchdog_cannot_post():
    sees_it = here(sees=[1])
    assert failure("on host there", 500.0, 100.0, others=sees_it) is None
    assert failure("on host there", 500.0, 100.0, others=sees_it, witness_silent=30.0) is not None
    assert failure("stopped", 500.0, 100.0, others=sees_it) is not None


@pytest.mark.parametrize("state", ["dead", "gone"])
def test_a_rank_that_is_dead_or_has_ended_is_named_at_once(state):
    assert failure(state, 0.5, 0.5).error is PeerFailure


@pytest.mark.parametrize(
    ("state", "note"), [("stopped in a debugger", note_of()), ("alive", note_of(in_debugger=True))]
)
def test_a_rank_in_a_debugger_has_the_time_that_debuggers_get(state, note):
    assert failure(state, 3500.0, 3500.0, note) is None
    assert failure(state, 3700.0, 3700.0, note) is not None


def test_ranks_that_wait_for_each_other_on_two_groups_are_told_in_seconds():
    blocked = note_of(blocked_on=[0, 2])
    assert failure("alive", 19.0, note=blocked) is None
    reported = failure("alive", 21.0, note=blocked)
    assert reported.error is RankDisagreement
    assert "ranks are waiting for each other" in reported.what
    assert failure("alive", 25.0, silent=24.0, note=blocked) is None, "it may have been said long ago"
    assert failure("alive", 25.0, note=note_of(blocked_on=[7])) is None, (
        "it waits for somebody else, who may run"
    )


def test_a_rank_in_a_torch_collective_that_nobody_else_joins_is_reported_in_seconds():
    sits = note_of(sits_seconds=21.0)
    assert failure("alive", 30.0, note=sits).error is RankDisagreement
    assert failure("alive", 30.0, note=note_of(sits_seconds=9.0)) is None
    statuses = {1: sits, 2: note_of()}
    evidence = Evidence(OWN, statuses, dict.fromkeys(range(3), 1.0), {1: "alive", 2: "alive"}, 30.0)
    assert diagnose(channel_of(), WAITING, evidence) is None, "rank 2 runs, and may come there"
    channel = channel_of()
    channel.is_whole_world = False
    evidence = evidence._replace(behind={1: "alive"}, statuses={1: sits, 2: here()})
    assert diagnose(channel, WAITING, evidence) is None, "ranks that are not in this group may come there"


def test_the_first_of_the_waiting_ranks_reports_who_is_late():
    statuses = {1: note_of(stack=["  File 'x'"]), 2: here()}
    evidence = Evidence(OWN, statuses, dict.fromkeys(range(3), 1.0), {1: "alive"}, 25.0)
    said = describe_late_ranks(channel_of(), WAITING, evidence)
    assert 'rank 1 is alive, its last event was "y"' in said
    assert "stack of rank 1:\n  File 'x'" in said
    other = channel_of()
    other.rank = other.world_rank = 2
    assert describe_late_ranks(other, WAITING, evidence) is None


def state_of(home):
    channel = channel_of({1: home})
    return collect_evidence(channel, OWN, {2: here()}, dict.fromkeys(range(3), 1.0), 1.0).behind[1]


def test_a_rank_out_of_descriptors_calls_no_living_rank_dead(monkeypatch):
    home = {"processes": "this table", "pid": HERE, "began": None, "host": "here"}
    assert state_of(home) == "alive"

    def no_descriptors(self):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(diagnosis.FilePath, "read_text", no_descriptors)
        assert state_of(home) == "alive"
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        assert state_of({**home, "pid": pid}) == "dead"
    assert state_of({**home, "pid": pid}) == "dead"


def test_a_later_process_with_the_pid_of_a_rank_is_not_that_rank():
    home = {"processes": "this table", "pid": HERE, "began": "1", "host": "here"}
    assert state_of(home) == "dead"
