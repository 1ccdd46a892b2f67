"""What the watch tells of a rank: where it is, but only once others have waited for it long enough to want to know."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from shardwise import PeerFailure, policies
from shardwise.comm import watch
from shardwise.comm.path import Path, code_of
from shardwise.comm.wire import Foreign, WatchedWire
from tests.unit.test_judge import note_of


def test_stacks_are_read_late():
    wire = SimpleNamespace(path=Path(), thread=threading.get_ident(), group=lambda: None)
    timeout_seconds, sight = policies.trust().timeout_seconds, watch._Sight()
    assert watch._status(wire, None, sight, timeout_seconds / 10)["stack"] == []
    assert any(
        "in _status" in line for line in watch._status(wire, None, sight, timeout_seconds / 2)["stack"]
    )


def test_a_rank_that_gets_on_without_collectives_is_not_still():
    sight = watch._Sight()
    sight.still_seconds((0, 5, 1, 0), now=10.0)
    assert sight.still_seconds((0, 5, 1, 0), now=13.0) == 3.0
    assert sight.still_seconds((0, 5, 2, 0), now=14.0) == 0.0


class Board:
    """Of a group of two, with what the other rank says; it may fail."""

    processes = "here"

    def __init__(self, error=None):
        self.error, self.posted, self.verdicts = error, [], []

    def post_status(self, note):
        self.posted.append(note)

    def verdict(self, epoch):
        if self.error is not None:
            raise self.error

    def statuses(self):
        return {}

    def home(self, rank):
        return {"processes": "elsewhere", "host": "there"}


class WaitingWire(WatchedWire):
    """A rank that waits, without a group."""

    def __init__(self, board):
        self.path, self.board, self.rank, self.own_rank, self.world, self.ranks = (
            Path(),
            board,
            0,
            0,
            2,
            [0, 1],
        )
        self.path.note(code_of("gather 'a' in forward"))
        self.path.note(code_of("gather 'b' in forward"))
        self.group, self.thread, self.left_at = (lambda: None), threading.get_ident(), -math.inf
        self.waiting = Foreign(code_of("gather 'b' in forward"), looks_itself=True)
        self._sentence, self.is_whole_world, self.num_moves = None, True, 0
        self.ended = []

    def is_over(self):
        return False

    def late_seconds(self):
        return 1800.0

    def end_epoch(self, epoch, verdict, void=None):
        self.ended.append(verdict)


@pytest.fixture
def clock(monkeypatch):
    """A clock of the watch's that a test moves."""
    times = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: times.now))
    monkeypatch.setattr(watch, "stack_of", lambda thread: ["somewhere"])
    return times


def watched(wire, clock, until_seconds):
    """Looks at a rank that waits, a few times a second, for so long; as the watch's thread does."""
    seen = watch.Watch()
    seen._sights[wire] = sight = watch._Sight()
    while clock.now < 1000.0 + until_seconds and wire.verdict is None:
        seen._look_once(wire, sight)
        clock.now += 0.1
    return sight


def test_a_rank_that_moves_gives_a_sign_of_life_every_few_seconds(clock):
    wire = WaitingWire(Board())
    wire.waiting = None
    seen, sight = watch.Watch(), watch._Sight(last_status=1000.0)
    for _ in range(200):
        wire.num_moves += 1
        seen._look_once(wire, sight)
        clock.now += 0.1
    assert 3 <= len(wire.board.posted) <= 5
    beats = [note["beat"] for note in wire.board.posted]
    assert len(set(beats)) == len(beats)


@pytest.mark.parametrize("error", [dist.DistStoreError("Too many open files"), KeyError("a bug of ours")])
def test_what_this_rank_is_out_of_ends_no_wait_that_others_would_end_well(error, clock, caplog):
    wire = WaitingWire(Board(error))
    watched(wire, clock, 1700.0)
    assert wire.verdict is None
    assert len([record for record in caplog.records if "fails" in record.message]) == 1
    watched(wire, clock, 4000.0)
    assert str(error) in str(wire.verdict)


@pytest.mark.parametrize(
    "error", [dist.DistNetworkError("Broken pipe"), dist.DistStoreError("wait timeout after 3 s")]
)
def test_a_store_that_has_gone_ends_waits_in_seconds(error, clock):
    wire = WaitingWire(Board(error))
    watched(wire, clock, 100.0)
    assert clock.now < 1030.0
    assert "the store cannot be asked" in str(wire.verdict)


def test_a_store_that_fails_for_a_moment_ends_no_wait_however_long_that_has_been(clock):
    wire = WaitingWire(Board())
    wire.board.statuses = lambda: {1: {**OTHER, "beat": int(clock.now)}}
    seen, sight = watch.Watch(), watch._Sight()
    seen._sights[wire] = sight
    for tick in range(3000):
        wire.board.error = dist.DistNetworkError("Broken pipe") if 1000 < tick < 1150 else None
        seen._look_once(wire, sight)
        clock.now += 0.1
    assert wire.verdict is None
    assert not wire.ended


OTHER = note_of(epoch=0, num_events=1, events=["gather 'a' in forward"])


def test_a_rank_on_another_host_is_waited_for_while_it_gives_signs_of_life(clock, caplog):
    wire = WaitingWire(Board())
    silent_from = 1400.0
    wire.board.statuses = lambda: {1: {**OTHER, "beat": int(min(clock.now, silent_from) / 5)}}
    seen, sight = watch.Watch(), watch._Sight()
    seen._sights[wire] = sight
    while clock.now < 1700.0 and not wire.ended:
        seen._look_once(wire, sight)
        clock.now += 0.1
    assert silent_from + 15.0 < clock.now < silent_from + 30.0
    assert wire.ended[0].error is PeerFailure
    said = [
        record.message
        for record in caplog.records
        if "goes on waiting: rank 1 did not come" in record.message
    ]
    assert 4 <= len(said) <= 6, "after 20, 40, 80, 160 and 320 s"


@pytest.mark.parametrize(
    ("function", "sits"), [("barrier", True), ("all_reduce", True), ("send", False), ("step", False)]
)
def test_a_rank_that_does_not_leave_a_collective_of_torchs_sits_there(function, sits):
    sight = watch._Sight()
    file = "/x/torch/distributed/distributed_c10d.py" if function != "step" else "/x/mine.py"
    stack = [
        '  File "/x/mine.py", line 1, in main',
        f'  File "{file}", line 7, in {function}\n    work.wait()',
    ]
    sight.sits_seconds(stack, 5, 100.0)
    assert sight.sits_seconds(stack, 5, 130.0) == (30.0 if sits else 0.0)
    assert sight.sits_seconds(stack, 6, 140.0) == 0.0, "it has left one and is in the next"
    assert sight.sits_seconds(stack, None, 150.0) == 0.0, "what it has issued is not known"


def test_how_long_a_rank_has_waited_is_not_held_against_those_it_waits_for_next(clock):
    wire = WaitingWire(Board())
    wire.board.home = lambda rank: {"processes": "elsewhere", "host": "there"}

    def move_on():
        # Just when the watch reads what the others do, the rank gets on and waits for them at the next place.
        wire.path.note(code_of("gather 'c' in forward"))
        return {}

    seen, sight = watch.Watch(), watch._Sight()
    seen._sights[wire] = sight
    seen._look_once(wire, sight)
    clock.now += 2000.0
    note = wire.board.post_status
    wire.board.post_status = lambda status: (note(status), move_on())
    seen._look_once(wire, sight)
    assert wire.board.posted
    assert not wire.ended
