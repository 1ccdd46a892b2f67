"""A ``Timeline`` from a trace of ``torch.profiler``: kernels by what they do, memory as the allocator reports it.

lane        kernels
compute     those of the stream with the most matrix products, and of streams that are none of the below
gather      all-gathers, and what else runs on a stream that is mostly that: casts, copies of torch's fake group
reduce      reduce-scatters and all-reduces, and the stream that packs for them
copies      copies between host and device
host        ops that the host runs outside of any other op, and its waits for the device
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.errors import ConfigError
from shardwise.forecast.timeline import LANES, Bar, Lane, Memory, Timeline

__all__ = ["is_profile", "timeline_of_profile"]

Row = Mapping[str, Any]

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_STEP, _OPTIMIZER, _BACKWARD = "ProfilerStep#", "Optimizer.step#", "autograd::engine::evaluate_function"
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
# Parts of kernels' names; the first lane that matches wins.
_PARTS = {
    "reduce": (
        "reducescatter",
        "reduce_scatter",
        "allreduce",
        "chunk_cat",
        "pack_bytes",
        "pack_bfloat",
        "pack_half",
    ),
    "gather": ("allgather", "copy_out", "memcpy dtod"),
    "copies": ("memcpy htod", "memcpy dtoh"),
    "compute": ("nvjet", "gemm", "cutlass", "xmma", "cublas", "flash", "fmha", "sdpa"),
}


def is_profile(rows: Sequence[Row]) -> bool:
    """Whether these rows of a Chrome trace come from ``torch.profiler``."""
    return any(row.get("cat") in (*_ON_DEVICE, "cpu_op") for row in rows)


def timeline_of_profile(rows: Sequence[Row], name: str = "measured") -> Timeline:
    """Returns the timeline of one step: the last that ``profiler.step()`` ended, or all of the trace."""
    bars = [row for row in rows if row.get("ph") == "X" and "dur" in row]
    host = _Host(bars)
    kernels = [_kernel(row, host) for row in bars if row.get("cat") in _ON_DEVICE]
    kernels = [kernel for kernel in kernels if host.is_in_step(kernel.launched)]
    ops = [row for row in host.outermost if host.is_in_step(row["ts"])]
    if not kernels and not ops:
        raise ConfigError(
            "the profile has no op and no kernel",
            where="timeline_of_profile",
            fix="profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] around a step",
        )
    lane_of = _lanes_of_streams(kernels)
    lanes: dict[str, list[Bar]] = {lane: [] for lane in LANES}
    origin = min([*(kernel.start for kernel in kernels), *(row["ts"] for row in ops)])
    for kernel in kernels:
        lane = _named_lane(kernel.name)
        lane = (
            lane
            if lane in ("gather", "reduce", "copies") and "memcpy dtod" not in kernel.name.lower()
            else None
        )
        lanes[lane or lane_of[kernel.stream]].append(kernel.bar(origin, lane or lane_of[kernel.stream]))
    # Without a device, the host's ops are the computing.
    lanes["host" if kernels else "compute"] += [_host_bar(row, origin, host, bool(kernels)) for row in ops]
    end = max([*(kernel.end for kernel in kernels), *(row["ts"] + row["dur"] for row in ops)])
    found = tuple(Lane(lane, tuple(sorted(lanes[lane], key=_start))) for lane in LANES if lanes[lane])
    facts = {"source": "torch.profiler", "kernels": f"{len(kernels):,}", "ops of the host": f"{len(ops):,}"}
    return Timeline(name, (end - origin) / 1e6, found, _memory(rows, origin, end, 1 if kernels else 0), facts)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """One kernel, copy or fill on a device; times in microseconds."""

    name: str
    stream: int
    start: float
    end: float
    # When the host launched it, what it was doing then, and the op that did.
    launched: float
    phase: str
    op: str

    def bar(self, origin: float, lane: str) -> Bar:
        kind = self.phase if lane == "compute" else lane.replace("copies", "copy")
        return Bar((self.start - origin) / 1e6, (self.end - origin) / 1e6, kind, self.op, self.name)


def _kernel(row: Row, host: _Host) -> _Kernel:
    arguments = row.get("args", {})
    launch = host.launches.get(arguments.get("correlation"), row)
    stream = arguments.get("stream", row.get("tid", 0))
    phase, op = host.phase_at(launch), host.op_at(launch)
    return _Kernel(str(row["name"]), stream, row["ts"], row["ts"] + row["dur"], launch["ts"], phase, op)


class _Host:
    """What the host did: ops by thread, launches by correlation, phases and steps."""

    def __init__(self, bars: Sequence[Row]) -> None:
        self.launches = {
            row["args"]["correlation"]: row
            for row in bars
            if row.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in row.get("args", {})
        }
        ops = [row for row in bars if row.get("cat") == "cpu_op"]
        waits = [row for row in self.launches.values() if row["name"] in _WAITS]
        steps = [row for row in bars if row.get("cat") == "user_annotation" and _is(row, _STEP)]
        self._step = max(steps, key=lambda row: row["ts"], default=None)
        self._backward = _Ranges(row for row in ops if _is(row, _BACKWARD))
        marked = (row for row in bars if row.get("cat") == "user_annotation" and _is(row, _OPTIMIZER))
        self._optimizer = _Ranges(marked)
        named = [row for row in ops if not _is(row, _BACKWARD)]
        self._outer = _Ranges(named)
        self.outermost = sorted([*self._outer.rows(), *waits], key=lambda row: row["ts"])

    def is_in_step(self, microseconds: float) -> bool:
        step = self._step
        return step is None or step["ts"] <= microseconds <= step["ts"] + step["dur"]

    def phase_at(self, row: Row) -> str:
        if self._optimizer.at(row):
            return "optimizer"
        return "backward" if self._backward.at(row) else "forward"

    def op_at(self, row: Row) -> str:
        found = self._outer.at(row)
        return str(found["name"]) if found else ""


class _Ranges:
    """Host events that are not within another of the same thread, found by time."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows: dict[Any, list[Row]] = defaultdict(list)
        for row in sorted(rows, key=lambda row: (row["ts"], -row["dur"])):
            kept = self._rows[row.get("tid")]
            if not kept or row["ts"] >= kept[-1]["ts"] + kept[-1]["dur"]:
                kept.append(row)
        self._starts = {tid: [row["ts"] for row in kept] for tid, kept in self._rows.items()}

    def rows(self) -> list[Row]:
        return [row for kept in self._rows.values() for row in kept]

    def at(self, row: Row) -> Row | None:
        """Returns the event of this row's thread around its start."""
        place = bisect_right(self._starts.get(row.get("tid"), []), row["ts"]) - 1
        if place < 0:
            return None
        found = self._rows[row.get("tid")][place]
        return found if row["ts"] <= found["ts"] + found["dur"] else None


def _is(row: Row, prefix: str) -> bool:
    return str(row.get("name", "")).startswith(prefix)


def _start(bar: Bar) -> float:
    return bar.start


def _host_bar(row: Row, origin: float, host: _Host, has_device: bool) -> Bar:
    start, end = (row["ts"] - origin) / 1e6, (row["ts"] + row["dur"] - origin) / 1e6
    if row["name"] in _WAITS:
        return Bar(start, end, "wait", "", str(row["name"]))
    return Bar(start, end, ("host " if has_device else "") + host.phase_at(row), str(row["name"]))


def _named_lane(name: str) -> str | None:
    name = name.lower().replace("_", "") if name.startswith("nccl") else name.lower()
    return next((lane for lane, parts in _PARTS.items() if any(part in name for part in parts)), None)


def _lanes_of_streams(kernels: Sequence[_Kernel]) -> dict[int, str]:
    """Returns the lane of each stream: the one that most of its time belongs to by name, or else compute."""
    seconds: dict[int, Counter[str]] = defaultdict(Counter)
    for kernel in kernels:
        seconds[kernel.stream][_named_lane(kernel.name) or ""] += kernel.end - kernel.start  # type: ignore[assignment]
    chosen = {}
    for stream, counted in seconds.items():
        counted.pop("", None)
        chosen[stream] = counted.most_common(1)[0][0] if counted else "compute"
        # Matrix products run on the compute stream alone, whatever else is there.
        if counted.get("compute"):
            chosen[stream] = "compute"
    return chosen


def _memory(rows: Sequence[Row], origin: float, end: float, device_type: int) -> Memory | None:
    """Returns what the allocator had, of a profile with ``profile_memory=True``; the types are 1 (CUDA) and 0."""
    changes = [row for row in rows if row.get("name") == "[memory]" and origin <= row["ts"] <= end]
    changes = [row for row in changes if row["args"].get("Device Type") == device_type]
    if not changes:
        return None
    changes.sort(key=lambda row: row["ts"])
    if device_type == 0:
        # torch counts from where the profile began, which may be below what is freed after it.
        bytes_now = [int(row["args"]["Total Allocated"]) for row in changes]
        least = min(0, *bytes_now)
        times = tuple((row["ts"] - origin) / 1e6 for row in changes)
        return Memory(("allocated",), times, tuple((now - least,) for now in bytes_now))
    totals = [(int(row["args"]["Total Allocated"]), int(row["args"]["Total Reserved"])) for row in changes]
    return Memory(
        ("allocated", "reserved, not allocated"),
        tuple((row["ts"] - origin) / 1e6 for row in changes),
        tuple((allocated, max(0, reserved - allocated)) for allocated, reserved in totals),
    )
