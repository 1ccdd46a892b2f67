"""Times a whole training step as one CUDA graph: plain eager, plain and FSDP2 by hand, and `shardwise.capture`.

    PYTHONPATH=. python benchmarks/captured_step.py --model tiny      # or 1b
    PYTHONPATH=. python benchmarks/captured_step.py --backend nccl    # one NCCL rank instead of the fake group of 8
    PYTHONPATH=. python benchmarks/captured_step.py --backend nccl --world-size 2    # which share one GPU in turns

A step is forward, backward, clipping and AdamW (fused, capturable, with a tensor as learning rate). Before the tiny
model is timed over NCCL, shardwise's captured steps are checked to be bitwise equal to its eager steps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from measuring import Contender, Times, expect, nothing, parser, take_turns, wait_for, write
from models import SIZES, Size, build, start_group, tokens_for
from torch import Tensor, nn

import shardwise
from shardwise.testing import run_ranks

DEVICE = torch.device("cuda", 0)
BY_HAND, OURS = "FSDP2, by hand", "shardwise.capture"
# Without sharding: what any graph must do for the model itself, and an optimizer step over all of its elements.
PLAIN_BY_HAND = "plain, by hand"


def training_step(name: str, size: Size, world_size: int) -> Callable[[Tensor, Tensor], Tensor]:
    model = build(name, size, DEVICE, world_size)
    options: dict[str, Any] = {"lr": torch.tensor(1e-3, device=DEVICE), "fused": True, "capturable": True}
    if name == "shardwise":
        optimizer = shardwise.optim.flat(model, torch.optim.AdamW, **options)
        clip = shardwise.clip_grad_norm_
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        clip = nn.utils.clip_grad_norm_

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def captured_by_hand(step: Callable[..., Tensor], *inputs: Tensor) -> Callable[..., Tensor]:
    """Captures a step as torch's documentation tells users to."""
    static = [tensor.clone() for tensor in inputs]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(*static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        output = step(*static)

    def replay(*given: Tensor) -> Tensor:
        assert step is not None  # alive: the model and the optimizer, whose memory the graph reads and writes
        for own, tensor in zip(static, given, strict=True):
            own.copy_(tensor)
        graph.replay()
        return output.clone()

    return replay


def captured_by_shardwise(
    size: Size, world_size: int, inputs: tuple[Tensor, Tensor]
) -> Callable[..., Tensor]:
    captured = shardwise.capture(training_step("shardwise", size, world_size), *inputs)
    for _ in range(4):
        captured(*inputs)
    expect(captured.is_captured, f"not captured: {captured.reason}")
    return captured


def check_parity(size: Size, world_size: int, inputs: tuple[Tensor, Tensor]) -> None:
    """Checks that six captured steps are bitwise equal to six eager steps."""
    eager = training_step("shardwise", size, world_size)
    captured = shardwise.capture(training_step("shardwise", size, world_size), *inputs)
    losses = [[step(*inputs) for _ in range(6)] for step in (eager, captured)]
    expect(captured.is_captured, f"not captured: {captured.reason}")
    expect(all(map(torch.equal, *losses)), f"captured {losses[1]}, eager {losses[0]}")


def measured(args: argparse.Namespace) -> Times:
    """Times all contenders on one rank; the process group must be initialized."""
    size = SIZES[args.model]
    inputs = tokens_for(size, DEVICE)
    # A fake group's reduce leaves gradients uninitialized, so there is nothing to compare.
    if args.model == "tiny" and args.backend == "nccl":
        check_parity(size, args.world_size, inputs)
    steps = {
        "plain": training_step("plain", size, 1),
        OURS: captured_by_shardwise(size, args.world_size, inputs),
        PLAIN_BY_HAND: captured_by_hand(training_step("plain", size, 1), *inputs),
        BY_HAND: captured_by_hand(training_step("FSDP2", size, args.world_size), *inputs),
    }
    # Real ranks start each step together; a fake group has no other ranks.
    meet = dist.barrier if args.backend == "nccl" else nothing
    contenders = [
        Contender(name, lambda step=step: step(*inputs), before=meet) for name, step in steps.items()
    ]
    return take_turns(contenders, wait_for(DEVICE), args.rounds, args.iterations, args.warmup)


def main() -> int:
    options = parser(__doc__, rounds=6, iterations=5)
    options.set_defaults(device="cuda")
    options.add_argument("--model", choices=list(SIZES), default="tiny")
    options.add_argument("--backend", choices=["fake", "nccl"], default="fake")
    options.add_argument("--world-size", type=int, help="default: 8 of the fake group, 1 of NCCL")
    args = options.parse_args()
    if args.world_size is None:
        args.world_size = 8 if args.backend == "fake" else 1
    name = f"captured_step_{args.model}_{args.backend}"
    if args.backend == "nccl" and args.world_size > 1:
        times = Times.of_slowest(run_ranks(measured, args.world_size, args, kind="nccl", timeout_seconds=600))
        name += f"_{args.world_size}"
    else:
        torch.cuda.set_device(DEVICE)
        start_group(args.backend, args.world_size, DEVICE)
        times = measured(args)
        dist.destroy_process_group()
    write(
        "captured_step",
        args,
        args.out,
        name,
        step_ms=times.summary(),
        figures={f"{OURS} / {name}": times.ratio(OURS, name) for name in ("plain", BY_HAND, PLAIN_BY_HAND)},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
