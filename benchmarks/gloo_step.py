"""Times a real training step over gloo: DDP, torch FSDP2, DeepSpeed and shardwise in one launch; and counts bytes.

    PYTHONPATH=. python benchmarks/gloo_step.py             # 4 ranks, 6 blocks of width 512

Forward, backward and AdamW on processes of one machine. Contenders take turns, step by step, after a barrier; the time
of a step is that of its slowest rank. All start from the same weights and train on the same tokens: their losses must
stay close, and the first be equal. After each step every parameter must be sharded again.

DeepSpeed takes part if it can be imported; the results then go to a separate file. It runs twice: with its default
settings, under which a model of this size stays unsharded from forward to backward, and with settings under which it is
resharded in between, as by the others.

Bytes are what the loopback interface counted during a few steps of one contender: the minimum of several rounds, since
other programs use that interface too. Ranks of one host may also read each other's memory: the bytes that shardwise
read this way are added. A unit's parameters are gathered twice and its gradients reduced once, and each of these moves
(ranks - 1) / ranks of the bytes in and out of every rank; the figure is per rank.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from measuring import Contender, Times, Timing, expect, loopback_bytes, nothing, parser, time_once, write
from models import WAYS, Language, Size, fill, shard_blocks
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import shardwise
from shardwise.comm.channels.gloo import GlooChannel
from shardwise.comm.watchdog.thread import WATCHDOG
from shardwise.testing import run_ranks

RESHARDING = "DeepSpeed ZeRO-3, resharding"
DEEPSPEED = ["DeepSpeed ZeRO-3", RESHARDING] if find_spec("deepspeed") else []
NAMES = ["DDP", "FSDP2", "shardwise", *DEEPSPEED]
TORCH_LINEAR = functional.linear

Train = Callable[[Tensor, Tensor], Tensor]  # takes a step on tokens and targets, and returns its loss


def with_torch(name: str, model: Any) -> Train:
    if name == "DDP":
        model = DistributedDataParallel(model)
    else:
        shard_blocks(model, WAYS[name].fully_shard)
    if name == "shardwise":
        optimizer = shardwise.optim.flat(model, torch.optim.AdamW, lr=1e-4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def train(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train


def with_deepspeed(name: str, model: Any) -> Train:
    # DeepSpeed's launcher would set the first; without the second, DeepSpeed uses a GPU if there is one.
    os.environ.update(LOCAL_RANK=str(dist.get_rank()), DS_ACCELERATOR="cpu")
    import deepspeed

    zero: dict[str, Any] = {"stage": 3}
    if name == RESHARDING:
        # Nothing is kept for reuse, and at most one block is gathered ahead of the one that computes.
        block_numel = sum(param.numel() for param in model.blocks[0].parameters())
        zero.update(stage3_max_reuse_distance=0, stage3_max_live_parameters=2 * block_numel)
    engine, *_ = deepspeed.initialize(
        model=model,
        # The optimizer of the other contenders, stepped over flat shards. DeepSpeed's own is another one, and compiled.
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        config={
            "train_micro_batch_size_per_gpu": 1,  # required: there is no default
            "gradient_clipping": 0.0,  # the default clips to a norm of 1, which no other contender does
            "zero_optimization": zero,
        },
    )
    # DeepSpeed has replaced torch's linear for the whole process: restore it, except during DeepSpeed's steps.
    its_linear, functional.linear = functional.linear, TORCH_LINEAR

    def train(tokens: Tensor, targets: Tensor) -> Tensor:
        functional.linear = its_linear
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()  # frees the gradients, too
        functional.linear = TORCH_LINEAR
        return loss

    return train


def is_sharded(param: Any) -> bool:
    if hasattr(param, "ds_status"):
        # DeepSpeed does not shard parameters below a size threshold, here the norms' weights.
        return param.ds_persist or param.ds_status.name == "NOT_AVAILABLE"
    return hasattr(param, "to_local")


def make(name: str, size: Size) -> tuple[Contender, list[float]]:
    model: Any = Language(size)
    fill(model)
    train = (with_deepspeed if name in DEEPSPEED else with_torch)(name, model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens, targets = (torch.randint(size.vocab, (1, size.tokens), generator=generator) for _ in range(2))
    losses: list[float] = []

    def step() -> None:
        losses.append(train(tokens, targets).item())

    def check() -> None:
        expect(functional.linear is TORCH_LINEAR, f"{name}: the next contender does not get torch's linear")
        if name != "DDP":
            sharded = all(is_sharded(param) for param in model.parameters())
            expect(sharded, f"{name}: a parameter is not sharded after the step")

    return Contender(name, step, before=dist.barrier, after=check), losses


def bytes_read() -> int:
    """Returns the bytes that this rank has read from other ranks' memory."""
    return sum(wire.bytes_read for wire in WATCHDOG.channels() if isinstance(wire, GlooChannel))


def measure(size: Size, rounds: int, iterations: int, warmup: int, threads: int) -> dict[str, Any]:
    """Runs all contenders on one rank and returns what it measured."""
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
    """Combines the times of ranks: a step's time is that of its slowest rank, its CPU time that of all ranks."""
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
        timeout_seconds=200 * len(NAMES),
    )
    for losses in (rank["losses"] for rank in by_rank):
        one = losses["FSDP2"]
        for name, other in losses.items():
            firsts, lasts = f"{one[0]} and {other[0]}", f"{one[-1]} and {other[-1]}"
            expect(abs(one[0] - other[0]) <= 1e-5 * abs(one[0]), f"first losses, FSDP2 and {name}: {firsts}")
            expect(abs(one[-1] - other[-1]) <= 1e-3 * abs(one[-1]), f"last losses, FSDP2 and {name}: {lasts}")
            expect(other[-1] < other[0], f"{name}: the model does not learn")
    times = of_slowest(by_rank)
    numel = sum(param.numel() for param in Language(size).parameters())
    # The bytes that each rank received, to compare with the size of the unsharded model.
    sent = {name: min(rank["wire"][name] for rank in by_rank) / args.ranks for name in NAMES}
    read = {name: sum(rank["read"][name] for rank in by_rank) / args.ranks for name in NAMES}
    moved = {name: sent[name] + read[name] for name in NAMES}
    write(
        "gloo_step",
        args,
        args.out,
        "gloo_step_deepspeed" if DEEPSPEED else "gloo_step",
        step_ms=times.summary(),
        figures={
            **{
                f"shardwise / {name}{what}": times.ratio("shardwise", name, clock)
                for name in NAMES
                if name != "shardwise"
                for clock, what in (("wall", ""), ("cpu", ", CPU time"))
            },
            **{
                f"{name}: bytes a step / parameter bytes": {"value": num_bytes / (4 * numel)}
                for name, num_bytes in moved.items()
            },
        },
        contenders={
            "DDP": f"torch {torch.__version__}",
            "FSDP2": f"torch {torch.__version__}",
            "shardwise": "this repository's",
            **{name: f"deepspeed {version('deepspeed')}" for name in DEEPSPEED},
        },
        loopback_bytes_a_rank=sent,
        bytes_read_a_rank=read,
        parameter_bytes=4 * numel,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
