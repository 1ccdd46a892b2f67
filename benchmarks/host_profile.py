"""Profiles the host time that sharding adds to forward and backward.

    python benchmarks/host_profile.py                  # CPU, 24 tiny blocks, fake group of 8
    python benchmarks/host_profile.py --device cuda    # the same model, wider, on a GPU
    python benchmarks/host_profile.py --face wrapper   # FullyShardedDataParallel; the peer is FSDP1

The models are those of `host_overhead.py`: plain, the peer and shardwise; shardwise a second time with the engine's
methods counted, and a third time *still*: without collectives, copies and frees. All five take turns. A counted
method's time is its own: without the counted methods it calls, and without the cost of counting, as measured on a
method that does nothing. Amid other work counting costs more than that; how much remains of it is in the results.
Every counted method belongs to a kind: the group's calls, copies, allocation and release of memory, events and streams,
and the Python around them. The last kind is the rest of the uncounted difference (shardwise - plain): torch's calls of
hooks, and a model that runs slower because of the work in between.

Each kind is also given as a fraction of the peer's overhead, so that all add up to the overhead ratio of this run.

A still model calls no collective, copies nothing and keeps its memory. The time it saves is what any library must spend
that makes the same calls and copies, including their effect on the model's use of the caches: the *floor* of the ratio.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import statistics
import sys
import warnings
from typing import NamedTuple

import host_overhead
import torch
import torch.distributed as dist
from counting import Cost, Counted, Counts, Stilled, counting_cost
from measuring import Contender, Times, expect, parser, take_turns, wait_for, write
from models import start_group

from shardwise.comm.collectives.group import DONE

GROUP, COPIES = "the group's own calls", "copies: casts, packing, copy-out"
MEMORY, LANES = "memory that comes and goes", "marks, waits and lanes"
PYTHON, BESIDE = "Python of ours", "beside our hooks"
COUNTED, STILL = "shardwise, counted", "shardwise, still"

# The methods that do each kind's work; a star stands for any class of any module of a package. On a CPU, side streams
# do nothing, so they are counted only on a GPU.
METHODS = {
    GROUP: {
        "shardwise.comm.channels.channel.GroupChannel": "issue_all_gather issue_all_gather_each"
        " issue_reduce_scatter"
    },
    COPIES: {
        "torch.Tensor": "copy_",
        # The method names of all ways to copy out and to pack.
        "shardwise.engine.*": "run fill",
    },
    MEMORY: {
        "shardwise.engine.buffers.ElasticBuffer": "grow shrink",
        "shardwise.engine.buffers.RelocatableBuffer": "grow grow_in shrink",
        "shardwise.engine.reduce.reduce_in_flight.ReduceInFlight": "_make_own_row",
    },
    LANES: {
        "shardwise.comm.streams.CudaSideStream": "__enter__ __exit__ wait_compute wait_event record_event",
        "shardwise.comm.streams.CudaSideStreams": "record_compute compute_waits_for host_waits_for",
    },
    PYTHON: {
        "shardwise.engine.unit.hooks.UnitHooks": "pre_forward post_forward pre_backward post_backward flush",
        "shardwise.engine.unit.autograd_signals.Visit": "outputs_gradient_arrives inputs_gradients_are_done",
        "shardwise.engine.unit.unit.Unit": "issue_gather wait_gather reshard",
        "shardwise.engine.unit.unit_gradients.UnitGradients": "reduce",
        "shardwise.engine.step.root.Root": "begin_forward finish_earlier_reduces prefetch_before end_backward",
        "shardwise.engine.gather.unit_gather.UnitGather": "issue finish",
        "shardwise.comm.channels.channel.Channel": "record",
        "shardwise.engine.reduce.reduce_in_flight.ReduceInFlight": "issue finish",
    },
}


def classes(path: str, method: str) -> list[type]:
    """Returns the class at this path; for a path that ends in a star, all classes that define the method."""
    package, _, class_name = path.rpartition(".")
    module = importlib.import_module(package)
    if class_name != "*":
        return [owner] if isinstance(owner := getattr(module, class_name, None), type) else []
    modules = [
        importlib.import_module(each.name) for each in pkgutil.walk_packages(module.__path__, f"{package}.")
    ]
    return [
        owner
        for module in modules
        for owner in vars(module).values()
        if isinstance(owner, type) and owner.__module__ == module.__name__ and method in vars(owner)
    ]


def counted_methods(device_type: str) -> list[Counted]:
    """Returns the methods to count on such a device; raises, with its name, if one is not where `METHODS` says."""
    found, missing = [], []
    for kind, owners in METHODS.items():
        for path, names in owners.items():
            for name in names.split():
                having = [owner for owner in classes(path, name) if callable(getattr(owner, name, None))]
                found += [Counted(kind, owner, name) for owner in having]
                missing += [] if having else [f"{path}.{name}"]
    if missing:
        raise LookupError(f"not there any more: {', '.join(missing)}; METHODS must say who does that now")
    return [each for each in found if each.kind != LANES or device_type == "cuda"]


def stilled_methods(device_type: str) -> list[Stilled]:
    """Returns the methods that do the work: the group's calls, copies, and those that free memory."""
    return [
        Stilled(each.owner, each.name, DONE if each.kind == GROUP else None)
        for each in counted_methods(device_type)
        if each.kind in (GROUP, COPIES) or (each.kind == MEMORY and each.name == "shrink")
    ]


class Row(NamedTuple):
    """One method's figures: medians over steps, per unit."""

    method: str
    kind: str
    us: float
    calls: float


class Profile:
    """Counts methods in the steps for which they are opened; the model must have been built while they were open."""

    def __init__(self, device_type: str) -> None:
        self._methods = counted_methods(device_type)
        self.steps: list[list[Counts]] = []

    def open(self) -> None:
        for method in self._methods:
            method.open()

    def close(self) -> None:
        for method in self._methods:
            method.close()

    def end_step(self) -> None:
        self.close()
        self.steps.append([method.counts() for method in self._methods])

    def rows(self, cost: Cost, num_units: int) -> list[Row]:
        """Returns a row for each method, the longest first. At least one method of each kind must have been called."""
        rows = []
        for method, steps in zip(self._methods, zip(*self.steps, strict=True), strict=True):
            us = statistics.median(map(cost.own_ns, steps)) / (1000 * num_units)
            calls = statistics.median(counts.calls for counts in steps) / num_units
            rows.append(Row(f"{method.owner.__name__}.{method.name}", method.kind, us, calls))
        idle = {row.kind for row in rows} - {row.kind for row in rows if row.calls}
        expect(not idle, f"no method of these was called: {idle}; METHODS must say who does that now")
        return sorted(rows, key=lambda row: -row.us)


def shares(rows: list[Row], ours_us: float, peer_us: float) -> dict[str, dict[str, float]]:
    """Returns each kind's part of our overhead and of the peer's; the uncounted time is the rest of ours."""
    kinds = {kind: sum(row.us for row in rows if row.kind == kind) for kind in METHODS}
    kinds[BESIDE] = ours_us - sum(kinds.values())
    return {kind: {"us": us, "of_ours": us / ours_us, "of_peer": us / peer_us} for kind, us in kinds.items()}


def measure(args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    start_group("fake", args.world_size, device)
    settings = host_overhead.parse(
        ["--device", args.device, "--face", args.face, "--world-size", str(args.world_size)]
    )
    profile = Profile(args.device)
    profile.open()
    ours = host_overhead.contenders(settings, device)[-1]
    profile.close()
    still = still_contender(settings, device)
    bare = host_overhead.contenders(settings, device)

    def begin() -> None:
        ours.model.zero_grad()
        profile.open()

    def end() -> None:
        profile.end_step()
        ours.check_after_step()

    takers = [Contender(each.name, each.step, each.model.zero_grad, each.check_after_step) for each in bare]
    takers += [Contender(COUNTED, ours.step, begin, end), still]
    times = take_turns(takers, wait_for(device), args.rounds, args.iterations, args.warmup)
    for each in (*bare, ours):
        each.check_counts()
    dist.destroy_process_group()
    del profile.steps[: args.warmup]
    write_result(args, times, profile, settings.blocks + 1)


def still_contender(settings: argparse.Namespace, device: torch.device) -> Contender:
    """Returns shardwise without the work; it computes with what its memory holds from one complete step."""
    methods = stilled_methods(device.type)
    for method in methods:
        method.open()
    ours = host_overhead.contenders(settings, device)[-1]
    for method in methods:
        method.close()
    ours.step()

    def begin() -> None:
        ours.model.zero_grad()
        for method in methods:
            method.is_still = True
            method.open()

    def end() -> None:
        for method in methods:
            method.is_still = False
            method.close()

    return Contender(STILL, ours.step, begin, end)


def write_result(args: argparse.Namespace, times: Times, profile: Profile, num_units: int) -> None:
    cost = counting_cost()
    rows = profile.rows(cost, num_units)
    counting_us = 1000 * (times.median(COUNTED) - times.median("shardwise")) / num_units
    taken_off_us = sum(row.calls for row in rows) * sum(cost) / 1000
    peer = host_overhead.PEERS[args.face]
    ours_us, still_us, peer_us = (
        1000 * (times.median(name) - times.median("plain")) / num_units for name in ("shardwise", STILL, peer)
    )
    parts = shares(rows, ours_us, peer_us)
    for kind, part in parts.items():
        print(
            f"{kind:>34}: {part['us']:7.1f} us a unit, {part['of_ours']:6.1%} of ours, "
            f"{part['of_peer']:.3f} of {peer}'s"
        )
    print(f"{'floor: calls, copies and memory':>34}: {ours_us - still_us:7.1f} us a unit")
    face = "wrapper_" if args.face == "wrapper" else ""
    write(
        "host_profile",
        args,
        args.out,
        f"host_profile_{face}{args.device}",
        step_ms=times.summary(),
        figures={
            f"(shardwise - plain) / ({peer} - plain)": {"value": ours_us / peer_us},
            f"(shardwise - still) / ({peer} - plain)": {"value": (ours_us - still_us) / peer_us},
        },
        peer=peer,
        overhead_us_a_unit={"shardwise": ours_us, "still": still_us, peer: peer_us},
        parts_a_unit=parts,
        methods_a_unit=[row._asdict() for row in rows],
        counting_ns_a_call=cost._asdict(),
        counting_left_us_a_unit=counting_us - taken_off_us,
    )


def main() -> int:
    options = parser(__doc__, rounds=9, iterations=8)
    options.add_argument("--face", choices=list(host_overhead.PEERS), default="fully_shard")
    options.add_argument("--world-size", type=int, default=8)
    args = options.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    measure(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
