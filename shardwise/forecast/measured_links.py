"""What this machine's collectives cost, and what the engine's own work on a unit costs the host; run on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise.comm.channels.channel import GroupChannel
from shardwise.comm.channels.registry import channel_of
from shardwise.composable.fully_shard import fully_shard
from shardwise.forecast.device_files import load_device
from shardwise.forecast.measured_prices import Clock, lower_quartile

__all__ = ["fitted_line", "host_calls", "links", "unit_prices"]

# The engine's work on a unit: shared out as an H200's prices are, whose file has each of them measured.
_PARTS = (
    *(
        "unit_gather",
        "unit_reduce",
        "unit_hooks_forward",
        "unit_hooks_backward",
        "unit_prefetch",
        "unit_reshard",
    ),
    *("unit_beside_hooks", "copy_in", "copy_out", "pack", "root_step"),
)
# How often a unit does each in a step that reshards after forward; the root's work is shared by all units.
_TIMES = {"unit_gather": 2, "unit_reshard": 2, "copy_in": 2, "copy_out": 2, "root_step": 0}

_OF_NINE = "all-gathers of nine tensors"
_KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def links(clock: Clock) -> dict[str, Any]:
    """Returns the link between these ranks, as a device file has it: α–β lines through the times of collectives."""
    world = dist.get_world_size()
    group = channel_of(dist.group.WORLD, clock.device)  # type: ignore[arg-type]
    lines = {kind: fitted_line(_timed(clock, group, kind)) for kind in _KINDS}
    fixed, rate = lines["all_gather"]
    is_cpu = clock.device.type == "cpu"
    # Ranks that share a memory: the rate of one, times how many moved their bytes at once.
    shared = world if is_cpu else 1
    # An all-reduce moves twice the bytes that an all-gather does.
    shares = {kind: lines[kind][1] * (2 if kind == "all_reduce" else 1) / rate for kind in _KINDS[1:]}
    return {
        "name": f"{group.backend} on this machine",
        "call_seconds": fixed / 2,
        "hop_seconds": fixed / 2 / max(1, world - 1),
        "bytes_per_second": rate * shared,
        "channels": 0 if is_cpu else 16,
        "is_shared": is_cpu,
        "share_of": shares,
    }


def _timed(clock: Clock, group: GroupChannel, kind: str) -> list[tuple[float, float]]:
    """Returns the bytes that each rank moves, and seconds, of collectives of several sizes."""
    world, found = group.world, []
    for numel in (1 << 8, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24):
        own, rows = torch.ones(numel // world), torch.ones(numel // world * world)
        own, rows = own.to(clock.device), rows.to(clock.device)
        runs: dict[str, Callable[[], object]] = {
            "all_gather": lambda own=own, rows=rows: group.issue_all_gather(rows, own).wait(),  # type: ignore[misc]
            "reduce_scatter": lambda own=own, rows=rows: group.issue_reduce_scatter(own, rows, False).wait(),  # type: ignore[misc]
            "all_reduce": lambda rows=rows: group.issue_all_reduce(rows.zero_(), False).wait(),  # type: ignore[misc]
        }
        found.append((rows.nbytes * (world - 1) / world, _together(clock, runs[kind])))
    return found


def _together(clock: Clock, run: Callable[[], object], times: int = 9) -> float:
    """Returns the time of a run that all ranks begin together; all ranks run it equally often."""
    found = []
    for _ in range(times + 2):
        dist.barrier()
        begun = time.perf_counter()
        run()
        clock.wait()
        found.append(time.perf_counter() - begun)
    return lower_quartile(found[2:])


def fitted_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the fixed seconds and the bytes a second of the line that is nearest to the times.

    Errors count between their size and their share of a time. By their share alone, small collectives would decide the
    rate, which a cache makes several times that of a unit's; by their size alone, the largest would decide both.
    """
    weights = [1 / seconds for _, seconds in points]
    total = sum(weights)
    mean_size = sum(w * size for w, (size, _) in zip(weights, points, strict=True)) / total
    mean_seconds = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
    above = sum(
        w * (size - mean_size) * (s - mean_seconds) for w, (size, s) in zip(weights, points, strict=True)
    )
    below = sum(w * (size - mean_size) ** 2 for w, (size, _) in zip(weights, points, strict=True))
    largest, longest = points[-1]
    slope = max(above / below, 0.2 * longest / largest)
    return max(mean_seconds - slope * mean_size, 1e-6), 1 / slope


def host_calls(clock: Clock) -> dict[str, float]:
    """Returns what it costs the host to issue a collective of a few bytes, in microseconds."""
    group = channel_of(dist.group.WORLD, clock.device)  # type: ignore[arg-type]
    own, rows = torch.ones(8, device=clock.device), torch.ones(8 * group.world, device=clock.device)
    runs = {
        "all_gather": lambda: group.issue_all_gather(rows, own),
        "reduce_scatter": lambda: group.issue_reduce_scatter(own, rows, False),
        "all_reduce": lambda: group.issue_all_reduce(own, False),
    }
    if group.gathers_each:
        runs[_OF_NINE] = lambda: group.issue_all_gather_each([rows] * 9, [own] * 9)
    found = {}
    for name, run in runs.items():
        times = []
        for _ in range(30):
            dist.barrier()
            begun = time.perf_counter()
            work = run()
            times.append(time.perf_counter() - begun)
            work.wait()
        found[name] = lower_quartile(times) * 1e6
    if group.gathers_each:
        found["all_gather_of_one_more"] = max(0.0, found.pop(_OF_NINE) - found["all_gather"]) / 8
    return found


def _tiny_collective(clock: Clock) -> float:
    group = channel_of(dist.group.WORLD, clock.device)  # type: ignore[arg-type]
    own, rows = torch.ones(8, device=clock.device), torch.ones(8 * group.world, device=clock.device)
    return _together(clock, lambda: group.issue_all_gather(rows, own).wait())


class _Tower(nn.Module):
    def __init__(self, blocks: int, device: torch.device) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16, bias=False, device=device) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def unit_prices(clock: Clock) -> dict[str, float]:
    """Returns what the engine's work on a unit costs the host, in microseconds.

    It is what tiny units add to a step, without their collectives, shared out as it is on an H200.
    """
    num_units, device = 12, clock.device
    plain, sharded = _Tower(num_units, device), _Tower(num_units, device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    x = torch.ones(4, 16, device=device)

    def step(model: nn.Module) -> None:
        model.zero_grad()
        model(x).sum().backward()

    added = _together(clock, lambda: step(sharded), 15) - _together(clock, lambda: step(plain), 15)
    a_unit = max(added / num_units - 3 * _tiny_collective(clock), 0.2 * added / num_units)
    known = load_device("h200").host_microseconds
    listed = sum(known[name] * _TIMES.get(name, 1) for name in _PARTS) / 1e6
    return {name: known[name] * a_unit / listed for name in _PARTS}
