"""A whole training step as one CUDA graph: plain eager, FSDP2 captured by hand, and `shardwise.capture`, in one run.

    PYTHONPATH=. python benchmarks/captured_step.py --model tiny      # or 1b
    PYTHONPATH=. python benchmarks/captured_step.py --backend nccl    # one NCCL rank instead of the fake group of 8

A step is forward, backward, clipping and AdamW (fused, capturable, its learning rate a tensor). The contenders take
turns, round by round. Before any timing, shardwise's captured steps are compared with its own steps as they run
eagerly, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from host_overhead import Block, expect, machine, summary
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise

RESULTS = Path(__file__).parent / "results"


class Size(NamedTuple):
    blocks: int
    width: int
    hidden: int
    heads: int
    vocab: int
    tokens: int


SIZES = {
    "tiny": Size(24, 256, 704, 4, 1000, 256),
    "1b": Size(16, 2048, 5632, 16, 32000, 8192),
}


class Language(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocab, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.hidden, size.heads) for _ in range(size.blocks))
        self.norm = nn.RMSNorm(size.width)
        self.out = nn.Linear(size.width, size.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


def make(kind: str, size: Size, world_size: int) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Language(size)
    if kind == "plain":
        return model.bfloat16()
    mesh = init_device_mesh("cuda", (world_size,))
    shard = fsdp.fully_shard if kind == "FSDP2" else shardwise.fully_shard
    policy = fsdp.MixedPrecisionPolicy if kind == "FSDP2" else shardwise.MixedPrecisionPolicy
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy(torch.bfloat16, torch.float32)}
    for block in model.blocks:
        shard(block, **options)
    return shard(model, **options)


def training_step(kind: str, model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    rate = torch.tensor(1e-3, device="cuda")
    options = {"lr": rate, "fused": True, "capturable": True}
    if kind == "shardwise":
        optimizer = shardwise.optim.flat(model, torch.optim.AdamW, **options)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **options)
    clip = shardwise.clip_grad_norm_ if kind == "shardwise" else nn.utils.clip_grad_norm_

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        logits = model(tokens)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def captured_by_hand(step: Callable[..., Tensor], *inputs: Tensor) -> Callable[..., Tensor]:
    """What torch's documentation asks of users."""
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
        for own, tensor in zip(static, given, strict=True):
            own.copy_(tensor)
        graph.replay()
        return output.clone()

    return replay


def check_parity(size: Size, world_size: int, inputs: list[tuple[Tensor, Tensor]]) -> None:
    """Six captured steps are the six steps as they run eagerly, bit by bit."""
    losses = []
    for captures in (False, True):
        model = make("shardwise", size, world_size)
        step: Any = training_step("shardwise", model)
        if captures:
            step = shardwise.capture(step, *inputs[0])
        losses.append([step(*inputs[number % len(inputs)]) for number in range(6)])
        expect(not captures or step.is_captured, f"not captured: {getattr(step, 'reason', None)}")
        del model, step
    expect(all(map(torch.equal, *losses)), f"captured {losses[1]}, eager {losses[0]}")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    size = SIZES[args.model]
    inputs = [
        (
            torch.randint(size.vocab, (1, size.tokens), device="cuda"),
            torch.randint(size.vocab, (1, size.tokens), device="cuda"),
        )
        for _ in range(2)
    ]
    if args.model == "tiny":
        check_parity(size, args.world_size, inputs)
    steps: dict[str, Callable[..., Tensor]] = {"plain": training_step("plain", make("plain", size, 1))}
    notes: dict[str, str] = {}
    try:
        peer = training_step("FSDP2", make("FSDP2", size, args.world_size))
        steps["FSDP2, by hand"] = captured_by_hand(peer, *inputs[0])
    except Exception as error:  # noqa: BLE001 - the peer's own affair; the others are still measured
        notes["FSDP2, by hand"] = f"{type(error).__name__}: {str(error)[:300]}"
    ours = training_step("shardwise", make("shardwise", size, args.world_size))
    captured = shardwise.capture(ours, *inputs[0])
    for _ in range(4):
        captured(*inputs[0])
    expect(captured.is_captured, f"not captured: {captured.reason}")
    steps["shardwise.capture"] = captured

    times: dict[str, list[float]] = {name: [] for name in steps}
    for name in steps:
        for _ in range(args.warmup):
            steps[name](*inputs[0])
    for index in range(args.rounds):
        names = list(steps)
        for name in names[index % len(names) :] + names[: index % len(names)]:
            for number in range(args.iterations):
                torch.cuda.synchronize()
                start = time.perf_counter()
                steps[name](*inputs[number % 2])
                torch.cuda.synchronize()
                times[name].append(1000 * (time.perf_counter() - start))
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    result = {
        "benchmark": "captured_step",
        "settings": {key: value for key, value in vars(args).items() if key != "output"},
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine("cuda"),
        "step_ms": {name: summary(taken) for name, taken in times.items()},
        "captured_over_plain": medians["shardwise.capture"] / medians["plain"],
        "notes": notes,
    }
    if "FSDP2, by hand" in medians:
        result["captured_over_fsdp2_by_hand"] = medians["shardwise.capture"] / medians["FSDP2, by hand"]
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(SIZES), default="tiny")
    parser.add_argument("--backend", choices=["fake", "nccl"], default="fake")
    parser.add_argument("--world-size", type=int, default=8, help="of the fake group")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--iterations", type=int, default=5, help="timed steps a contender and round")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.backend == "fake":
        dist.init_process_group("fake", rank=0, world_size=args.world_size, store=FakeStore())
    else:
        args.world_size = 1
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29511")
        dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    args.output = args.output or RESULTS / f"captured_step_{args.model}_{args.backend}.json"
    result = measure(args)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    for name, taken in result["step_ms"].items():
        low, high = taken["quartiles"]
        print(f"{name:>18}: {taken['median']:8.2f} ms a step   (quartiles {low:.2f} to {high:.2f})")
    for name, note in result["notes"].items():
        print(f"{name:>18}: {note}")
    print({key: round(value, 3) for key, value in result.items() if key.startswith("captured_over")})
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
