"""A simulated clock: plays one step of a tape and says when the host, and each stream of the device, does what.

The host issues one entry after another, each at a price. An op begins when it has been issued and its stream is free,
and takes what its floating-point operations or its bytes cost; a collective what its links cost. Waits order streams.

    host      |issue|issue|issue|...                 runs ahead, unless the device is faster
    gather         |  gather B  |
    compute        | A          |▲ B        |        ▲ exposed if compute had to wait here

Copies and collectives beside compute take bandwidth and multiprocessors from it: their intervals are known from a
first pass, and in the second compute is slower where they overlap.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardwise import trace
from shardwise.forecast.prices import Device, seconds_of_collective, seconds_of_op
from shardwise.forecast.tape import (
    COMPUTE,
    GATHER,
    REDUCE,
    REPLICATE,
    Allocate,
    Collective,
    Entry,
    HostCalls,
    HostWork,
    Mark,
    Op,
    Record,
    Transfer,
    Wait,
)
from shardwise.forecast.timeline import Bar
from shardwise.planning.memory import GATHERED, GATHERING, ROWS, SHARD_GRADIENTS

# Of the time that copies run beside compute, the part by which compute takes longer: 8.3 of 38.1 ms in
# benchmarks/results/step_profile_8b.json.
COPY_SHARE = 0.22

# Host prices of the engine's own work, at the event that ends it.
_AT_EVENT = {
    trace.UNSHARD: ("unit_gather",),
    trace.RESHARD: ("unit_reshard",),
    trace.REDUCE: ("unit_reduce",),
    trace.PRE_FORWARD: ("unit_hooks_forward",),
    trace.PRE_BACKWARD: ("unit_hooks_backward", "unit_prefetch"),
    trace.POST_BACKWARD: ("unit_beside_hooks",),
}
# Of the units in which these prices were measured; each parameter beyond costs some more.
_PARAMS_OF_A_UNIT = 9
_OF_OP = {"pack": "pack", "copy-out": "copy_out"}
_ELASTIC = frozenset((GATHERED, GATHERING, ROWS, SHARD_GRADIENTS))
_LANE_OF = {COMPUTE: "compute", GATHER: "gather", REDUCE: "reduce", REPLICATE: "reduce"}


@dataclass(slots=True)
class StepTime:
    """How long a step takes, and where the time goes; all in seconds.

    Compute is always in one of five states: working, by kind of op; or waiting for a gather or a reduce (exposed
    communication), for the host to issue work, or for transfers.
    """

    seconds: float = 0.0
    by_kind: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    exposed: float = 0.0
    host_bound: float = 0.0
    optimizer: float = 0.0
    # When the host has issued everything.
    host: float = 0.0
    by_phase: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    # Bytes that this rank sends over each axis.
    sent: Counter[str] = field(default_factory=Counter)
    flops: int = 0
    bars: dict[str, list[Bar]] = field(default_factory=dict)
    # When the host has issued each entry and compute has come to it, for the memory curve.
    issued: list[float] = field(default_factory=list)

    @property
    def compute(self) -> float:
        return sum(self.by_kind.values())

    def repeat(self, without: StepTime, times: int) -> None:
        """Adds what ``self`` has and ``without`` lacks, so many times."""
        for name in ("seconds", "exposed", "host_bound", "host", "flops"):
            more = getattr(self, name) - getattr(without, name)
            setattr(self, name, getattr(self, name) + times * more)
        for name in ("by_kind", "by_phase", "sent"):
            counted, fewer = getattr(self, name), getattr(without, name)
            for key in counted:
                counted[key] += times * (counted[key] - fewer[key])


RanksPerNode = Callable[[str, int], int]


def time_step(
    tape: Sequence[Entry], device: Device, ranks_per_node: RanksPerNode, micro_batches: int = 1
) -> StepTime:
    """Plays the entries of one step; ``ranks_per_node`` says how many ranks of an axis's group share a node.

    A tape of three micro-batches stands for more: each of the others takes as long as the second.
    """
    result = _play(tape, device, ranks_per_node)
    begins = [
        index
        for index, entry in enumerate(tape)
        if type(entry) is Mark and entry.phase == "forward" and entry.kind == "phase"
    ]
    if micro_batches > len(begins) > 2:
        without = _play([*tape[: begins[1]], *tape[begins[2] :]], device, ranks_per_node)
        result.repeat(without, micro_batches - len(begins))
    return result


def _play(tape: Sequence[Entry], device: Device, ranks_per_node: RanksPerNode) -> StepTime:
    first = _Playing(tape, device, ranks_per_node, _NO_INTERVALS)
    beside = _Intervals(first.beside)
    return _Playing(tape, device, ranks_per_node, beside).result


class _Intervals:
    """When something runs beside compute, and by how much it slows compute down."""

    def __init__(self, found: Sequence[tuple[float, float, float]]) -> None:
        self._found = sorted(found)
        self._starts = [start for start, _, _ in self._found]
        self._longest = max((end - start for start, end, _ in self._found), default=0.0)

    def delay(self, start: float, end: float) -> float:
        """How much longer work from ``start`` to ``end`` takes."""
        total = 0.0
        index = bisect_left(self._starts, start - self._longest)
        while index < len(self._found) and self._starts[index] < end:
            begun, ended, share = self._found[index]
            overlap = min(end, ended) - max(start, begun)
            if overlap > 0:
                total += share * overlap
            index += 1
        return total


_NO_INTERVALS = _Intervals(())


class _Playing:
    """One pass over the tape."""

    def __init__(
        self, tape: Sequence[Entry], device: Device, ranks_per_node: RanksPerNode, beside: _Intervals
    ) -> None:
        self._device = device
        self._ranks_per_node = ranks_per_node
        self._delays = beside
        self.beside: list[tuple[float, float, float]] = []
        self.result = StepTime()
        self._host = 0.0
        # Until when a thread beside the host's own steps units in backward.
        self._thread = 0.0
        self._ready = dict.fromkeys((COMPUTE, GATHER, REDUCE, REPLICATE), 0.0)
        self._events: dict[int, float] = {}
        # Until when compute waits for another stream, not for the host.
        self._phase, self._unit, self._phase_began = "forward", "", 0.0
        self._host_began = 0.0
        self._open: list[tuple[str, float, float, str, str]] = []
        self._play(tape)

    def _price(self, name: str) -> float:
        return self._device.host_microseconds.get(name, 0.0) / 1e6

    def _play(self, tape: Sequence[Entry]) -> None:
        issued, handlers = (
            self.result.issued,
            {
                Op: self._op,
                Collective: self._collective,
                Transfer: self._transfer,
                Record: self._record,
                Wait: self._wait,
                Mark: self._mark,
                HostWork: self._host_work,
                HostCalls: self._host_calls,
                Allocate: self._allocate,
            },
        )
        for entry in tape:
            handler = handlers.get(type(entry))
            if handler is not None:
                handler(entry)  # type: ignore[operator]
            issued.append(max(self._host, self._ready[COMPUTE]))
        self._end()

    def _end(self) -> None:
        result = self.result
        result.host = self._host
        result.seconds = max(self._host, self._thread, *self._ready.values())
        result.exposed += max(
            0.0, max(self._ready[GATHER], self._ready[REDUCE]) - max(self._ready[COMPUTE], self._host)
        )
        result.by_phase[self._phase] += result.seconds - self._phase_began

    # --- what takes time on the device ----------------------------------------------------------------------------

    def _run(self, stream: str, seconds: float) -> tuple[float, float]:
        if self._device.type == "cpu":
            # The host is the device: it does one thing after another.
            start, self._host = self._host, self._host + seconds
            self._ready = dict.fromkeys(self._ready, self._host)
            return start, self._host
        start = max(self._host, self._ready[stream])
        end = start + seconds
        if stream == COMPUTE:
            gap = start - self._ready[COMPUTE] if self._host > self._ready[COMPUTE] else 0.0
            self.result.host_bound += gap
            end += self._delays.delay(start, end)
        self._ready[stream] = end
        return start, end

    def _op(self, op: Op) -> None:
        if op.kind == "view":
            self._host += self._price("view")
            return
        is_engines = op.stream != COMPUTE or op.name in _OF_OP
        self._host += self._price(_OF_OP.get(op.name, "copy_in" if is_engines else "op"))
        seconds = seconds_of_op(self._device, op.kind, op.flops, op.num_bytes, op.dtype, op.share)
        start, end = self._run(op.stream, seconds)
        self.result.flops += op.flops
        if op.stream == COMPUTE:
            self.result.by_kind[op.kind] += end - start
            self._bar("compute", start, end, self._phase, self._unit)
        else:
            self.beside.append((start, end, COPY_SHARE))
            self._open.append((op.stream, start, end, op.name, ""))

    def _collective(self, sent: Collective) -> None:
        links, world = self._device.links, sent.ranks
        self._host += self._call_seconds(sent)
        self._host += self._price("issue_of_a_collective") + self._price("streams_of_a_collective")
        local = self._ranks_per_node(sent.axis, world)
        seconds = seconds_of_collective(links, sent.kind, sent.num_bytes, world, local, sent.num_tensors)
        start, end = self._run(sent.stream, seconds)
        if self._device.type == "cpu":
            self.result.exposed += seconds
        share = links.sm_share if links.within.channels else COPY_SHARE
        if end > start:
            self.beside.append((start, end, share))
        rounds = 2 if sent.kind == "all_reduce" else 1
        self.result.sent[sent.axis] += rounds * sent.num_bytes * (world - 1) // max(1, world)
        self._open.append((sent.stream, start, end, sent.kind, f"{sent.num_bytes / 2**20:,.1f} MiB"))

    def _call_seconds(self, sent: Collective) -> float:
        """What the process group's own call costs the host: more for each tensor that it gathers into its place."""
        call = f"fake_{sent.kind}_of_8" if self._device.links.within.name == "fake" else sent.kind
        return self._price(call) + (sent.num_tensors - 1) * self._price(f"{call}_of_one_more")

    def _transfer(self, copy: Transfer) -> None:
        self._host += self._price("cast_copy")
        start, end = self._run(copy.stream, copy.num_bytes / self._device.host_copy_bytes_per_second)
        self._bar("copies", start, end, f"copy {copy.direction}", "", f"{copy.num_bytes / 2**20:,.1f} MiB")
        if copy.stream == COMPUTE:
            self.result.by_kind["copy"] += end - start

    def _host_work(self, work: HostWork) -> None:
        seconds = work.num_bytes / self._device.host_microseconds.get("optimizer_bytes_per_us", 56_000) / 1e6
        self.result.optimizer += seconds
        if work.after:
            start = max(self._thread, self._ready[work.after])
            self._thread = start + seconds
            return
        self._bar("host", self._host, self._host + seconds, work.kind, "")
        self._host += seconds

    def _host_calls(self, calls: HostCalls) -> None:
        self._host += calls.count * self._price(calls.price)

    # --- order ----------------------------------------------------------------------------------------------------

    def _record(self, point: Record) -> None:
        self._events[point.event] = max(self._ready[point.stream], 0.0)

    def _wait(self, wait: Wait) -> None:
        reached = self._events.get(wait.event, 0.0)
        if wait.stream == "host":
            self._bar("host", self._host, max(self._host, reached), "wait", "")
            self._host = max(self._host, reached)
            return
        ready = self._ready[wait.stream]
        if wait.stream == COMPUTE and reached > max(ready, self._host):
            self.result.exposed += reached - max(ready, self._host)
            if self._host > ready:
                self.result.host_bound += self._host - ready
        self._ready[wait.stream] = max(ready, reached)

    def _allocate(self, entry: Allocate) -> None:
        if entry.what in _ELASTIC:
            self._host += self._price("buffer_grow") + self._price("buffer_free")

    # --- where in the step ----------------------------------------------------------------------------------------

    def _mark(self, mark: Mark) -> None:
        if mark.kind == "phase":
            self._begin_phase(mark.phase)
            return
        self._host += sum(map(self._price, _AT_EVENT.get(mark.kind, ())))
        if mark.kind == trace.REDUCE:
            self._host += max(0, mark.num_params - _PARAMS_OF_A_UNIT) * self._price("unit_param")
        if mark.kind in (trace.PRE_FORWARD, trace.PRE_BACKWARD):
            self._unit = mark.unit
        elif mark.kind in (trace.POST_FORWARD, trace.POST_BACKWARD):
            self._unit = ""
        elif mark.kind == trace.UNSHARD:
            self._label(GATHER, mark.unit)
        elif mark.kind == trace.REDUCE:
            self._label(REDUCE, mark.unit)
            self._label(REPLICATE, mark.unit)

    def _begin_phase(self, phase: str) -> None:
        if phase == "forward":
            self._host += self._price("root_step")
        now = max(self._host, self._ready[COMPUTE])
        self.result.by_phase[self._phase] += now - self._phase_began
        self._bar("host", self._host_began, self._host, self._phase, "")
        self._host_began = self._host
        self._phase, self._phase_began, self._unit = phase, now, ""

    def _label(self, stream: str, unit: str) -> None:
        """Draws what a side stream was given since the last event, as the work of this unit."""
        rest = []
        for each in self._open:
            if each[0] == stream:
                self._bar(_LANE_OF[stream], each[1], each[2], each[3], unit, each[4])
            else:
                rest.append(each)
        self._open = rest

    def _bar(self, lane: str, start: float, end: float, kind: str, unit: str, detail: str = "") -> None:
        """Adds a bar, or makes the last one longer where it is the same work."""
        if end <= start:
            return
        bars = self.result.bars.setdefault(lane, [])
        last = bars[-1] if bars else None
        same = last is not None and not detail and (last.kind, last.unit) == (kind, unit)
        if same and last is not None and start - last.end <= 2e-6:
            bars[-1] = Bar(last.start, end, kind, unit)
        else:
            bars.append(Bar(start, end, kind, unit, detail))
