"""Trains the model of the recipe `tiny` with Muon and a Shampoo, sharded and in one process: are the bits the same?

    PYTHONPATH=. python benchmarks/whole_training.py                               # 300 steps, 4 ranks as threads

Matrices of the layers are stepped whole (`optim.whole`), the rest by AdamW. The one process, the first rank's, computes
every rank's batch in turn and averages the gradients in rank order. Losses are compared in every step, parameters in
every fiftieth and at the end, bit for bit.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from measuring import expect, parser, write
from models import fill
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Muon, Optimizer

from shardwise import fully_shard
from shardwise.optim import mixed
from shardwise.testing import run_ranks
from shardwise.train.recipes import load_recipe

SOURCE = load_recipe("tiny").model
BATCH = 3


class Shampoo(Optimizer):
    """Preconditions both sides of a matrix, with roots that are computed again every 50 steps."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                gradient, state = param.grad, self.state[param]
                if not state:
                    state["count"] = 0
                    state["sides"] = [1e-6 * torch.eye(size) for size in param.shape]
                state["sides"][0].add_(gradient @ gradient.T)
                state["sides"][1].add_(gradient.T @ gradient)
                if state["count"] % 50 == 0:
                    state["roots"] = [inverse_fourth_root(side) for side in state["sides"]]
                state["count"] += 1
                update = state["roots"][0] @ gradient @ state["roots"][1]
                param.sub_(update * (param.norm() / (update.norm() + 1e-12)), alpha=group["lr"])


def inverse_fourth_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=1e-12) ** -0.25) @ vectors.T


OPTIMIZERS = {"Muon": (Muon, {"lr": 0.01}), "Shampoo": (Shampoo, {"lr": 0.02})}


def build() -> nn.Module:
    model = SOURCE.build()
    fill(model)
    return model


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """Sequences that count, by a stride of their own, modulo the vocabulary."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(SOURCE.vocabulary, (BATCH, 1), generator=generator)
    strides = torch.randint(1, 8, (BATCH, 1), generator=generator)
    tokens = (starts + strides * torch.arange(SOURCE.context + 1)) % SOURCE.vocabulary
    logits = SOURCE.logits(model(tokens[:, :-1]))
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def split(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """The matrices of the layers, and the rest: embedding and head by name, and all vectors."""
    named = dict(model.named_parameters())
    is_matrix = {name: param.dim() == 2 and "layers." in name for name, param in named.items()}
    return (
        [param for name, param in named.items() if is_matrix[name]],
        [param for name, param in named.items() if not is_matrix[name]],
    )


def train(kind: str, steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer_class, options = OPTIMIZERS[kind]
    model, plain = build(), build() if rank == 0 else None
    fully_shard(model, wrap=SOURCE.units(model))
    matrices, rest = split(model)
    ours = mixed({optimizer_class: [{"params": matrices, **options}], AdamW: [{"params": rest, "lr": 4e-3}]})
    theirs: list[Optimizer] = []
    if plain is not None:
        own_matrices, own_rest = split(plain)
        theirs = [optimizer_class(own_matrices, **options), AdamW(own_rest, lr=4e-3)]
    losses = []
    for step in range(steps):
        loss = loss_of(model, step, rank)
        loss.backward()
        ours.step()
        ours.zero_grad()
        losses.append(loss.item())
        if plain is not None:
            expected = step_plain(plain, theirs, step, world)
            expect(torch.equal(loss.detach(), expected), f"{kind}: another loss in step {step}")
        if step % 50 == 49 or step == steps - 1:
            for number, param in enumerate(model.parameters()):
                value = param.detach().full_tensor()
                if plain is not None:
                    same = torch.equal(value, list(plain.parameters())[number].detach())
                    expect(same, f"{kind}: parameter {number} is another after step {step}")
    return {"losses": losses, "matrices": len(matrices)}


def step_plain(plain: nn.Module, optimizers: list[Optimizer], step: int, world: int) -> Tensor:
    """Steps with the average of all ranks' gradients; returns the loss of the first rank."""
    params = list(plain.parameters())
    losses, totals = [], []
    for rank in range(world):
        losses.append(loss_of(plain, step, rank))
        gradients = torch.autograd.grad(losses[-1], params)
        totals = [a + b for a, b in zip(totals, gradients, strict=True)] if totals else list(gradients)
    for param, total in zip(params, totals, strict=True):
        param.grad = total / world
    for optimizer in optimizers:
        optimizer.step()
    return losses[0].detach()


def main() -> int:
    options = parser(__doc__, rounds=1, iterations=1, warmup=0)
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--kinds", nargs="*", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
    args = options.parse_args()
    figures = {}
    for kind in args.kinds:
        trained = run_ranks(train, args.ranks, kind, args.steps, timeout_seconds=3000)[0]
        losses = trained["losses"]
        figures[f"{kind}: loss at the end, the same bits as in one process"] = {
            "value": losses[-1],
            "every_fiftieth": losses[::50],
            "matrices": trained["matrices"],
        }
    name = "_".join(
        ["whole_training_tiny", str(args.ranks), *(args.kinds if len(args.kinds) == 1 else [])]
    ).lower()
    write("whole_training", args, args.out, name, step_ms={}, figures=figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
