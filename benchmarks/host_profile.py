"""Where the host time goes that sharding adds to a forward and backward.

    python benchmarks/host_profile.py                  # CPU, 24 tiny blocks, fake group of 8
    python benchmarks/host_profile.py --device cuda    # the same model, wider, on a GPU
    python benchmarks/host_profile.py --face wrapper   # FullyShardedDataParallel, beside torch's FSDP1

The models are those of `host_overhead.py`: plain, the peer and shardwise; shardwise a second time with the engine's
methods counted, and a third time *still*: it does all but the work itself. All five take turns. A counted method's time
is its own alone: without that of counted methods it calls, and without what counting costs, as measured on a method
that does nothing. In the midst of other work counting costs more than that; how much is left of it is in the results.
What is counted belongs to a kind: the group's calls, copies, memory that comes and goes, marks and lanes, and the
Python around them. The last kind is what remains of the uncounted difference (shardwise - plain): torch's calling of
hooks, and a model slower for the work in between.

Each kind is also given as a part of the peer's overhead, so that all of them add up to the overhead ratio of this run.

A still model calls no collective, copies nothing and keeps its memory. What it takes less than shardwise is what any
library must take that makes the same calls and copies, with the room that these leave in the caches for the model: the
*floor* of the ratio.
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

# Where each kind's work is done; a star is any class of any module of a package. Lanes of the host do nothing, so they
# are counted on a GPU alone.
METHODS = {
    GROUP: {
        "shardwise.comm.collectives.group.GroupCollectives": "issue_all_gather issue_all_gather_each"
        " issue_reduce_scatter"
    },
    COPIES: {
        "torch.Tensor": "copy_",
        # As all ways to copy out and to pack are called.
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
        "shardwise.engine.step.root.Root": "begin_forward start_reduce prefetch_before end_backward",
        "shardwise.engine.gather.unit_gather.UnitGather": "issue finish",
        "shardwise.comm.channels.channel.Channel": "record",
        "shardwise.engine.reduce.reduce_in_flight.ReduceInFlight": "issue finish",
    },
}


def classes(path: str, method: str) -> list[type]:
    """The class of this path; of a path that ends in a star, all those that have such a method of their own."""
    package, _, class_name = path.rpartition(".")
    room = importlib.import_module(package)
    if class_name != "*":
        return [owner] if isinstance(owner := getattr(room, class_name, None), type) else []
    rooms = [
        importlib.import_module(each.name) for each in pkgutil.walk_packages(room.__path__, f"{package}.")
    ]
    return [
        owner
        for room in rooms
        for owner in vars(room).values()
        if isinstance(owner, type) and owner.__module__ == room.__name__ and method in vars(owner)
    ]


def counted_methods(device_type: str) -> list[Counted]:
    """All that is counted on such a device; an error names whatever is not where `METHODS` says."""
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
    """What does the work: the group's calls, copies, and what gives memory back."""
    return [
        Stilled(each.owner, each.name, DONE if each.kind == GROUP else None)
        for each in counted_methods(device_type)
        if each.kind in (GROUP, COPIES) or (each.kind == MEMORY and each.name == "shrink")
    ]


class Row(NamedTuple):
    """A method in a step: medians over steps, for each unit."""

    method: str
    kind: str
    us: float
    calls: float


class Profile:
    """Counts the methods of a model that was made while they were open, in steps that they are opened for."""

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
        """All methods, longest first. Some may not be called on this device; of a kind, all may not."""
        rows = []
        for method, steps in zip(self._methods, zip(*self.steps, strict=True), strict=True):
            us = statistics.median(map(cost.own_ns, steps)) / (1000 * num_units)
            calls = statistics.median(counts.calls for counts in steps) / num_units
            rows.append(Row(f"{method.owner.__name__}.{method.name}", method.kind, us, calls))
        idle = {row.kind for row in rows} - {row.kind for row in rows if row.calls}
        expect(not idle, f"no method of these was called: {idle}; METHODS must say who does that now")
        return sorted(rows, key=lambda row: -row.us)


def shares(rows: list[Row], ours_us: float, peer_us: float) -> dict[str, dict[str, float]]:
    """Each kind beside our overhead and the peer's; what was not counted is the rest of ours."""
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
    """Ours, without the work; it computes with what its memory holds from a step that did all of it."""
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
