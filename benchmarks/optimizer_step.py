"""Times the optimizer step: plain tensors, torch's optimizer on shards, and `shardwise.optim.flat`, in one run.

    PYTHONPATH=. python benchmarks/optimizer_step.py                  # CPU
    PYTHONPATH=. python benchmarks/optimizer_step.py --device cuda

Fused AdamW over one rank's shards of the 219 parameters of the tiny model, in a fake group of 8. The plain tensors have
the same elements. All three get the same gradients; after the last step the flat optimizer's parameters must equal the
plain ones up to rounding: fused kernels process the ends of tensors with other instructions.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import shards
import torch
from measuring import Contender, adamw_room, expect, take_turns, wait_for
from torch import Tensor

import shardwise

LR = 1e-3


def measure(args: argparse.Namespace) -> None:
    models, plain = shards.make(args)
    options: dict[str, Any] = {"lr": LR, "fused": True}
    optimizers = {
        "plain": torch.optim.AdamW(plain, **options),
        "FSDP2": torch.optim.AdamW(models["FSDP2"].parameters(), **options),
        "shardwise": shardwise.optim.flat(models["shardwise"], torch.optim.AdamW, **options),
    }
    num_steps = dict.fromkeys(optimizers, 0)

    def stepper(name: str) -> Contender:
        def step() -> None:
            num_steps[name] += 1
            optimizers[name].step()

        return Contender(name, step)

    times = take_turns(
        [stepper(name) for name in optimizers],
        wait_for(torch.device(args.device)),
        args.rounds,
        args.iterations,
        args.warmup,
    )
    expect(num_steps["plain"] == num_steps["shardwise"], "contenders took different numbers of steps")
    for param, copied in zip(models["shardwise"].parameters(), plain, strict=True):
        within(param.detach().to_local(), copied, num_steps["plain"])  # type: ignore[attr-defined]
    sizes = {"number": len(plain), "elements": sum(copied.numel() for copied in plain)}
    shards.report("optimizer_step", args, times, parameters=sizes)


def within(got: Tensor, want: Tensor, num_steps: int) -> None:
    scale = want.abs() + num_steps * LR  # a step moves a parameter by at most LR
    room = sum(adamw_room(step, LR, scale) for step in range(1, num_steps + 1))
    expect(bool(((got - want).abs() <= room).all()), "the flat step has left the plain one")


def main() -> int:
    measure(shards.parse(__doc__, iterations=10))
    return 0


if __name__ == "__main__":
    sys.exit(main())
