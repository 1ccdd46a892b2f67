"""What the watch tells of a rank: where it is, but only once others have waited for it long enough to want to know."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from shardwise import PeerFailure, policies
from shardwise.comm.channels.channel import CollectiveLog, collective_code
from shardwise.comm.channels.watched import BackendWait, WatchedChannel
from shardwise.comm.watchdog import thread as watchdog_thread
from tests.unit.test_watchdog_diagnosis import note_of


def test_stacks_are_read_late():
    channel = SimpleNamespace(log=CollectiveLog(), thread=threading.get_ident(), group_if_alive=lambda: None)
    timeout_seconds, observed = policies.trust().timeout_seconds, watchdog_thread._Observation()
    assert watchdog_thread._status(channel, None, observed, timeout_seconds / 10)["stack"] == []
    assert any(
        "in _status" in line
        for line in watchdog_thread._status(channel, None, observed, timeout_seconds / 2)["stack"]
    )


def test_a_rank_that_gets_on_without_collectives_is_not_still():
    observed = watchdog_thread._Observation()
    observed.still_seconds((0, 5, 1, 0), now=10.0)
    assert observed.still_seconds((0, 5, 1, 0), now=13.0) == 3.0
    assert observed.still_seconds((0, 5, 2, 0), now=14.0) == 0.0


class Board:
    """Of a group of two, with what the other rank says; it may fail."""

    namespace = "here"

    def __init__(self, error=None):
        self.error, self.posted, self.failures = error, [], []

    def post_status(self, note):
        self.posted.append(note)

    def failure(self, epoch):
        if self.error is not None:
            raise self.error

    def statuses(self):
        return {}

    def home(self, rank):
        return {"processes": "elsewhere", "host": "there"}


class WaitingChannel(WatchedChannel):
    """A rank that waits, without a group."""

    def __init__(self, store):
        self.log, self.store, self.rank, self.world_rank, self.world, self.ranks = (
            CollectiveLog(),
            store,
            0,
            0,
            2,
            [0, 1],
        )
        self.log.record(collective_code("gather 'a' in forward"))
        self.log.record(collective_code("gather 'b' in forward"))
        self._group, self.thread, self.restarted_at = (lambda: None), threading.get_ident(), -math.inf
        self.waiting = BackendWait(collective_code("gather 'b' in forward"), polls_failure=True)
        self._epoch_failure, self.is_whole_world, self.num_moves = None, True, 0
        self.ended = []

    def is_over(self):
        return False

    def late_seconds(self):
        return 1800.0

    def end_epoch(self, epoch, failure, void=None):
        self.ended.append(failure)


@pytest.fixture
def clock(monkeypatch):
    """A clock of the watch's that a test moves."""
    times = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(watchdog_thread, "time", SimpleNamespace(monotonic=lambda: times.now))
    monkeypatch.setattr(watchdog_thread, "stack_of", lambda thread: ["somewhere"])
    return times


def watched(channel, clock, until_seconds):
    """Looks at a rank that waits, a few times a second, for so long; as the watch's thread does."""
    seen = watchdog_thread.Watchdog()
    seen._seen[channel] = observed = watchdog_thread._Observation()
    while clock.now < 1000.0 + until_seconds and channel.failure is None:
        seen._check_channel(channel, observed)
        clock.now += 0.1
    return observed


def test_a_rank_that_makes_progress_posts_a_heartbeat_every_few_seconds(clock):
    channel = WaitingChannel(Board())
    channel.waiting = None
    seen, observed = watchdog_thread.Watchdog(), watchdog_thread._Observation(last_status=1000.0)
    for _ in range(200):
        channel.num_moves += 1
        seen._check_channel(channel, observed)
        clock.now += 0.1
    assert 3 <= len(channel.store.posted) <= 5
    beats = [note["beat"] for note in channel.store.posted]
    assert len(set(beats)) == len(beats)


@pytest.mark.parametrize("error", [dist.DistStoreError("Too many open files"), KeyError("a bug of ours")])
def test_a_shortage_on_this_rank_ends_no_wait_that_others_would_complete(error, clock, caplog):
    channel = WaitingChannel(Board(error))
    watched(channel, clock, 1700.0)
    assert channel.failure is None
    assert len([record for record in caplog.records if "fails" in record.message]) == 1
    watched(channel, clock, 4000.0)
    assert str(error) in str(channel.failure)


@pytest.mark.parametrize(
    "error", [dist.DistNetworkError("Broken pipe"), dist.DistStoreError("wait timeout after 3 s")]
)
def test_a_store_that_has_gone_ends_waits_in_seconds(error, clock):
    channel = WaitingChannel(Board(error))
    watched(channel, clock, 100.0)
    assert clock.now < 1030.0
    assert "store does not answer" in str(channel.failure)


def test_a_store_that_fails_for_a_moment_ends_no_wait_however_long_that_has_been(clock):
    channel = WaitingChannel(Board())
    channel.store.statuses = lambda: {1: {**OTHER, "beat": int(clock.now)}}
    seen, observed = watchdog_thread.Watchdog(), watchdog_thread._Observation()
    seen._seen[channel] = observed
    for tick in range(3000):
        channel.store.error = dist.DistNetworkError("Broken pipe") if 1000 < tick < 1150 else None
        seen._check_channel(channel, observed)
        clock.now += 0.1
    assert channel.failure is None
    assert not channel.ended


OTHER = note_of(epoch=0, num_events=1, events=["gather 'a' in forward"])


def test_a_rank_on_another_host_is_waited_for_while_its_heartbeat_continues(clock, caplog):
    channel = WaitingChannel(Board())
    silent_from = 1400.0
    channel.store.statuses = lambda: {1: {**OTHER, "beat": int(min(clock.now, silent_from) / 5)}}
    seen, observed = watchdog_thread.Watchdog(), watchdog_thread._Observation()
    seen._seen[channel] = observed
    while clock.now < 1700.0 and not channel.ended:
        seen._check_channel(channel, observed)
        clock.now += 0.1
    assert silent_from + 15.0 < clock.now < silent_from + 30.0
    assert channel.ended[0].error is PeerFailure
    said = [
        record.message
        for record in caplog.records
        if "is still waiting: rank 1 did not reach" in record.message
    ]
    assert 4 <= len(said) <= 6, "after 20, 40, 80, 160 and 320 s"


@pytest.mark.parametrize(
    ("function", "sits"), [("barrier", True), ("all_reduce", True), ("send", False), ("step", False)]
)
def test_a_rank_that_stays_in_a_torch_collective_is_known_to_sit_there(function, sits):
    observed = watchdog_thread._Observation()
    file = "/x/torch/distributed/distributed_c10d.py" if function != "step" else "/x/mine.py"
    stack = [
        '  File "/x/mine.py", line 1, in main',
        f'  File "{file}", line 7, in {function}\n    work.wait()',
    ]
    observed.seconds_inside(stack, 5, 100.0)
    assert observed.seconds_inside(stack, 5, 130.0) == (30.0 if sits else 0.0)
    assert observed.seconds_inside(stack, 6, 140.0) == 0.0, "it has left one and is in the next"
    assert observed.seconds_inside(stack, None, 150.0) == 0.0, "what it has issued is not known"


def test_a_new_wait_starts_with_a_new_clock(clock):
    channel = WaitingChannel(Board())
    channel.store.home = lambda rank: {"processes": "elsewhere", "host": "there"}

    def move_on():
        # Just when the watch reads what the others do, the rank gets on and waits for them at the next place.
        channel.log.record(collective_code("gather 'c' in forward"))
        return {}

    seen, observed = watchdog_thread.Watchdog(), watchdog_thread._Observation()
    seen._seen[channel] = observed
    seen._check_channel(channel, observed)
    clock.now += 2000.0
    note = channel.store.post_status
    channel.store.post_status = lambda status: (note(status), move_on())
    seen._check_channel(channel, observed)
    assert channel.store.posted
    assert not channel.ended
