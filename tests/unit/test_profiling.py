"""A step's events as lanes of bars."""

from __future__ import annotations

from shardwise import trace
from shardwise.train.profiling import timeline_of


def events(*entries):
    return [
        trace.Event(kind, unit, "forward", 0, order, time * 1_000_000_000)
        for order, (time, kind, unit) in enumerate(entries)
    ]


def bars(timeline, name):
    (lane,) = [lane for lane in timeline.lanes if lane.name == name]
    return [(bar.start, bar.end, bar.kind, bar.unit) for bar in lane.bars]


STEP = events(
    (11, trace.UNSHARD, ""),
    (12, trace.PRE_FORWARD, ""),
    (12, trace.UNSHARD, "a"),
    (13, trace.PRE_FORWARD, "a"),
    (13, trace.UNSHARD, "b"),
    (15, trace.POST_FORWARD, "a"),
    (15, trace.RESHARD, "a"),
    (16, trace.PRE_FORWARD, "b"),
    (17, trace.POST_FORWARD, "b"),
    (18, trace.POST_FORWARD, ""),
    (20, trace.PRE_BACKWARD, "b"),
    (22, trace.REDUCE, "b"),
    (22, trace.POST_BACKWARD, "b"),
    (23, trace.PRE_BACKWARD, "a"),
    (24, trace.REDUCE, "a"),
    (24, trace.POST_BACKWARD, "a"),
)
MARKS = [(10, "data"), (12, "forward"), (18, "backward"), (27, "optimizer"), (29, "rest")]


def step():
    marks = [(kind, time * 1_000_000_000) for time, kind in MARKS]
    return timeline_of("rank 0", marks, STEP, 30_000_000_000, {"ranks": "2"})


def test_a_units_time_is_without_that_of_the_units_inside_it():
    assert bars(step(), "compute") == [
        (2, 3, "forward", ""),
        (3, 5, "forward", "a"),
        (5, 6, "forward", ""),
        (6, 7, "forward", "b"),
        (7, 8, "forward", ""),
        (10, 12, "backward", "b"),
        (13, 14, "backward", "a"),
    ]


def test_gathers_end_when_their_unit_runs_and_reduces_when_the_next_begins():
    assert bars(step(), "gather") == [(1, 2, "gather", ""), (2, 3, "gather", "a"), (3, 6, "gather", "b")]
    assert bars(step(), "reduce") == [(12, 14, "reduce", "b"), (14, 17, "reduce", "a")]


def test_the_hosts_lane_covers_the_whole_step():
    found = bars(step(), "host")
    assert [kind for _, _, kind, _ in found] == ["data", "forward", "backward", "optimizer", "rest"]
    assert [start for start, *_ in found[1:]] == [end for _, end, *_ in found[:-1]]
    assert (found[0][0], found[-1][1]) == (0, 20)
    assert step().seconds == 20


def test_a_model_without_units_has_the_hosts_lane_alone():
    timeline = timeline_of("rank 0", [("data", 0), ("forward", 10)], [], 20, {})
    assert [lane.name for lane in timeline.lanes] == ["host"]
