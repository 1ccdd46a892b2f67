"""The optimizer's step: plain tensors, torch's optimizer on shards, and `shardwise.optim.flat`, in one run.

    PYTHONPATH=. python benchmarks/optimizer_step.py                  # CPU
    PYTHONPATH=. python benchmarks/optimizer_step.py --device cuda

Fused AdamW over the 219 parameters of the tiny model, one rank's shards of a fake group of 8. Plain are tensors
with the very same elements. All three get the same gradients; after the last step the flat optimizer's parameters must
be within one ulp a step of the plain ones.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from measuring import Contender, expect, parser, take_turns, wait_for, write
from models import SIZES, build, start_group, tokens_for
from torch import Tensor

import shardwise


def random_gradients(model: torch.nn.Module) -> None:
    """Fills the gradients in place: a fake group leaves anything in them."""
    for number, param in enumerate(model.parameters()):
        local = param.grad.to_local()  # type: ignore[union-attr]
        local.normal_(generator=torch.Generator(local.device).manual_seed(number))


def measure(args: Any) -> None:
    device = torch.device(args.device)
    size = SIZES[args.model]
    start_group("fake", args.world_size, device)
    models = {name: build(name, size, device, args.world_size) for name in ("FSDP2", "shardwise")}
    for model in models.values():
        model(*tokens_for(size, device)).backward()
        random_gradients(model)
    options: dict[str, Any] = {"lr": 1e-3, "fused": True}
    copies = [param.detach().to_local().clone() for param in models["shardwise"].parameters()]  # type: ignore[attr-defined]
    for copied, param in zip(copies, models["shardwise"].parameters(), strict=True):
        copied.grad = param.grad.to_local().clone()  # type: ignore[union-attr]
    optimizers = {
        "plain": torch.optim.AdamW(copies, **options),
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
        [stepper(name) for name in optimizers], wait_for(device), args.rounds, args.iterations, args.warmup
    )
    expect(num_steps["plain"] == num_steps["shardwise"], "contenders took different numbers of steps")
    for param, copied in zip(models["shardwise"].parameters(), copies, strict=True):
        within(param.detach().to_local(), copied, num_steps["plain"])  # type: ignore[attr-defined]
    write(
        "optimizer_step",
        args,
        args.out,
        f"optimizer_step_{args.device}",
        step_ms=times.summary(),
        figures={
            "shardwise / plain": times.ratio("shardwise", "plain"),
            "FSDP2 / plain": times.ratio("FSDP2", "plain"),
        },
        parameters={"number": len(copies), "elements": sum(copied.numel() for copied in copies)},
    )


def within(got: Tensor, want: Tensor, num_steps: int) -> None:
    scale = want.abs().clamp_min(1e-2)  # no element stays larger than it is changed by in a few steps
    ulp = torch.nextafter(scale, torch.full_like(scale, torch.inf)) - scale
    expect(bool(((got - want).abs() <= num_steps * ulp).all()), "the flat step has left the plain one")


def main() -> int:
    options = parser(__doc__, rounds=9, iterations=10)
    options.add_argument("--model", choices=list(SIZES), default="tiny")
    options.add_argument("--world-size", type=int, default=8)
    warnings.simplefilter("ignore")
    measure(options.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
