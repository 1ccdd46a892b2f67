"""Predicts steps of gloo ranks on this machine, with prices measured here, and takes them: both beside each other.

    PYTHONPATH=. python benchmarks/forecast_gloo.py             # 2 and 4 ranks

For each number of ranks, the ranks first measure this machine's prices, as `shardwise doctor --measure` does. Then they
train models of three shapes: forward, backward and a flat AdamW, with one thread each. `shardwise.plan` predicts each
step from the prices alone. A step's time is that of its slowest rank.

Steps last as long as there are cores for them, and prices are those of a machine without other work. So a step counts
if other programs took less than a twentieth of the cores while it ran (`/proc/stat`, without these ranks' own CPU
time); how many did is in the results. CPU time a rank is given besides: other work lengthens it less, and waiting for
other ranks is in it only as far as ranks poll.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from measuring import expect, parser, summary, write
from models import Block, Language, Size, fill, shard_blocks

import shardwise
from shardwise.forecast.device_files import load_device
from shardwise.forecast.measured_device import measure_device
from shardwise.forecast.plan import Plan, plan
from shardwise.testing import run_ranks

# Blocks, width, tokens: little computing for its weights, much of it, and fewer larger units.
SHAPES = {
    "6 × 512, 64 tokens": (6, 512, 64),
    "6 × 512, 512 tokens": (6, 512, 512),
    "3 × 1024, 256 tokens": (3, 1024, 256),
}
OTHERS = 0.05
TICK = 1 / os.sysconf("SC_CLK_TCK")


class Step(NamedTuple):
    """One step of one rank, in seconds; ``busy`` is what all cores did meanwhile."""

    wall: float
    cpu: float
    busy: float


def size_of(shape: tuple[int, int, int]) -> Size:
    blocks, width, tokens = shape
    return Size(blocks, width, width * 11 // 4, 8, 1000, tokens)


def busy_seconds() -> float:
    """Returns how long all cores together have worked since the machine started."""
    user, nice, system, _, _, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) * TICK


def train(size: Size, iterations: int, warmup: int) -> list[Step]:
    model: Any = Language(size)
    fill(model)
    shard_blocks(model, shardwise.fully_shard)
    optimizer = shardwise.optim.flat(model, torch.optim.AdamW, lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens, targets = (torch.randint(size.vocab, (1, size.tokens), generator=generator) for _ in range(2))
    steps, losses = [], []
    for _ in range(warmup + iterations):
        dist.barrier()
        busy, wall, cpu = busy_seconds(), time.perf_counter(), time.process_time()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(Step(time.perf_counter() - wall, time.process_time() - cpu, busy_seconds() - busy))
        losses.append(loss.item())
    expect(losses[-1] < losses[0], "the model does not learn")
    return steps[warmup:]


def measure(file: str, iterations: int, warmup: int) -> dict[str, list[Step]]:
    """Runs on each rank: measures prices into the file, then takes steps."""
    warnings.simplefilter("ignore")
    measure_device(file, torch.device("cpu"))
    torch.set_num_threads(1)
    return {name: train(size_of(shape), iterations, warmup) for name, shape in SHAPES.items()}


def predicted(shape: tuple[int, int, int], ranks: int, file: str) -> Plan:
    size = size_of(shape)
    tokens = torch.empty(1, size.tokens, dtype=torch.long, device="meta")
    return plan(lambda: Language(size), (tokens, tokens), ranks=ranks, device=file, wrap=Block)


def row(planned: Plan, by_rank: list[list[Step]]) -> dict[str, Any]:
    """Puts the prediction beside the steps that other programs left alone, or beside all if there was none."""
    cores = os.cpu_count() or 1
    steps = list(zip(*by_rank, strict=True))
    walls = [max(each.wall for each in step) for step in steps]
    others = [
        max(0.0, max(each.busy for each in step) - sum(each.cpu for each in step)) / (cores * wall)
        for step, wall in zip(steps, walls, strict=True)
    ]
    alone = [wall for wall, share in zip(walls, others, strict=True) if share < OTHERS]
    measured = statistics.median(alone or walls)
    cpu = statistics.median(statistics.mean(each.cpu for each in step) for step in steps)
    return {
        "predicted_ms": 1000 * planned.seconds,
        "predicted_range_ms": [1000 * seconds for seconds in planned.seconds_range],
        "measured_ms": 1000 * measured,
        "ratio": planned.seconds / measured,
        "steps": len(steps),
        "undisturbed_steps": len(alone),
        "others_share_of_cores": summary(others),
        "all_steps_ms": summary([1000 * wall for wall in walls]),
        "cpu_ms_a_rank": 1000 * cpu,
        "predicted / cpu": planned.seconds / cpu / max(1.0, len(by_rank) / cores),
    }


def main() -> int:
    options = parser(__doc__, rounds=1, iterations=30, warmup=4)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    args = options.parse_args()
    rows, prices = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in args.ranks:
            file = f"{folder}/{ranks}.json"
            by_rank = run_ranks(
                measure, ranks, file, args.iterations, args.warmup, kind="gloo", timeout_seconds=1200
            )
            device = load_device(file)
            prices[f"{ranks} ranks"] = {
                "float32_flops": device.peak_flops["float32"],
                "memory_bytes_per_second": device.memory_bytes_per_second,
                "collective_seconds": device.links.within.call_seconds + device.links.within.hop_seconds,
                "collective_bytes_per_second": device.links.within.bytes_per_second,
            }
            for name, shape in SHAPES.items():
                found = row(predicted(shape, ranks, file), [rank[name] for rank in by_rank])
                rows[f"{ranks} ranks, {name}"] = found
                print(
                    f"{ranks} ranks, {name}:",
                    {key: value for key, value in found.items() if "share" not in key},
                )
    write("forecast_gloo", args, args.out, "forecast_gloo", step_ms={}, figures={}, steps=rows, prices=prices)
    return 0


if __name__ == "__main__":
    sys.exit(main())
