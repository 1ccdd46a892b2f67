"""Measures the cost of checks: the same training step with checks off and on, in one launch of gloo or GPU ranks.

    PYTHONPATH=. python benchmarks/trust_cost.py                     # 2 gloo ranks
    PYTHONPATH=. python benchmarks/trust_cost.py --device cuda       # NCCL, ranks share the GPU

Contenders are plain (no communication), torch FSDP2 and shardwise twice: built with checks off, and with the default
policy. Each has its own process group and takes its turns after a barrier, and losses are compared. Two figures: the
step with checks over the step without; and the host time per unit that checks add, over the host time per unit that
FSDP2 adds to the plain model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from measuring import Contender, Times, Timing, expect, parser, time_once, wait_for, write
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import shardwise
from shardwise.testing import run_ranks

NAMES = ["plain", "FSDP2", "off", "on"]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def make(name: str, args: Any, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(args.width) for _ in range(args.units))).to(device)
    if name != "plain":
        # A separate group, because whether a group is checked is decided when it is first used.
        group = dist.new_group(list(range(dist.get_world_size())))
        assert group is not None
        mesh = DeviceMesh.from_group(group, device.type)
        before = shardwise.set_trust(checks="off" if name == "off" else "step")
        shard: Any = torch_fully_shard if name == "FSDP2" else shardwise.fully_shard
        for block in model:
            shard(block, mesh=mesh)
        shard(model, mesh=mesh)
        shardwise.set_trust(checks=before.checks)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def measured(args: Any) -> Times:
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    models = {name: make(name, args, device) for name in NAMES}
    x = torch.randn(args.batch, args.width, generator=torch.Generator().manual_seed(dist.get_rank())).to(
        device
    )
    losses: dict[str, list[float]] = {name: [] for name in NAMES}

    def step(name: str) -> None:
        model, optim = models[name]
        loss = model(x).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses[name].append(float(loss.detach()) if args.device == "cpu" else 0.0)

    contenders = [
        Contender(name, lambda name=name: step(name), before=dist.barrier)  # type: ignore[misc]
        for name in NAMES
    ]
    wait = wait_for(device)
    rounds: dict[str, list[list[Timing]]] = {name: [] for name in NAMES}
    for number in range(args.rounds + 1):
        turn = number % len(contenders)
        for contender in contenders[turn:] + contenders[:turn]:
            count = args.warmup if number == 0 else args.iterations
            timings = [time_once(contender, wait) for _ in range(count)]
            if number > 0:
                rounds[contender.name].append(timings)
    expect(losses["on"] == losses["off"], "checks changed the numbers")
    return Times(rounds)


def main() -> None:
    made = parser(__doc__, rounds=9, iterations=20)
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--units", type=int, default=16)
    made.add_argument("--width", type=int, default=128)
    made.add_argument("--batch", type=int, default=64)
    args = made.parse_args()
    kind: Any = "nccl" if args.device == "cuda" else "gloo"
    by_rank = run_ranks(measured, args.ranks, args, kind=kind, timeout_seconds=1800)
    times = Times.of_slowest(by_rank)
    added = times.median("on", "cpu") - times.median("off", "cpu")
    of_fsdp2 = times.median("FSDP2", "cpu") - times.median("plain", "cpu")
    figures = {
        "on / off": times.ratio("on", "off"),
        "host time a unit, of FSDP2's": {
            "value": added / of_fsdp2,
            "added_us_a_unit": 1000 * added / (args.units + 1),
        },
    }
    name = f"trust_cost_{args.device}"
    write("trust_cost", args, args.out, name, step_ms=times.summary(), figures=figures)


if __name__ == "__main__":
    main()
