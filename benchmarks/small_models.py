"""Times the set-up and the steps of a very small wrapped model over gloo, beside torch's FSDP1.

    PYTHONPATH=. python benchmarks/small_models.py                # 2 ranks
    PYTHONPATH=. python benchmarks/small_models.py --ranks 4

Programs such as tests make many models of a few hundred elements, and take a few steps with each: what a model costs is
then what its wrappers cost. *Set-up* is making the wrappers and the optimizer, and the first step, to which torch
leaves much of the work. Contenders take turns after a barrier, and a time is that of the slowest rank. All train from
the same weights on the same inputs, so their losses must be close.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from measuring import Contender, Times, expect, nothing, parser, take_turns, write
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchPolicy

import shardwise
from shardwise.testing import run_ranks

WAYS = {
    "FSDP1": (TorchFSDP, TorchPolicy),
    "shardwise": (shardwise.FullyShardedDataParallel, shardwise.ModuleWrapPolicy),
}
STEPS = 5


class Trained:
    """One contender's current model; ``set_up`` replaces it."""

    def __init__(self, way: str, orig: bool) -> None:
        self._fsdp, self._policy = WAYS[way]
        self._orig = orig
        self._x = torch.ones(4, 16)
        self.losses: list[float] = []
        self.set_up()

    def set_up(self) -> None:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(4)]
        policy: Any = self._policy({nn.Sequential})
        self._model = self._fsdp(
            nn.Sequential(*blocks, nn.Linear(16, 4)),
            auto_wrap_policy=policy,
            use_orig_params=self._orig,
            device_id=torch.device("cpu"),
        )
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self.losses = []
        self._step()

    def _step(self) -> None:
        loss = self._model(self._x).square().mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.item())

    def steps(self) -> None:
        for _ in range(STEPS):
            self._step()

    def check(self) -> None:
        expect(self.losses[-1] <= self.losses[0], "the model does not learn")


def measure(orig: bool, rounds: int, iterations: int, warmup: int) -> tuple[Times, dict[str, list[float]]]:
    """Runs all contenders on one rank and returns what it measured."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    trained = {way: Trained(way, orig) for way in WAYS}
    contenders = [
        Contender(f"{way}, {what}", getattr(each, method), before=dist.barrier, after=each.check)
        for way, each in trained.items()
        for what, method in (("set-up", "set_up"), ("steps", "steps"))
    ]
    times = take_turns(contenders, nothing, rounds, iterations, warmup)
    for each in trained.values():
        each.set_up()
        each.steps()
    return times, {way: each.losses for way, each in trained.items()}


def main() -> int:
    options = parser(__doc__, rounds=8, iterations=3, warmup=2)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--orig", action="store_true", help="with use_orig_params=True")
    args = options.parse_args()
    by_rank = run_ranks(
        measure, args.ranks, args.orig, args.rounds, args.iterations, args.warmup, kind="gloo"
    )
    for _, losses in by_rank:
        for one, other in zip(*losses.values(), strict=True):
            expect(abs(one - other) <= 1e-5, f"losses differ: {losses}")
    times = Times.of_slowest([of_rank for of_rank, _ in by_rank])
    figures = {
        f"{what}: shardwise / FSDP1, {clock}": times.ratio(f"shardwise, {what}", f"FSDP1, {what}", clock)
        for what in ("set-up", "steps")
        for clock in ("wall", "cpu")
    }
    name = f"small_models_{args.ranks}{'_orig' if args.orig else ''}"
    write("small_models", args, args.out, name, step_ms=times.summary(), figures=figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
