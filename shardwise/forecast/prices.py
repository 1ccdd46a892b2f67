"""What work costs on a device and on its links: seconds from prices.

    device = load_device("h200")            # device_files.py
    seconds_of_op(device, "matmul", flops=2 * 8192 * 4096**2, bytes=..., dtype="bfloat16")
    seconds_of_collective(device.links, "all_gather", bytes=436 << 20, ranks=64, ranks_per_node=8)

Nothing here imports torch: a price is arithmetic.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from shardwise.errors import ConfigError

__all__ = [
    "COLLECTIVES",
    "HOST_CALLS",
    "OPS",
    "SHARES",
    "Curve",
    "Device",
    "Link",
    "Links",
    "host_seconds",
    "seconds_of_collective",
    "seconds_of_op",
    "unknown_price",
]

OPS: Final = ("matmul", "attention", "elementwise", "reduction", "copy", "optimizer")
# Limited by arithmetic or by memory, whichever takes longer; the others by memory alone.
BY_FLOPS: Final = ("matmul", "attention")
# Why kernels reach less than others of their kind: rows of a 16-bit matrix begin at odd places; torch.compile has made
# them, of several ops.
SHARES: Final = ("unaligned", "fused")
COLLECTIVES: Final = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "p2p")
# What every device file must price on the host, in microseconds; it may name more.
HOST_CALLS: Final = ("op", "view", "all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True)
class Curve:
    """The fraction of a peak that an op reaches, by its size in flops or bytes; straight between points in log-log."""

    sizes: tuple[float, ...]
    fractions: tuple[float, ...]

    def at(self, size: float) -> float:
        if size <= self.sizes[0]:
            return self.fractions[0]
        if size >= self.sizes[-1]:
            return self.fractions[-1]
        right = bisect.bisect_right(self.sizes, size)
        low, high = self.sizes[right - 1], self.sizes[right]
        share = math.log(size / low) / math.log(high / low)
        return float(self.fractions[right - 1] ** (1 - share) * self.fractions[right] ** share)


@dataclass(frozen=True, slots=True)
class Link:
    """How ranks reach each other: a call's fixed time, the time of a hop, and bytes a second, each way, of one rank.

    ``bytes_per_second`` is what large collectives reach (nccl-tests' bus bandwidth), not what the cable could carry.
    """

    name: str
    call_seconds: float
    hop_seconds: float
    bytes_per_second: float
    # Thread blocks that a collective occupies while it runs, one multiprocessor each; 0 on a CPU.
    channels: int = 0
    # All ranks of a node move their bytes through the same memory or the same cores: they share bytes_per_second.
    is_shared: bool = False
    # What a kind of collective reaches of bytes_per_second, where that differs from 1.
    share_of: Mapping[str, float] = field(default_factory=dict)
    # Kinds of collectives that take no time: those that torch's fake process group does not carry out.
    free: tuple[str, ...] = ()
    # Tensors that are gathered by one call come one after another, as torch's fake process group copies them.
    one_by_one: bool = False


@dataclass(frozen=True, slots=True)
class Links:
    """The link within a node and the one between nodes, with what a collective takes of the device meanwhile."""

    within: Link
    between: Link
    # The share of the device's multiprocessors that a collective occupies while it runs.
    sm_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Device:
    """Prices of one device, of its host and of its links. Times are seconds, host prices microseconds."""

    name: str
    # "cuda" or "cpu": on a CPU the host is the device, and nothing runs beside it.
    type: str
    memory_bytes: int
    # Taken before the first tensor: the CUDA context, libraries, the communicator's buffers.
    context_bytes: int
    memory_bytes_per_second: float
    # The shortest time that a kernel takes, added to every op.
    launch_seconds: float
    # Copies between host and device, one way alone and both ways together.
    host_copy_bytes_per_second: float
    host_copy_both_bytes_per_second: float
    peak_flops: Mapping[str, float]
    fractions: Mapping[str, Curve]
    host_microseconds: Mapping[str, float]
    links: Links
    # What kernels reach of these fractions, by why they reach less (``SHARES``).
    shares: Mapping[str, float]
    # How far "compute", "host" and "links" prices may be off, as fractions: for intervals of predictions.
    spread: Mapping[str, float]
    # Where each price comes from, by its name in the file.
    sources: Mapping[str, str]
    notes: str = ""


# --- seconds ------------------------------------------------------------------------------------------------------


def seconds_of_op(
    device: Device,
    kind: str,
    flops: float,
    bytes: float,  # noqa: A002
    dtype: str,
    share: str = "",
) -> float:
    """Returns how long the device works on one op.

    Args:
        device: whose prices.
        kind: one of ``OPS``.
        flops: floating-point operations, a multiplication and an addition counting as two.
        bytes: bytes read and written.
        dtype: of the arithmetic, such as ``"bfloat16"``; a dtype without a price is taken for float32.
        share: one of ``SHARES``, or "" for kernels that reach what others of their kind do.
    """
    if kind not in device.fractions:
        raise unknown_price("kind of op", kind, OPS)
    reached = device.shares.get(share, 1.0)
    moving = (
        bytes / (device.memory_bytes_per_second * _moving_curve(device, kind).at(bytes)) if bytes else 0.0
    )
    if kind not in BY_FLOPS or not flops:
        return device.launch_seconds + moving / reached
    peak = _peak(device, kind, dtype) * device.fractions[kind].at(flops)
    return device.launch_seconds + max(flops / peak, moving) / reached


def _peak(device: Device, kind: str, dtype: str) -> float:
    peak = device.peak_flops.get(dtype, device.peak_flops["float32"])
    if kind == "attention" and dtype == "float32":
        # The memory-efficient kernel makes each product of three in TF32.
        return max(peak, device.peak_flops.get("tf32", 0.0) / 3)
    return peak


def _moving_curve(device: Device, kind: str) -> Curve:
    return device.fractions["elementwise" if kind in BY_FLOPS else kind]


def host_seconds(device: Device, call: str) -> float:
    """Returns how long the host spends in one call, by its name in the price list."""
    if call not in device.host_microseconds:
        raise unknown_price(
            f"host call in the prices of {device.name}", call, sorted(device.host_microseconds)
        )
    return device.host_microseconds[call] / 1e6


def seconds_of_collective(
    links: Links,
    kind: str,
    bytes: int,  # noqa: A002
    ranks: int,
    ranks_per_node: int,
    num_tensors: int = 1,
) -> float:
    """Returns how long a collective runs once all ranks have started it.

    Args:
        links: of these ranks.
        kind: one of ``COLLECTIVES``.
        bytes: of the full tensor: what an all-gather returns, what a reduce-scatter or an all-reduce takes, what each
            rank holds before an all-to-all, the message of a p2p.
        ranks: in the group.
        ranks_per_node: ranks of this group on one node; others of the node use links of their own.
        num_tensors: that ``bytes`` are divided into, all gathered by one call.
    """
    if kind not in COLLECTIVES:
        raise unknown_price("kind of collective", kind, COLLECTIVES)
    local = max(1, min(ranks_per_node, ranks))
    nodes = math.ceil(ranks / local)
    if ranks <= 1 or kind in (links.within if nodes == 1 else links.between).free:
        return 0.0
    if kind == "p2p":
        return _p2p_seconds(links.within if nodes == 1 else links.between, bytes)
    if kind == "all_to_all":
        return _all_to_all_seconds(links, bytes, ranks, local, nodes)
    if kind == "all_reduce":
        ring = _ring_seconds(links, kind, 2 * bytes, 2, ranks, local, nodes)
        return min(ring, _tree_seconds(links, kind, bytes, local, nodes))
    times = num_tensors if links.within.one_by_one else 1
    return times * _ring_seconds(links, kind, bytes / times, 1, ranks, local, nodes)


def _rate(link: Link, kind: str, local: int) -> float:
    rate = link.bytes_per_second * link.share_of.get(kind, 1.0)
    return rate / local if link.is_shared else rate


def _p2p_seconds(link: Link, num_bytes: int) -> float:
    return link.call_seconds + link.hop_seconds + num_bytes / _rate(link, "p2p", 1)


def _ring_seconds(
    links: Links, kind: str, num_bytes: float, rounds: int, ranks: int, local: int, nodes: int
) -> float:
    """One ring over all ranks per local rank: each crosses a node's boundary at a different rank's network card."""
    moved = num_bytes * (ranks - 1) / ranks
    seconds = [moved / _rate(links.within, kind, local)] if local > 1 else [0.0]
    latency = links.within.call_seconds + rounds * links.within.hop_seconds * nodes * (local - 1)
    if nodes > 1:
        seconds.append(moved / (local * _rate(links.between, kind, local)))
        latency += links.between.call_seconds + rounds * links.between.hop_seconds * nodes
    # The pipeline is as fast as its slowest link.
    return latency + max(seconds)


def _tree_seconds(links: Links, kind: str, num_bytes: int, local: int, nodes: int) -> float:
    """An all-reduce as two trees of nodes, each of half of the data, up and down; a chain within a node."""
    seconds = [2 * num_bytes / _rate(links.within, kind, local)] if local > 1 else [0.0]
    latency = links.within.call_seconds + 2 * links.within.hop_seconds * (local - 1)
    if nodes > 1:
        seconds.append(2 * num_bytes / (local * _rate(links.between, kind, local)))
        latency += links.between.call_seconds + 2 * links.between.hop_seconds * math.ceil(math.log2(nodes))
    return latency + max(seconds)


def _all_to_all_seconds(links: Links, num_bytes: int, ranks: int, local: int, nodes: int) -> float:
    """Each rank sends a piece of its own to every other."""
    within = num_bytes * (local - 1) / ranks / _rate(links.within, "all_to_all", local)
    latency = links.within.call_seconds + links.within.hop_seconds * (local - 1)
    if nodes == 1:
        return latency + within
    between = num_bytes * (ranks - local) / ranks / _rate(links.between, "all_to_all", local)
    return (
        latency
        + links.between.call_seconds
        + links.between.hop_seconds * (ranks - local)
        + max(within, between)
    )


def unknown_price(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """Returns the error about a name that prices do not know."""
    return ConfigError(f"there is no {what} '{name}'", where="prices", fix=f"use one of {', '.join(known)}")
