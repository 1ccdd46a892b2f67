"""Times Muon's step of a sharded model: FSDP2 with torch.optim.Muon on DTensors, one process, and shardwise's `whole`.

    PYTHONPATH=. python benchmarks/whole_step.py                                   # 4 gloo ranks, a small model
    PYTHONPATH=. python benchmarks/whole_step.py --backend nccl --ranks 2 --device cuda --model 1b
    PYTHONPATH=. python benchmarks/whole_step.py --backend fake --ranks 8 --device cuda --model 8b --plain-blocks 8

The matrices are those of the model's blocks; the embedding, the head and the norms are left to another optimizer.
Contenders take turns, step by step, after a barrier; the time of a step is that of its slowest rank. All start from the
same values with the same gradients. In the one process, the first rank's, Muon steps all matrices, on as many threads
as one rank has, while the other ranks wait; its values are what the others must have at the end: shardwise's bit for
bit, FSDP2's within Newton-Schulz's bfloat16.

On GPUs, the *ideal* is the one process's time divided by the number of ranks (by one if they share a GPU), plus the
time of moving the bytes by one plain all-to-all each way. With the fake backend values mean nothing, and rank 0's share
of the work is timed; no bytes leave it, and the ideal's movement is one copy in memory of what it would send each way.
With ``--plain-blocks`` the one process has only so many blocks, and its time counts as often as they fit: blocks are
equal, and a whole model with its gradients and momenta may not fit on one device beside the others.
"""

from __future__ import annotations

import os
import sys
import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from measuring import Contender, Times, Timing, expect, nothing, parser, time_once, wait_for, write
from models import SIZES, WAYS, Language, Size, fill, shard_blocks, start_group
from torch import nn
from torch.optim import Muon

from shardwise.optim import whole
from shardwise.planning.matrix_owners import matrix_work
from shardwise.testing import run_ranks

OPTIONS = {"lr": 0.02, "weight_decay": 0.1}
NAMES = ["FSDP2", "shardwise", "one process", "movement"]


def matrices(model: nn.Module) -> list[Any]:
    return [param for param in model.blocks.parameters() if param.dim() == 2]


def give_gradients(params: list[Any]) -> None:
    """Gives every parameter the same gradient however it is sharded."""
    for number, param in enumerate(params):
        generator = torch.Generator(param.device).manual_seed(number)
        gradient = torch.randn(param.shape, generator=generator, device=param.device, dtype=param.dtype)
        if hasattr(param, "to_local"):
            chunk = param.__create_chunk_list__()[0] if param.to_local().numel() else None
            rows = (
                slice(0, 0) if chunk is None else slice(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])
            )
            local = gradient[rows].clone()
            param.grad = type(param).from_local(
                local, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
            )
        else:
            param.grad = gradient


def sharded(name: str, size: Size, device: torch.device) -> list[Any]:
    with torch.device(device):
        model = Language(size)
    fill(model)
    shard_blocks(model, WAYS[name].fully_shard)
    return matrices(model)


def plain(size: Size, device: torch.device) -> list[Any]:
    with torch.device(device):
        model = Language(size)
    fill(model)
    return matrices(model)


class Contest:
    """All contenders on one rank."""

    def __init__(self, size: Size, device: torch.device, skips: list[str], plain_blocks: int) -> None:
        self.params: dict[str, list[Any]] = {}
        self.optimizers: dict[str, Any] = {}
        for name in [name for name in NAMES if name not in skips]:
            if name == "movement":
                continue
            if name == "one process":
                self.params[name] = plain(size._replace(blocks=plain_blocks), device)
            else:
                self.params[name] = sharded(name, size, device)
            give_gradients(self.params[name])
            maker = whole if name == "shardwise" else None
            params = self.params[name]
            self.optimizers[name] = maker(Muon, params, **OPTIONS) if maker else Muon(params, **OPTIONS)
        self.numel = sum(param.numel() for param in self.params["shardwise"])
        world = dist.get_world_size()
        self._row = torch.zeros(-(-self.numel // world**2) * world, device=device)
        self._moves = "movement" not in skips

    def contenders(self) -> list[Contender]:
        made = [Contender(name, partial(self._step, name), before=dist.barrier) for name in self.optimizers]
        return [*made, Contender("movement", self._move, before=dist.barrier)] if self._moves else made

    def _step(self, name: str) -> None:
        if name != "one process" or dist.get_rank() == 0:
            self.optimizers[name].step()

    def _move(self) -> None:
        for _ in range(2):
            arrived = torch.empty_like(self._row)
            if "fake" in dist.get_backend():
                arrived.copy_(self._row)
            else:
                dist.all_to_all_single(arrived, self._row)

    def check(self) -> None:
        plain = self.params.get("one process")
        for param in plain or ():
            dist.broadcast(param.detach(), 0)
        for name in ("shardwise", "FSDP2") if plain is not None else ():
            for one, other in zip(plain, self.params[name], strict=False):
                value = other.detach().full_tensor()
                if name == "shardwise":
                    expect(torch.equal(one.detach(), value), "shardwise has left the unsharded optimizer")
                else:
                    near = (one.detach() - value).norm() <= 0.1 * one.detach().norm()
                    expect(bool(near), f"{name} has left the unsharded optimizer")


def measure(
    size: Size,
    device_type: str,
    rounds: int,
    iterations: int,
    warmup: int,
    threads: int,
    skips: list[str],
    plain_blocks: int,
) -> dict[str, Any]:
    """Runs all contenders on one rank and returns what it measured."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    device = (
        torch.device(device_type, torch.cuda.current_device())
        if device_type == "cuda"
        else torch.device("cpu")
    )
    contest = Contest(size, device, skips, plain_blocks)
    contenders = contest.contenders()
    wait = wait_for(device) if device_type == "cuda" else nothing
    for contender in contenders:
        for _ in range(warmup):
            time_once(contender, wait)
    ours = contest.optimizers["shardwise"]
    before = ours.moves.bytes_sent
    times: dict[str, list[list[Timing]]] = {contender.name: [] for contender in contenders}
    for index in range(rounds):
        turn = index % len(contenders)
        for contender in contenders[turn:] + contenders[:turn]:
            times[contender.name].append([time_once(contender, wait) for _ in range(iterations)])
    if "fake" not in dist.get_backend():
        contest.check()
    work = [0] * dist.get_world_size()
    for param, owner in zip(ours.param_groups[0]["params"], ours.owners, strict=True):
        work[owner] += matrix_work(tuple(param.shape))
    state = sum(value.numel() for values in ours.state.values() for value in values.values())
    return {
        "times": times,
        "bytes": (ours.moves.bytes_sent - before) / (rounds * iterations),
        "imbalance": max(work) * len(work) / sum(work),
        "own work": work[dist.get_rank()] * len(work) / sum(work),
        "state": state,
        "numel": contest.numel,
    }


def on_fake(size: Size, args: Any) -> list[dict[str, Any]]:
    start_group("fake", args.ranks, torch.device(args.device))
    return [measure(size, args.device, *settings(args))]


def settings(args: Any) -> tuple[Any, ...]:
    return args.rounds, args.iterations, args.warmup, args.threads, args.skip, args.plain_blocks


def ratios(times: Times, args: Any, plain_times: float) -> dict[str, dict[str, Any]]:
    """The time of shardwise's step over the others'; that of the one process counts ``plain_times``."""
    figures = {
        f"shardwise / {name}{what}": times.ratio("shardwise", name, clock)
        for name in ("FSDP2", "one process")
        for clock, what in (("wall", ""), ("cpu", ", CPU time of the slowest rank"))
        if name in times.rounds
    }
    if "one process" not in times.rounds:
        return figures
    for name, figure in figures.items():
        if "one process" in name:
            figure["value"] /= plain_times
            figure["of_minima"] /= plain_times
            figure["by_round"] = [value / plain_times for value in figure["by_round"]]
    if args.backend != "gloo" and "movement" in times.rounds:
        share = plain_times * times.median("one process") / (args.ranks if args.backend == "fake" else 1)
        ideal = share + times.median("movement")
        figures["shardwise / ideal"] = {"value": times.median("shardwise") / ideal, "compute_ms": share}
    return figures


def main() -> int:
    options = parser(__doc__, rounds=5, iterations=2, warmup=2)
    options.add_argument("--backend", choices=["gloo", "nccl", "fake"], default="gloo")
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--model", choices=["small", *SIZES], default="small")
    options.add_argument("--threads", type=int, default=1, help="threads a rank computes with")
    options.add_argument(
        "--skip", nargs="*", default=[], help="contenders to leave out, such as 'one process'"
    )
    options.add_argument("--plain-blocks", type=int, help="blocks that the one process steps; default: all")
    args = options.parse_args()
    size = Size(6, 256, 704, 8, 1000, 64) if args.model == "small" else SIZES[args.model]
    args.plain_blocks = args.plain_blocks or size.blocks
    if args.backend == "fake":
        by_rank = on_fake(size, args)
    else:
        device_type = "cuda" if args.backend == "nccl" else "cpu"
        by_rank = run_ranks(
            measure,
            args.ranks,
            size,
            device_type,
            *settings(args),
            kind=args.backend,
            timeout_seconds=1500,
        )
    times = Times.of_slowest([Times(rank["times"]) for rank in by_rank])
    numel = by_rank[0]["numel"]
    figures = ratios(times, args, size.blocks / args.plain_blocks)
    figures["imbalance of work"] = {"value": by_rank[0]["imbalance"]}
    figures["work of the first rank / an even share"] = {"value": by_rank[0]["own work"]}
    if args.backend != "fake":
        total = sum(rank["bytes"] for rank in by_rank)
        figures["bytes a step / parameter bytes"] = {"value": total / (4 * numel)}
        state = max(rank["state"] for rank in by_rank)
        figures["largest state of a rank / an even share"] = {"value": state * args.ranks / numel}
    write(
        "whole_step",
        args,
        args.out,
        f"whole_step_{args.model}_{args.backend}_{args.ranks}",
        step_ms=times.summary(),
        figures=figures,
        matrix_elements=numel,
        cores=os.cpu_count(),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
