"""Clipping by the norm of all gradients: plain tensors, torch on FSDP2's shards, and `shardwise.clip_grad_norm_`.

    PYTHONPATH=. python benchmarks/clip.py                  # CPU
    PYTHONPATH=. python benchmarks/clip.py --device cuda

All parameters of the tiny model, one rank's shards of a fake group of 8; plain are tensors with the same elements.
After every clip the norms must agree, and shardwise must have asked for one all-reduce.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from measuring import Contender, expect, parser, take_turns, wait_for, write
from models import SIZES, build, start_group, tokens_for
from optimizer_step import random_gradients
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

import shardwise

MAX_NORM = 1e9  # scales by one, so that every clip of a run meets the same gradients


def measure(args: Any) -> None:
    device = torch.device(args.device)
    size = SIZES[args.model]
    start_group("fake", args.world_size, device)
    params: dict[str, list[Any]] = {}
    for name in ("FSDP2", "shardwise"):
        model = build(name, size, device, args.world_size)
        model(*tokens_for(size, device)).backward()
        random_gradients(model)
        params[name] = list(model.parameters())
    params["plain"] = []
    for param in params["shardwise"]:
        params["plain"].append(param.detach().to_local().clone())
        params["plain"][-1].grad = param.grad.to_local().clone()
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
        [clipper(name) for name in ("plain", "FSDP2", "shardwise")],
        wait_for(device),
        args.rounds,
        args.iterations,
        args.warmup,
    )
    with CommDebugMode() as counts:
        clips["shardwise"](params["shardwise"], MAX_NORM)
    expect(counts.get_total_counts() == 1, f"collectives: {counts.get_comm_counts()}")
    write(
        "clip",
        args,
        args.out,
        f"clip_{args.device}",
        step_ms=times.summary(),
        figures={
            "shardwise / plain": times.ratio("shardwise", "plain"),
            "FSDP2 / plain": times.ratio("FSDP2", "plain"),
        },
    )


def main() -> int:
    options = parser(__doc__, rounds=9, iterations=20)
    options.add_argument("--model", choices=list(SIZES), default="tiny")
    options.add_argument("--world-size", type=int, default=8)
    warnings.simplefilter("ignore")
    measure(options.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
