"""Runs overlapped steps with random sleeps in ranks and hooks: checks for hangs, and the result of every step.

    python benchmarks/zero_soak.py                  # gloo, 20 seeds of 50 steps, both hooks, both sharings
    python benchmarks/zero_soak.py --kind nccl

Every rank trains a small model twice, once with the optimizer stepped inside DDP's backward and once with DDP and
a local optimizer, and compares all parameters bitwise after every step. A seed that exceeds its time limit counts
as a hang: the run stops there and shows the stack of every rank.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from datetime import datetime, timezone
from itertools import product
from pathlib import Path

import torch

from shardwise.testing import run_ranks
from tests.ranks.zero_cases.overlap import soaks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    runs = []
    for seed in range(arguments.seeds):
        for interleaved, shard_buckets in product((False, True), (False, True)):
            # World sizes 2, 3 and 4 in turn, so that each of the four variants runs with each size.
            world = 2 + seed % 3
            start = time.monotonic()
            run_ranks(
                soaks,
                world,
                seed,
                arguments.steps,
                kind=arguments.kind,
                timeout_seconds=120,
                interleaved=interleaved,
                shard_buckets=shard_buckets,
            )
            seconds = round(time.monotonic() - start, 1)
            runs.append(
                {
                    "seed": seed,
                    "world": world,
                    "interleaved": interleaved,
                    "shard_buckets": shard_buckets,
                    "steps": arguments.steps,
                    "seconds": seconds,
                }
            )
            print(
                f"seed {seed:2}  {world} ranks  {interleaved=!s:5}  {shard_buckets=!s:5}  {seconds:5.1f} s",
                flush=True,
            )
    result = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "kind": arguments.kind,
        "hangs": 0,
        "steps_that_differ": 0,
        "runs": runs,
    }
    output = Path(__file__).parent / "results" / f"zero_soak_{arguments.kind}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {output}")


if __name__ == "__main__":
    main()
