"""Times clipping by total norm: plain tensors, torch on FSDP2's shards, and `shardwise.clip_grad_norm_`.

    PYTHONPATH=. python benchmarks/clip.py                  # CPU
    PYTHONPATH=. python benchmarks/clip.py --device cuda

One rank's shards of all parameters of the tiny model, in a fake group of 8; plain tensors have the same elements.
After every clip the norms must agree, and shardwise must have issued one all-reduce.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import shards
import torch
from measuring import Contender, expect, take_turns, wait_for
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

import shardwise

MAX_NORM = 1e9  # scales by one, so that every clip of a run sees the same gradients


def measure(args: argparse.Namespace) -> None:
    models, plain = shards.make(args)
    params: dict[str, list[Any]] = {name: list(model.parameters()) for name, model in models.items()}
    params["plain"] = plain
    clips = {
        "plain": nn.utils.clip_grad_norm_,
        "FSDP2": nn.utils.clip_grad_norm_,
        "shardwise": shardwise.clip_grad_norm_,
    }
    norms: dict[str, torch.Tensor] = {}

    def clipper(name: str) -> Contender:
        def step() -> None:
            norms[name] = clips[name](params[name], MAX_NORM)

        return Contender(name, step, after=lambda: check(name))

    def check(name: str) -> None:
        if name == "shardwise" and "plain" in norms:
            close = torch.isclose(norms[name], norms["plain"], rtol=1e-4)
            expect(bool(close), f"norms differ: {norms[name]} and {norms['plain']}")

    times = take_turns(
        [clipper(name) for name in clips],
        wait_for(torch.device(args.device)),
        args.rounds,
        args.iterations,
        args.warmup,
    )
    with CommDebugMode() as counts:
        clips["shardwise"](params["shardwise"], MAX_NORM)
    expect(counts.get_total_counts() == 1, f"collectives: {counts.get_comm_counts()}")
    shards.report("clip", args, times)


def main() -> int:
    measure(shards.parse(__doc__, iterations=20))
    return 0


if __name__ == "__main__":
    sys.exit(main())
