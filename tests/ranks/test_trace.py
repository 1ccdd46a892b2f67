"""The trace: what a recorder sees, and what it makes of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import stat

import pytest
import torch.distributed as dist

from shardwise import fully_shard, trace
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import Layers, data
from tests.ranks.subject import beyond_torch

pytestmark = beyond_torch


def sharded(num_layers=2, reshard=True):
    model = seeded(Layers(num_layers=num_layers))
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard)
    return fully_shard(model)


def step(model):
    model(data(0, dist.get_rank(), 2, 6)).sum().backward()


def record_a_step(**kwargs):
    model = sharded(**kwargs)
    with trace.record(model) as recorder:
        step(model)
    return recorder


def every_event_of_a_step():
    recorder = record_a_step()
    units = ["", "layers.0", "layers.1"]
    for kind in ("pre_forward", "post_forward", "pre_backward", "post_backward", "reduce"):
        assert sorted(unit for _, unit, _ in recorder.of(kind)) == units, kind
    assert [unit for _, unit, _ in recorder.of("pre_forward", "post_forward")] == [
        "",
        "layers.0",
        "layers.0",
        "layers.1",
        "layers.1",
        "",
    ]
    assert [unit for _, unit, _ in recorder.of("unshard")] == [
        "",
        "layers.0",
        "layers.1",
        "layers.1",
        "layers.0",
    ]
    assert [event for event in recorder.of("reshard") if event[2] == "forward"] == [
        ("reshard", "layers.0", "forward"),
        ("reshard", "layers.1", "forward"),
    ]
    assert [unit for _, unit, phase in recorder.of("reshard") if phase != "forward"] == [
        "layers.1",
        "layers.0",
        "",
    ]
    assert {event.kind for event in recorder.events} == set(trace.KINDS) - {trace.SEND}


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_a_recorder_sees_every_gather_free_reduce_forward_and_backward_of_a_unit(kind):
    run_ranks(every_event_of_a_step, 2, kind=kind)


def kept_units():
    recorder = record_a_step(reshard=False)
    assert [unit for _, unit, _ in recorder.of("unshard")] == ["", "layers.0", "layers.1"]
    assert [unit for _, unit, _ in recorder.of("reshard")] == ["layers.1", "layers.0", ""]


def test_what_is_not_done_emits_no_event():
    run_ranks(kept_units, 2)


def fields_of_events():
    recorder = record_a_step()
    events = recorder.events
    assert [event.order for event in events] == list(range(len(events)))
    assert all(event.rank == dist.get_rank() for event in events)
    assert all(earlier.time_ns <= later.time_ns for earlier, later in itertools.pairwise(events))
    with pytest.raises(dataclasses.FrozenInstanceError):
        events[0].unit = "another"
    assert {event.phase for event in events} <= {"forward", "pre_backward", "post_backward", "idle"}


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_an_event_is_a_frozen_record_of_rank_unit_phase_order_and_time(kind):
    run_ranks(fields_of_events, 3, kind=kind)


def only_inside_the_block():
    model = sharded()
    step(model)
    with trace.record(model) as recorder:
        step(model)
        seen = list(recorder.events)
        assert seen
        recorder.clear()
        assert recorder.events == []
        step(model)
        assert recorder.of() == [(event.kind, event.unit, event.phase) for event in seen]
    count = len(recorder.events)
    step(model)
    assert len(recorder.events) == count


def test_events_are_recorded_inside_the_block_only():
    run_ranks(only_inside_the_block, 2)


def unsharded_by_hand():
    model = sharded()
    with trace.record(model) as recorder:
        model.layers[0].unshard()
        model.layers[0].unshard()
        model.layers[0].reshard()
        model.layers[0].reshard()
    return recorder.of()


def test_unshard_by_hand_is_an_event_of_an_idle_model_and_a_second_is_none():
    for events in run_ranks(unsharded_by_hand, 2):
        # Before the first forward nobody has told the unit its place in the model.
        assert [(kind, phase) for kind, _, phase in events] == [("unshard", "idle"), ("reshard", "idle")]


def as_text():
    recorder = record_a_step()
    return recorder.text(), recorder.events


def test_the_text_has_a_line_for_each_event():
    for rank, (text, events) in enumerate(run_ranks(as_text, 2)):
        lines = text.splitlines()[1:]
        assert len(lines) == len(events)
        for line, event in zip(lines, events, strict=True):
            assert event.kind in line.split()
            assert event.phase in line.split()
            assert str(rank) in line.split()
            assert line.endswith(event.unit or "(root)")


def as_chrome(folder):
    recorder = record_a_step()
    path = f"{folder}/rank{dist.get_rank()}.json"
    recorder.save_chrome(path)
    return path, recorder.events


def test_the_chrome_trace_loads_and_holds_every_event(tmp_path):
    for rank, (path, events) in enumerate(run_ranks(as_chrome, 2, str(tmp_path))):
        with open(path) as file:
            rows = json.load(file)["traceEvents"]
        assert all(row["pid"] == rank for row in rows)
        assert all({"name", "ph", "ts", "pid", "tid"} <= row.keys() for row in rows)
        bars = [row for row in rows if row["ph"] == "X"]
        marks = [row for row in rows if row["ph"] == "i"]
        # A bar stands for two events, its begin and its end.
        assert 2 * len(bars) + len(marks) == len(events)
        assert len(bars) == 6, "a forward and a backward of each of three units"
        assert all(bar["dur"] >= 0 for bar in bars)
        assert {row["args"]["unit"] for row in rows} == {"", "layers.0", "layers.1"}


def two_recorders():
    """The inner block sees its own part; the outer one goes on after it."""
    model = sharded()
    with trace.record(model) as outer:
        step(model)
        before = len(outer.events)
        with trace.record(model) as inner:
            step(model)
        step(model)
    assert len(inner.events) == before
    assert len(outer.events) >= 2 * before


def test_blocks_may_nest():
    run_ranks(two_recorders, 2)


# --- files ----------------------------------------------------------------------------------------------------------

FAILURE = trace.Failure(0, [0, 1], "PeerFailure: rank 1 is dead", ["a line"], 3, [("gather the root", 0.5)])


def test_a_failure_is_left_in_a_new_file_that_only_its_owner_can_read(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = os.umask(0)
    try:
        first, second = trace.save_failure(None, FAILURE), trace.save_failure(None, FAILURE)
    finally:
        os.umask(before)
    assert first != second
    for file in (first, second):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert dataclasses.asdict(trace.read_failure(file))["error"] == FAILURE.error


def test_a_failure_is_not_written_to_a_file_or_through_a_link_that_somebody_put_there(tmp_path, monkeypatch):
    """Whoever shares the folder for temporary files can foresee no name of ours."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    (tmp_path / "shardwise").mkdir()
    for name in (
        f"shardwise/failure-rank0-{os.getpid()}.json",
        f"shardwise-failure-rank0-{os.getpid()}.json",
    ):
        (tmp_path / name).symlink_to(theirs)
    file = trace.save_failure(None, FAILURE)
    assert theirs.read_text() == "theirs"
    assert trace.read_failure(file).rank == 0


def test_a_chrome_trace_is_for_its_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        trace.Recorder().save_chrome(tmp_path / "step.json")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "step.json").stat().st_mode) == 0o600
