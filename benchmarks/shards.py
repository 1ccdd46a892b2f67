"""Builds one rank's shards with gradients, by each library and plain, for benchmarks of what runs after backward.

The process group is a fake one; the plain tensors have the same elements as shardwise's shards.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
from measuring import Times, parser, write
from models import SIZES, build, start_group, tokens_for
from torch import Tensor, nn

LIBRARIES = ("FSDP2", "shardwise")


def parse(doc: str | None, *, iterations: int) -> argparse.Namespace:
    options = parser(doc, rounds=9, iterations=iterations)
    options.add_argument("--model", choices=list(SIZES), default="tiny")
    options.add_argument("--world-size", type=int, default=8)
    warnings.simplefilter("ignore")
    return options.parse_args()


def make(args: argparse.Namespace) -> tuple[dict[str, nn.Module], list[Tensor]]:
    """Returns a model of each library, and the plain tensors, all with the same gradients."""
    device, size = torch.device(args.device), SIZES[args.model]
    start_group("fake", args.world_size, device)
    models = {name: build(name, size, device, args.world_size) for name in LIBRARIES}
    for model in models.values():
        model(*tokens_for(size, device)).backward()
        _fill_gradients(model)
    plain: list[Tensor] = []
    for param in models["shardwise"].parameters():
        plain.append(param.detach().to_local().clone())  # type: ignore[attr-defined]
        plain[-1].grad = param.grad.to_local().clone()  # type: ignore[union-attr]
    return models, plain


def _fill_gradients(model: nn.Module) -> None:
    """Fills the gradients in place: a fake group leaves them uninitialized."""
    for number, param in enumerate(model.parameters()):
        local = param.grad.to_local()  # type: ignore[union-attr]
        local.normal_(generator=torch.Generator(local.device).manual_seed(number))


def report(name: str, args: argparse.Namespace, times: Times, **more: Any) -> None:
    write(
        name,
        args,
        args.out,
        f"{name}_{args.device}",
        step_ms=times.summary(),
        figures={f"{library} / plain": times.ratio(library, "plain") for library in reversed(LIBRARIES)},
        **more,
    )
