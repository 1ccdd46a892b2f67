"""Timelines of what was measured: from a recorder's events, and from files."""

import gzip
import json
from dataclasses import replace

import pytest
import torch

from shardwise import trace
from shardwise.cli import main
from shardwise.errors import ConfigError
from shardwise.forecast.measured import read_timeline, timeline_of_events
from shardwise.forecast.timeline import Bar, Lane, Memory, Timeline
from shardwise.trace import Event, Recorder

MS = 1_000_000

# A forward and backward through units "a" and "b"; b's gather in the backward is prefetched for a.
STEP = [
    (0, "unshard", "a", "forward"),
    (2, "pre_forward", "a", "forward"),
    (5, "post_forward", "a", "forward"),
    (5, "reshard", "a", "forward"),
    (6, "unshard", "b", "forward"),
    (8, "pre_forward", "b", "forward"),
    (12, "post_forward", "b", "forward"),
    (13, "pre_backward", "b", "pre_backward"),
    (14, "unshard", "a", "pre_backward"),
    (20, "reshard", "b", "post_backward"),
    (21, "reduce", "b", "post_backward"),
    (21, "post_backward", "b", "post_backward"),
    (22, "pre_backward", "a", "pre_backward"),
    (28, "reshard", "a", "post_backward"),
    (30, "reduce", "a", "post_backward"),
    (30, "post_backward", "a", "post_backward"),
]


def events(rows):
    return [Event(kind, unit, phase, 0, k, at * MS) for k, (at, kind, unit, phase) in enumerate(rows)]


def bars(timeline, lane):
    (found,) = [each for each in timeline.lanes if each.name == lane]
    return [(round(bar.start * 1000), round(bar.end * 1000), bar.kind, bar.unit) for bar in found.bars]


def test_a_recorders_events_become_lanes():
    timeline = timeline_of_events(events(STEP))
    assert bars(timeline, "compute") == [
        (2, 5, "forward", "a"),
        (8, 12, "forward", "b"),
        (13, 20, "backward", "b"),
        (22, 28, "backward", "a"),
    ]
    assert bars(timeline, "gather") == [(0, 2, "gather", "a"), (6, 8, "gather", "b"), (14, 22, "gather", "a")]
    assert bars(timeline, "reduce") == [(20, 21, "reduce", "b"), (28, 30, "reduce", "a")]
    # The prefetched gather was not waited for.
    assert bars(timeline, "host") == [(0, 2, "wait", "a"), (6, 8, "wait", "b")]
    assert timeline.seconds == pytest.approx(0.030)


def test_of_nested_units_the_innermost_has_the_bar():
    rows = [
        (0, "pre_forward", "", "forward"),
        (3, "pre_forward", "a", "forward"),
        (7, "post_forward", "a", "forward"),
        (9, "post_forward", "", "forward"),
    ]
    assert bars(timeline_of_events(events(rows)), "compute") == [
        (0, 3, "forward", ""),
        (3, 7, "forward", "a"),
        (7, 9, "forward", ""),
    ]


def test_a_file_of_a_recorder_gives_what_the_recorder_does(tmp_path):
    recorder = Recorder()
    recorder.events = events(STEP)
    recorder.save_chrome(tmp_path / "step.json")
    read, direct = read_timeline(tmp_path / "step.json"), timeline_of_events(recorder.events, "step")
    for lane in ("compute", "gather", "host"):
        assert bars(read, lane) == bars(direct, lane)
    assert read.name == "step"


def test_a_recorder_without_events_is_refused():
    with pytest.raises(ConfigError, match="no events"):
        timeline_of_events([])


# --- torch.profiler -----------------------------------------------------------------------------------------------


def row(name, cat, ts, dur, tid=1, **args):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 0, "tid": tid, "args": args}


def launched(name, host_at, at, dur, stream, tid=1, cat="kernel"):
    """A kernel, and the call that launched it; the correlation is the time of the call."""
    launch = row("cudaLaunchKernel", "cuda_runtime", host_at, 1, tid, correlation=host_at)
    return [launch, row(name, cat, at, dur, stream, stream=stream, correlation=host_at)]


def memory(at, allocated, reserved, device=1):
    args = {"Total Allocated": allocated, "Total Reserved": reserved, "Device Type": device}
    return {
        "ph": "i",
        "name": "[memory]",
        "cat": "cpu_instant_event",
        "ts": at,
        "tid": 1,
        "pid": 0,
        "args": args,
    }


FORWARD, BACKWARD = 1, 2
PROFILE = [
    row("ProfilerStep#3", "user_annotation", 0, 90, FORWARD),
    row("ProfilerStep#4", "user_annotation", 100, 400, FORWARD),
    *launched("nvjet_tst_128x256", 50, 55, 20, 7),
    row("aten::linear", "cpu_op", 110, 20, FORWARD),
    row("aten::mm", "cpu_op", 115, 10, FORWARD),
    *launched("nvjet_tst_128x256", 116, 150, 50, 7),
    *launched("void at::native::elementwise_kernel", 131, 200, 10, 7),
    *launched("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 140, 150, 30, 20),
    *launched("void at::native::bfloat16_copy_kernel_cuda", 141, 140, 10, 20),
    row("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 220, 30, BACKWARD),
    row("MmBackward0", "cpu_op", 222, 20, BACKWARD),
    *launched("sm90_xmma_gemm_bf16", 225, 230, 60, 7, BACKWARD),
    *launched("void pack_bfloat16", 240, 290, 5, 24, BACKWARD),
    *launched("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 245, 295, 20, 20, BACKWARD),
    *launched("Memcpy HtoD (Pinned -> Device)", 250, 300, 7, 30, cat="gpu_memcpy"),
    row("Optimizer.step#AdamW.step", "user_annotation", 400, 50, FORWARD),
    row("aten::_fused_adamw_", "cpu_op", 410, 20, FORWARD),
    *launched("multi_tensor_apply_kernel", 412, 420, 30, 7),
    row("cudaDeviceSynchronize", "cuda_runtime", 455, 40, FORWARD, correlation=999),
    memory(60, 1, 2),
    memory(160, 100, 300),
    memory(161, 70, 0, device=0),
    memory(260, 200, 300),
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
]


@pytest.fixture
def profiled(tmp_path):
    with gzip.open(tmp_path / "profile.json.gz", "wt") as file:
        json.dump({"schemaVersion": 1, "traceEvents": PROFILE}, file)
    return read_timeline(tmp_path / "profile.json.gz")


def microseconds(timeline, lane):
    (found,) = [each for each in timeline.lanes if each.name == lane]
    return [(round(bar.start * 1e6), round(bar.end * 1e6), bar.kind, bar.unit) for bar in found.bars]


def test_streams_of_a_profile_become_lanes_and_launches_say_the_phase(profiled):
    assert profiled.name == "profile"
    # Times count from the last step's first op, at 110; the step before it is left out.
    assert microseconds(profiled, "compute") == [
        (40, 90, "forward", "aten::linear"),
        (90, 100, "forward", ""),
        (120, 180, "backward", "MmBackward0"),
        (310, 340, "optimizer", "aten::_fused_adamw_"),
    ]
    # What else runs on the stream of the gathers belongs to them; a reduce does not, though it shares the stream.
    assert [bar[:3] for bar in microseconds(profiled, "gather")] == [(30, 40, "gather"), (40, 70, "gather")]
    assert [bar[:3] for bar in microseconds(profiled, "reduce")] == [
        (180, 185, "reduce"),
        (185, 205, "reduce"),
    ]
    assert [bar[:3] for bar in microseconds(profiled, "copies")] == [(190, 197, "copy")]
    assert microseconds(profiled, "host") == [
        (0, 20, "host forward", "aten::linear"),
        (112, 132, "host backward", "MmBackward0"),
        (300, 320, "host optimizer", "aten::_fused_adamw_"),
        (345, 385, "wait", ""),
    ]
    assert profiled.seconds == pytest.approx(385e-6)


def test_memory_of_a_profile_is_the_allocator_s(profiled):
    assert profiled.memory == Memory(
        ("allocated", "reserved, not allocated"), (50 / 1e6, 150 / 1e6), ((100, 200), (200, 100))
    )


def test_a_profile_of_a_cpu_is_computing(tmp_path):
    layer = torch.nn.Linear(8, 8)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as found:
        layer(torch.ones(2, 8)).sum().backward()
    found.export_chrome_trace(str(tmp_path / "cpu.json"))
    timeline = read_timeline(tmp_path / "cpu.json", "measured")
    assert timeline.name == "measured"
    assert [lane.name for lane in timeline.lanes] == ["compute"]
    kinds = {(bar.kind, bar.unit) for bar in timeline.lanes[0].bars}
    assert {("forward", "aten::linear"), ("backward", "AddmmBackward0")} <= kinds
    assert all(0 <= bar.start <= bar.end <= timeline.seconds for bar in timeline.lanes[0].bars)
    assert min(level for (level,) in timeline.memory.levels) >= 0


# --- files --------------------------------------------------------------------------------------------------------


def test_a_saved_timeline_is_read_back(tmp_path):
    saved = Timeline(
        "predicted",
        0.5,
        (Lane("compute", (Bar(0.0, 0.5, "forward", "a", "detail"),)),),
        Memory(("shards",), (0.0,), ((7,),)),
        {"ranks": "8"},
    )
    (tmp_path / "t.json").write_text(json.dumps(saved.as_json()))
    assert read_timeline(tmp_path / "t.json") == saved
    assert read_timeline(tmp_path / "t.json", "mine") == replace(saved, name="mine")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\x1f\x8bnot gzip",
        b"[]",
        b'{"traceEvents": 3}',
        b'{"traceEvents": [1]}',
        b'{"traceEvents": [{"ph": "X"}]}',
        b'{"traceEvents": []}',
        b'{"traceEvents": [{"ph": "i", "cat": "cpu_op"}]}',
        b'{"seconds": 1, "lanes": [{}]}',
        b'{"seconds": "x", "lanes": []}',
    ],
)
def test_a_file_that_cannot_be_drawn_is_named(tmp_path, content):
    (tmp_path / "broken.json").write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        read_timeline(tmp_path / "broken.json")
    assert raised.value.fix


def test_the_command_draws_traces_as_a_page(tmp_path, capsys):
    recorder = Recorder()
    recorder.events = events(STEP)
    recorder.save_chrome(tmp_path / "step.json")
    page = tmp_path / "step.html"
    assert main(["trace", str(tmp_path / "step.json"), "--html", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    assert '"name":"step"' in page.read_text(encoding="utf-8")
    assert main(["trace", str(tmp_path / "step.json"), "--html", str(tmp_path / "no" / "folder.html")]) == 1
    assert "cannot be written" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "step.json")]) == 1
    assert "--html" in capsys.readouterr().err


def test_every_kind_of_event_has_a_place():
    names = {*trace.KINDS}
    rows = [(k, kind, "a", "forward") for k, kind in enumerate(sorted(names))]
    assert timeline_of_events(events(rows)).lanes
