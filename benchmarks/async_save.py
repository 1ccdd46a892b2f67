"""Measures how much an asynchronous save slows down the training steps that it overlaps.

    python benchmarks/async_save.py                     # two CPU ranks
    python benchmarks/async_save.py --device cuda       # one rank per GPU

One run saves at regular intervals. A step is overlapped if a checkpoint was being written at any time during it; the
copy to host memory, for which a step does wait, counts too. Time is from the end of one step to the end of the next.
The figure is the total time of overlapped steps, divided by the median undisturbed step times their number, minus one.
The same is reported for the CPU time of all threads of the first rank, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import torch

from shardwise.train.config import Config
from shardwise.train.display import Quiet
from shardwise.train.launch import plan_ranks, run_local_ranks
from shardwise.train.loop import Trainer
from shardwise.train.recipes import load_recipe
from shardwise.train.records import StepRecord
from shardwise.train.settings import with_settings
from shardwise.train.team import Team

RESULTS = Path(__file__).parent / "results"
ON_CPU = [
    "model.layers=4",
    "model.width=256",
    "model.heads=4",
    "model.kv_heads=4",
    "model.hidden=704",
    "model.context=128",
    "train.batch_size=64",
]
ON_CUDA = ["model.layers=16", "model.width=1024", "model.hidden=2816", "model.heads=16", "model.kv_heads=16"]
ON_CUDA += ["model.context=1024", "train.batch_size=16", "sharding.precision=bf16"]


class Watch(Quiet):
    """Records the times of steps, and which of them a save overlapped."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._last: tuple[float, float] | None = None
        self.alone: list[tuple[float, float]] = []
        self.overlapped: list[tuple[float, float]] = []
        """Wall-clock and CPU seconds of each step."""

    def step(self, record: StepRecord) -> None:
        now = time.perf_counter(), time.process_time()
        # The first steps also pay for caches and compilation.
        if self._last is not None and record.step > self._every:
            begun_with_a_save = (record.step - 1) % self._every == 0
            steps = self.overlapped if begun_with_a_save or record.saving else self.alone
            steps.append((now[0] - self._last[0], now[1] - self._last[1]))
        self._last = now


def cost(alone: list[float], overlapped: list[float]) -> float:
    return sum(overlapped) / (statistics.median(alone) * len(overlapped)) - 1


def measure(config: Config, result: Path, device: torch.device) -> None:
    """Runs on every rank; the first one writes the result."""
    team, watch = Team(), Watch(config.checkpoint.every)
    with tempfile.TemporaryDirectory() as own:
        folder = team.from_first(lambda: Path(own))
        trainer = Trainer(config, folder, team, device, watch)
        summary = trainer.run()
        num_bytes = (
            sum(path.stat().st_size for path in Path(summary.checkpoint or "").glob("*"))
            if summary.checkpoint
            else 0
        )
        team.sum(0.0)  # a barrier: the folder is removed only when no rank reads it
    if team.rank:
        return
    (alone, cpu_alone), (overlapped, cpu_overlapped) = (
        [list(column) for column in zip(*steps, strict=True)] for steps in (watch.alone, watch.overlapped)
    )
    found = {
        "cost": cost(alone, overlapped),
        "cost_by_medians": statistics.median(overlapped) / statistics.median(alone) - 1,
        "cost_in_cpu_time": cost(cpu_alone, cpu_overlapped),
        "overlapped_steps": len(watch.overlapped),
        "undisturbed_steps": len(watch.alone),
        "median_seconds_undisturbed": statistics.median(alone),
        "median_seconds_overlapped": statistics.median(overlapped),
        "median_cpu_seconds_undisturbed": statistics.median(cpu_alone),
        "median_cpu_seconds_overlapped": statistics.median(cpu_overlapped),
        "checkpoint_bytes": num_bytes,
        "parameters": trainer.parallel.num_parameters,
        "ranks": team.world_size,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "CPU",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    print(json.dumps(found, indent=2))
    result.write_text(json.dumps(found, indent=2) + "\n")


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments.add_argument("--ranks", type=int)
    arguments.add_argument("--saves", type=int, default=6)
    arguments.add_argument("--every", type=int, default=4)
    arguments.add_argument("--set", dest="settings", action="append", default=[])
    arguments.add_argument("--result", type=Path)
    options = arguments.parse_args()
    num_ranks, kind = plan_ranks(options.ranks, options.device, torch.cuda.device_count())
    settings = ON_CUDA if kind == "cuda" else ON_CPU
    steps = options.every * (options.saves + 2) - 1
    settings = [*settings, f"train.steps={steps}", f"checkpoint.every={options.every}", "checkpoint.keep=1"]
    config = with_settings(load_recipe("small"), [*settings, "evaluate.batches=0", *options.settings])
    result = options.result or RESULTS / f"async_save_{kind}.json"
    return run_local_ranks(partial(measure, config, result), num_ranks, kind)


if __name__ == "__main__":
    sys.exit(main())
