"""Times a whole training step with parameters offloaded to the host: torch FSDP2 and shardwise, in one run.

    PYTHONPATH=. python benchmarks/offload_step.py --device cuda --model 1b

Forward, backward and fused AdamW on the host; one NCCL rank (gloo on a CPU, where there is nothing to offload). No
clipping, so that the optimizer may step a unit while backward still runs. Both start from the same weights and train on
the same tokens: their losses must stay equal, the first bitwise.

The floor is also timed: what no library can avoid as long as the host holds float32 weights and a step ends before the
next begins. All weights must be copied to the device before the last gradient comes back, and AdamW on the host can
only start after the first one. The floor is these two by themselves, one after the other.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from measuring import Contender, expect, parser, take_turns, wait_for, write
from models import SIZES, Language, build, start_group, tokens_for

import shardwise

SENT, STEPPED = "all weights to the device", "AdamW on the host"


def contender(name: str, args: Any, device: torch.device, losses: dict[str, list[float]]) -> Contender:
    size = SIZES[args.model]
    model = build(name, size, device, 1, offloads=True)
    options: dict[str, Any] = {"lr": 1e-4, "fused": True}
    if name == "shardwise":
        optimizer = shardwise.optim.flat(model, torch.optim.AdamW, in_backward=True, **options)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **options)
    inputs = tokens_for(size, device)
    losses[name] = []
    latest: list[torch.Tensor] = []

    def step() -> None:
        loss = model(*inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        latest[:] = [loss.detach()]

    def check() -> None:
        losses[name].append(float(latest[0]))
        for param in model.parameters():
            expect(param.device.type == "cpu", f"{name}: a shard is not on the host")

    return Contender(name, step, after=check)


def floor_parts(args: Any, device: torch.device) -> list[Contender]:
    """Returns the floor's contenders: copying all weights to the device, and AdamW on the host; one tensor per unit."""
    with torch.device("meta"):
        model = Language(SIZES[args.model])
    in_blocks = [sum(param.numel() for param in block.parameters()) for block in model.blocks]
    rest = sum(param.numel() for param in model.parameters()) - sum(in_blocks)
    on_gpu = device.type == "cuda"
    weights = [torch.zeros(numel, pin_memory=on_gpu) for numel in (rest, *in_blocks)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e-3)
    optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
    arrived = torch.empty(max(rest, *in_blocks), device=device)

    def send() -> None:
        for weight in weights:
            arrived[: weight.numel()].copy_(weight, non_blocking=True)

    return [Contender(SENT, send), Contender(STEPPED, optimizer.step)]


def measure(args: Any) -> None:
    device = torch.device(args.device)
    start_group("nccl" if device.type == "cuda" else "gloo", 1, device)
    losses: dict[str, list[float]] = {}
    contenders = [contender(name, args, device, losses) for name in ("FSDP2", "shardwise")]
    contenders += floor_parts(args, device)
    times = take_turns(contenders, wait_for(device), args.rounds, args.iterations, args.warmup)
    one, other = losses["FSDP2"], losses["shardwise"]
    expect(one[0] == other[0], f"first losses differ: {one[0]} and {other[0]}")
    for number, (mine, theirs) in enumerate(zip(other, one, strict=True)):
        expect(abs(mine - theirs) <= 0.02 * abs(theirs), f"loss {number} is {mine}, FSDP2's {theirs}")
    write(
        "offload_step",
        args,
        args.out,
        f"offload_step_{args.model}_{args.device}",
        step_ms=times.summary(),
        figures={
            "shardwise / FSDP2": times.ratio("shardwise", "FSDP2"),
            "floor": {"value": (times.median(SENT) + times.median(STEPPED)) / times.median("FSDP2")},
        },
        losses=losses,
    )
    dist.destroy_process_group()


def main() -> int:
    options = parser(__doc__, rounds=4, iterations=3, warmup=2)
    options.add_argument("--model", choices=list(SIZES), default="1b")
    warnings.simplefilter("ignore")
    measure(options.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
