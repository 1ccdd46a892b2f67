"""Profiles a step on a GPU: the compute stream's kernels, its gaps, and what runs beside it. Needs a GPU.

    PYTHONPATH=. python benchmarks/step_profile.py --model 1b               # forward and backward; tiny, 1b or 8b
    PYTHONPATH=. python benchmarks/step_profile.py --model tiny --captured  # whole steps, those of captured_step.py

Plain, shardwise and torch FSDP2 on a fake group of 8, one after the other, each profiled by `torch.profiler` for a few
steps; figures are medians of those. A step's *compute* is the stream of its matrix products; other streams run *beside*
it. A CUDA graph may spread one chain of kernels over several streams: in captured steps, kernels that only move bytes
count as beside compute and all others as compute. Kernels are classified by their names.

Compute kernels take longer than plain's while other kernels share the device's memory bandwidth and multiprocessors.
This, kernels that plain does not have, and gaps are all that can make a step longer. The profiler costs host time, so
gaps are longer than without it; `step_ms` is the time of steps that were not profiled.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import captured_step
import torch
import torch.distributed as dist
from measuring import Contender, expect, parser, take_turns, write
from models import SIZES, build, start_group, tokens_for
from torch.profiler import ProfilerActivity, profile, schedule

FLOOR = "plain"
SLOWER, MORE, GAPS = "the same products and attention", "other kernels", "gaps"
MATMUL, ATTENTION, OTHER = "matrix products", "attention", "other"
GROUP, CAST, PACK, COPY_OUT, POINTERS = "the group's own", "casts", "packing", "copy-out", "from the host"
# Parts of kernel names; the first kind that matches wins. The fake group's own work is copies.
NAMES = {
    ATTENTION: ("sdpa", "flash", "fmha", "attention", "cudnn::fusion"),
    MATMUL: ("nvjet", "gemm", "cutlass", "xmma", "cublas", "splitk"),
    PACK: ("chunk_cat", "pack_bytes", "pack_bfloat16", "pack_half"),
    COPY_OUT: ("copy_out",),
    GROUP: ("memcpy dtod", "memcpy32", "memcpy128", "nccl"),
    POINTERS: ("memcpy htod", "memcpy dtoh"),
    CAST: ("copy_kernel", "copyfunctor", "copy<"),
}
MOVING = (GROUP, CAST, PACK, COPY_OUT, POINTERS)


class Kernel(NamedTuple):
    """One execution of a kernel, copy or fill."""

    name: str
    stream: int
    start_ns: int
    stop_ns: int

    @property
    def kind(self) -> str:
        name = self.name.lower()
        return next((kind for kind, parts in NAMES.items() if any(part in name for part in parts)), OTHER)


Ranges = list[tuple[int, int]]


def busy(kernels: Iterable[Kernel]) -> Ranges:
    """Returns the times when any of the kernels ran, as ranges that do not touch."""
    ranges: Ranges = []
    for start, stop in sorted((kernel.start_ns, kernel.stop_ns) for kernel in kernels):
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(stop, ranges[-1][1]))
        else:
            ranges.append((start, stop))
    return ranges


def ms(ranges: Ranges) -> float:
    return sum(stop - start for start, stop in ranges) / 1e6


def shared_ms(one: Ranges, other: Ranges) -> float:
    """Returns how long both ran at the same time."""
    return ms(one) + ms(other) - ms(busy(Kernel("", 0, *each) for each in (*one, *other)))


def ms_by_kind(kernels: Iterable[Kernel]) -> dict[str, float]:
    found: dict[str, float] = {}
    for kernel in kernels:
        found[kernel.kind] = found.get(kernel.kind, 0.0) + (kernel.stop_ns - kernel.start_ns) / 1e6
    return {kind: found[kind] for kind in (MATMUL, ATTENTION, OTHER, *MOVING) if kind in found}


def compute_stream(kernels: list[Kernel]) -> int:
    """Returns the stream with most of the matrix products."""
    taken: dict[int, int] = {}
    for kernel in kernels:
        if kernel.kind == MATMUL:
            taken[kernel.stream] = taken.get(kernel.stream, 0) + kernel.stop_ns - kernel.start_ns
    return max(taken, key=taken.__getitem__)


def step_table(kernels: list[Kernel], is_captured: bool) -> dict[str, Any]:
    """Returns the table of one step, in milliseconds."""
    if is_captured:
        compute = [kernel for kernel in kernels if kernel.kind not in MOVING]
    else:
        stream = compute_stream(kernels)
        compute = [kernel for kernel in kernels if kernel.stream == stream]
    chosen = set(compute)
    beside = [kernel for kernel in kernels if kernel not in chosen]
    compute_busy, beside_busy = busy(compute), busy(beside)
    span = (compute_busy[-1][1] - compute_busy[0][0]) / 1e6
    return {
        "whole": ms([(min(each.start_ns for each in kernels), max(each.stop_ns for each in kernels))]),
        "compute": {
            "from first to last": span,
            "busy": ms(compute_busy),
            "idle": span - ms(compute_busy),
            "kinds": ms_by_kind(compute),
        },
        "beside": {
            "busy": ms(beside_busy),
            "while compute is busy": shared_ms(compute_busy, beside_busy),
            "kinds": ms_by_kind(beside),
        },
        "streams": {
            str(stream): ms(busy(each for each in kernels if each.stream == stream))
            for stream in sorted({each.stream for each in kernels})
        },
    }


def median_table(tables: list[Any]) -> Any:
    """Merges the tables of several steps into one of medians; an entry that a step lacks counts as 0."""
    if not isinstance(tables[0], dict):
        return statistics.median(tables)
    keys = {key: None for table in tables for key in table}
    return {key: median_table([table.get(key, 0.0) for table in tables]) for key in keys}


def longer(table: dict[str, Any], floor: dict[str, Any]) -> dict[str, float]:
    """Returns what makes a step's compute longer than the floor's, in milliseconds."""
    own, floors = table["compute"], floor["compute"]
    same = sum(own["kinds"].get(kind, 0.0) - floors["kinds"].get(kind, 0.0) for kind in (MATMUL, ATTENTION))
    return {
        SLOWER: same,
        MORE: own["busy"] - floors["busy"] - same,
        GAPS: own["idle"] - floors["idle"],
    }


def figures(tables: dict[str, Any]) -> dict[str, dict[str, float]]:
    floor = tables[FLOOR]["compute"]
    return {
        f"{name} / {FLOOR}: compute, {what}": {"value": table["compute"][what] / floor[what]}
        for name, table in tables.items()
        for what in ("busy", "from first to last")
        if name != FLOOR
    }


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def kernels_of(found: profile) -> list[Kernel]:
    kernels = []
    for event in found.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation():
            start, stream = event.start_ns(), event.device_resource_id()
            kernels.append(Kernel(event.name(), stream, start, start + event.duration_ns()))
    return kernels


def profiled(step: Callable[[], object], args: argparse.Namespace) -> list[list[Kernel]]:
    """Returns the kernels of each profiled step. Each is preceded by a warm-up step of the profiler."""
    steps: list[list[Kernel]] = []
    with profile(
        activities=[ProfilerActivity.CUDA],
        schedule=schedule(wait=0, warmup=1, active=1, repeat=args.iterations),
        on_trace_ready=lambda found: steps.append(kernels_of(found)),
    ) as running:
        for _ in range(2 * args.iterations):
            step()
            torch.cuda.synchronize()
            running.step()
    expect(len(steps) == args.iterations and all(steps), "the profiler saw no kernels")
    return steps


def forward_backward(name: str, args: argparse.Namespace) -> Callable[[], None]:
    device = captured_step.DEVICE
    model = build(name, SIZES[args.model], device, args.world_size)
    inputs = tokens_for(SIZES[args.model], device)

    def step() -> None:
        model.zero_grad()
        model(*inputs).backward()

    return step


def captured(name: str, args: argparse.Namespace) -> Callable[[], object]:
    size, world_size = SIZES[args.model], args.world_size
    inputs = tokens_for(size, captured_step.DEVICE)
    if name == "shardwise":
        replay = captured_step.captured_by_shardwise(size, world_size, inputs)
    else:
        replay = captured_step.captured_by_hand(captured_step.training_step(name, size, world_size), *inputs)
    return lambda: replay(*inputs)


def main() -> int:
    options = parser(__doc__, rounds=1, iterations=3)
    options.set_defaults(device="cuda")
    options.add_argument("--model", choices=list(SIZES), default="1b")
    options.add_argument("--captured", action="store_true", help="whole steps, each one CUDA graph")
    options.add_argument("--world-size", type=int, default=8)
    args = options.parse_args()
    warnings.simplefilter("ignore")
    torch.cuda.set_device(captured_step.DEVICE)
    start_group("fake", args.world_size, captured_step.DEVICE)
    tables, step_ms = {}, {}
    for name in (FLOOR, "shardwise", "FSDP2"):
        step = (captured if args.captured else forward_backward)(name, args)
        step_ms |= take_turns(
            [Contender(name, step)], torch.cuda.synchronize, 1, args.iterations, args.warmup
        ).summary()
        tables[name] = median_table([step_table(kernels, args.captured) for kernels in profiled(step, args)])
        del step
        gc.collect()
        torch.cuda.empty_cache()
    dist.destroy_process_group()
    write(
        "step_profile",
        args,
        args.out,
        f"step_profile_{args.model}{'_captured' if args.captured else ''}",
        step_ms=step_ms,
        figures=figures(tables),
        ms_a_step=tables,
        longer_than_plain_ms={
            name: longer(table, tables[FLOOR]) for name, table in tables.items() if name != FLOOR
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
