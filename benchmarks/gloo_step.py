"""A real training step over gloo: DDP, torch FSDP2 and shardwise, in one launch; and what they put on the wire.

    PYTHONPATH=. python benchmarks/gloo_step.py             # 4 ranks, 6 blocks of width 512

Forward, backward and AdamW on processes of one machine. Contenders take turns, step by step, behind a barrier; a step
is as long as its slowest rank takes. FSDP2 and shardwise start from the same weights and meet the same tokens: their
losses must stay close, the first equal. After each step every parameter must show its shard again.

Bytes are what the loopback interface counted while one contender made a few steps, the least of several rounds: other
programs use that interface too. Ranks of one host may also read each other's memory: what shardwise read so is added,
byte for byte. A unit's parameters are gathered twice and its gradients reduced once, and each of these moves
(ranks - 1) / ranks of the bytes in and out of every rank; the figure is per rank.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from measuring import Contender, Times, Timing, expect, loopback_bytes, nothing, parser, time_once, write
from models import WAYS, Language, Size, fill, shard_blocks
from torch.nn.parallel import DistributedDataParallel

import shardwise
from shardwise.comm.tagged import TaggedWire
from shardwise.comm.watch import WATCH
from shardwise.testing import run_ranks

NAMES = ["DDP", "FSDP2", "shardwise"]


def make(name: str, size: Size) -> tuple[Contender, list[float]]:
    model: Any = Language(size)
    fill(model)
    if name == "DDP":
        model = DistributedDataParallel(model)
    else:
        shard_blocks(model, WAYS[name].fully_shard)
    if name == "shardwise":
        optimizer = shardwise.optim.flat(model, torch.optim.AdamW, lr=1e-4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens, targets = (torch.randint(size.vocab, (1, size.tokens), generator=generator) for _ in range(2))
    losses: list[float] = []

    def step() -> None:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    def check() -> None:
        if name != "DDP":
            sharded = all(hasattr(param, "to_local") for param in model.parameters())
            expect(sharded, f"{name}: a parameter is not sharded after the step")

    return Contender(name, step, before=dist.barrier, after=check), losses


def bytes_read() -> int:
    """What this rank has read of other ranks' memory."""
    return sum(wire.bytes_read for wire in WATCH.wires() if isinstance(wire, TaggedWire))


def measure(size: Size, rounds: int, iterations: int, warmup: int, threads: int) -> dict[str, Any]:
    """One rank's part."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    contenders, losses = {}, {}
    for name in NAMES:
        contenders[name], losses[name] = make(name, size)
        for _ in range(warmup):
            time_once(contenders[name], nothing)
    times: dict[str, list[list[Timing]]] = {name: [] for name in NAMES}
    wire: dict[str, list[float]] = {name: [] for name in NAMES}
    read: dict[str, list[float]] = {name: [] for name in NAMES}
    for index in range(rounds):
        turn = index % len(NAMES)
        for name in NAMES[turn:] + NAMES[:turn]:
            times[name].append([time_once(contenders[name], nothing) for _ in range(iterations)])
            dist.barrier()
            before, read_before = loopback_bytes(), bytes_read()
            for _ in range(2):
                contenders[name].step()
            dist.barrier()
            wire[name].append((loopback_bytes() - before) / 2)
            read[name].append((bytes_read() - read_before) / 2)
    return {
        "times": times,
        "wire": {name: min(seen) for name, seen in wire.items()},
        "read": {name: max(seen) for name, seen in read.items()},
        "losses": losses,
    }


def of_slowest(by_rank: list[dict[str, Any]]) -> Times:
    """A step takes as long as its slowest rank; its CPU time is that of all ranks."""
    rounds = {
        name: [
            [
                Timing(max(each.wall for each in step), sum(each.cpu for each in step))
                for step in zip(*of_round, strict=True)
            ]
            for of_round in zip(*(rank["times"][name] for rank in by_rank), strict=True)
        ]
        for name in NAMES
    }
    return Times(rounds)


def main() -> int:
    options = parser(__doc__, rounds=5, iterations=4, warmup=2)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--blocks", type=int, default=6)
    options.add_argument("--width", type=int, default=512)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--threads", type=int, default=1, help="threads a rank computes with")
    args = options.parse_args()
    size = Size(args.blocks, args.width, args.width * 11 // 4, 8, 1000, args.tokens)
    by_rank = run_ranks(
        measure,
        args.ranks,
        size,
        args.rounds,
        args.iterations,
        args.warmup,
        args.threads,
        kind="gloo",
        timeout_seconds=500,
    )
    for one, other in ((rank["losses"]["FSDP2"], rank["losses"]["shardwise"]) for rank in by_rank):
        expect(abs(one[0] - other[0]) <= 1e-5 * abs(one[0]), f"first losses: {one[0]} and {other[0]}")
        expect(abs(one[-1] - other[-1]) <= 0.02 * abs(one[-1]), f"last losses: {one[-1]} and {other[-1]}")
        expect(other[-1] < other[0], "the model does not learn")
    times = of_slowest(by_rank)
    numel = sum(param.numel() for param in Language(size).parameters())
    # What each rank received, beside what it would have to hold unsharded.
    sent = {name: min(rank["wire"][name] for rank in by_rank) / args.ranks for name in NAMES}
    read = {name: sum(rank["read"][name] for rank in by_rank) / args.ranks for name in NAMES}
    moved = {name: sent[name] + read[name] for name in NAMES}
    write(
        "gloo_step",
        args,
        args.out,
        "gloo_step",
        step_ms=times.summary(),
        figures={
            "shardwise / FSDP2": times.ratio("shardwise", "FSDP2"),
            "shardwise / FSDP2, CPU time": times.ratio("shardwise", "FSDP2", "cpu"),
            "shardwise / DDP": times.ratio("shardwise", "DDP"),
            **{
                f"{name}: bytes a step / parameter bytes": {"value": num_bytes / (4 * numel)}
                for name, num_bytes in moved.items()
            },
        },
        loopback_bytes_a_rank=sent,
        bytes_read_a_rank=read,
        parameter_bytes=4 * numel,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
