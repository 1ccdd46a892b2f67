"""The prices of the machine at hand, measured on all of its ranks at once and put together as a device file."""

from __future__ import annotations

import os
import platform
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import ConfigError
from shardwise.forecast.device_files import FORMAT, device_from_json, device_text
from shardwise.forecast.measured_links import host_calls, links, unit_prices
from shardwise.forecast.measured_prices import Clock, fractions, host_copies, host_prices, num_cores, peaks
from shardwise.forecast.prices import Device

__all__ = ["check_target", "measure_device", "measured_lines"]


def measure_device(file: str | os.PathLike[str], device: torch.device) -> None:
    """Measures prices on every rank of the default group at once, and writes rank 0's to a device file.

    Each rank measures ``device``, which is its own: a GPU, or its share of the machine's cores.
    """
    world = dist.get_world_size()
    if device.type == "cpu":
        torch.set_num_threads(max(1, num_cores() // world))
    content = _content(Clock(device, world))
    if dist.get_rank() == 0:
        device_from_json(content, os.fspath(file))
        Path(file).write_text(device_text(content), encoding="utf-8")
    dist.barrier()


def check_target(file: str | os.PathLike[str]) -> None:
    """Refuses a file that ``load_device`` would not find, or that cannot be written, before anything is measured."""
    path = Path(file)
    if path.suffix != ".json" or path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(
            f"the device file '{path}' cannot be written",
            where="--measure",
            fix="pass a name that ends in .json, in a folder that exists and can be written",
        )


def _content(clock: Clock) -> dict[str, Any]:
    device, world = clock.device, dist.get_world_size()
    is_cuda = device.type == "cuda"
    source = _source(device, world)

    def price(value: float, how: str = source) -> dict[str, Any]:
        return {"value": value, "from": how}

    host = host_prices(clock)
    tiny = torch.ones(8, device=device)
    # On a CPU the host's price of an op is all that a small one takes; on a GPU the device has its own.
    small = clock.device_seconds(lambda: [tiny.mul(tiny) for _ in range(50)]) / 50
    flops, timed, peak_bytes = peaks(clock, small)
    link: dict[str, Any] | str = {**links(clock), "from": source} if world > 1 else "nvlink4"
    one_way, both_ways = host_copies(clock)
    calls = host_calls(clock)
    if not is_cuda:
        # The host carries a collective out: all of its time is the link's.
        calls = dict.fromkeys(calls, 0.0)
    peak = flops["bfloat16" if is_cuda else "float32"]
    curves = fractions(timed, peak, peak_bytes, small)
    total, taken = _memory(device, world)
    return {
        "format": FORMAT,
        "name": _name(device, world),
        "type": device.type,
        "notes": f"Written by shardwise doctor --measure on {date.today()}. {world} ranks measured at once.",
        "memory_bytes": price(total, f"{source}; of a CPU, this rank's share of the machine's memory"),
        "context_bytes": price(taken, f"{source}: taken before the first tensor"),
        "memory_bytes_per_second": price(peak_bytes, f"{source}: the highest rate of an op that moves bytes"),
        "launch_seconds": price(
            small if is_cuda else 0.0, f"{source}; of a CPU, a call's price is the host's"
        ),
        "multiprocessors": price(_multiprocessors(device)),
        "host_copy_bytes_per_second": price(one_way),
        "host_copy_both_bytes_per_second": price(both_ways),
        "peak_flops": {"values": flops, "from": f"{source}: the highest rate of a matrix product"},
        "fractions": {kind: {"points": points, "from": source} for kind, points in curves.items()},
        "host_microseconds": [
            {"values": {**host, **calls}, "from": source},
            {
                "values": unit_prices(clock),
                "from": f"{source}: a step of tiny units, shared out as on an H200",
            },
        ],
        "links": {"within": link, "between": "ethernet-10"},
        "spread": {"values": {"compute": 0.1, "host": 0.2, "links": 0.2}, "from": "assumption"},
    }


def _source(device: torch.device, world: int) -> str:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{num_cores()} cores"
    threads = "" if device.type == "cuda" else f", {torch.get_num_threads()} threads a rank"
    return f"measured on this machine: {where}, {world} ranks at once{threads}, torch {torch.__version__}"


def _name(device: torch.device, world: int) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, measured"
    return f"{platform.machine()} CPU, {num_cores()} cores for {world} ranks, measured"


def _memory(device: torch.device, world: int) -> tuple[int, int]:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, max(0, total - free - torch.cuda.memory_reserved(device))
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return pages // world, resident


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def measured_lines(device: Device) -> list[str]:
    """Returns what a measured device file says in short."""
    flops = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s {dtype}" for dtype, rate in device.peak_flops.items())
    within = device.links.within
    between_two = 1e6 * (within.call_seconds + within.hop_seconds)
    return [
        f"matrix products: up to {flops}",
        f"memory: up to {device.memory_bytes_per_second / 1e9:.1f} GB/s",
        f"an op: {device.host_microseconds['op']:.1f} µs of the host",
        f"collectives: {between_two:.0f} µs between two ranks, {within.bytes_per_second / 1e9:.2f} GB/s, {within.name}",
    ]
