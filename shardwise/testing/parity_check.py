"""Checks, for a user's own model, that sharded training computes what unsharded training computes.

    report = check_parity(model, batch, shard=lambda model: fully_shard(model, wrap=Block))
    assert report, report

Every rank trains two copies for a few steps: a sharded one, and a plain one whose gradients are averaged over ranks in
rank order. Without a process group, the check starts two ranks as threads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.comm.exchange import all_gather_bytes
from shardwise.composable.fully_shard import fully_shard
from shardwise.engine.gather.full_tensors import full_tensor_of
from shardwise.errors import ConfigError
from shardwise.testing.ranks import run_ranks

__all__ = ["ParityReport", "check_parity"]


@dataclass(frozen=True)
class ParityReport:
    """The result of the comparison; true if the two copies are the same.

    ``difference`` names the step and what differs first: the loss, a gradient or a parameter.
    """

    num_steps: int
    num_parameters: int
    difference: str | None = None

    def __bool__(self) -> bool:
        return self.difference is None

    def __str__(self) -> str:
        summary = f"{self.num_parameters} parameters over {self.num_steps} steps"
        return f"{summary}: the same" if self.difference is None else f"{summary}: {self.difference}"


def check_parity(
    model: nn.Module,
    batch: Any,
    *,
    shard: Callable[[nn.Module], object] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    steps: int = 3,
    tolerance: float | None = None,
) -> ParityReport:
    """Trains copies of ``model``, sharded and plain, and reports the first loss, gradient or parameter that differs.

    Args:
        model: an unsharded model; it is not changed.
        batch: this rank's input to the model: a tensor, a tuple of arguments, or a mapping of keyword arguments.
        shard: shards a copy in place; ``fully_shard`` by default.
        loss: computes a scalar from the model's output; by default the output itself if it is a scalar, its ``loss``,
            or the mean square of its first tensor.
        optimizer: builds an optimizer for the given parameters; plain SGD by default.
        steps: the number of optimizer steps.
        tolerance: the largest difference allowed, relative to the largest value of the tensor or to a hundredth of the
            model's largest value, if that is more: some gradients are nothing but rounding errors. By default 0 on a
            CPU, where sums are in rank order, and 1e-5 elsewhere.
    """
    if any(isinstance(param, DTensor) for param in model.parameters()):
        raise ConfigError(
            "the model is already sharded, so there is nothing to compare it with",
            where="check_parity(model, ...)",
            fix="pass the model as it was before fully_shard, and how to shard it as shard=",
        )
    arguments = (model, batch, shard or fully_shard, loss, optimizer or _sgd, steps, tolerance)
    if dist.is_initialized():
        return _check(*arguments)
    return run_ranks(_check, 2, *arguments)[0]


def _check(
    model: nn.Module,
    batch: Any,
    shard: Callable[[nn.Module], object],
    loss: Callable[[Any], torch.Tensor] | None,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    steps: int,
    tolerance: float | None,
) -> ParityReport:
    plain, sharded = copy.deepcopy(model), copy.deepcopy(model)
    shard(sharded)
    optims = optimizer(plain.parameters()), optimizer(sharded.parameters())
    on_cpu = all(param.device.type == "cpu" for param in plain.parameters())
    allowed = (0.0 if on_cpu else 1e-5) if tolerance is None else tolerance
    num_parameters = sum(1 for _ in plain.parameters())
    if difference := _first_on_any_rank(_first_difference(plain, sharded, 0.0, "data")):
        advice = (
            "ranks initialized their weights differently; call torch.manual_seed before building the model"
        )
        return ParityReport(0, num_parameters, f"before the first step, {difference}: {advice}")
    for step in range(steps):
        losses: list[torch.Tensor] = []
        for copy_of_model in (plain, sharded):
            # Dropout may differ between ranks, but not between the two copies of a rank.
            torch.manual_seed(1000 * step + dist.get_rank())
            value = _loss_of(_call_model(copy_of_model, batch), loss)
            value.backward()
            losses.append(value.detach())
        _average_in_rank_order(plain)
        # Every rank makes every comparison: gathering a full parameter takes all ranks.
        found = [_describe_difference("the loss", losses[0], losses[1], allowed)]
        found.append(_first_difference(plain, sharded, allowed, "grad"))
        for each in optims:
            each.step()
            each.zero_grad()
        found.append(_first_difference(plain, sharded, allowed, "data"))
        if difference := _first_on_any_rank(*found):
            return ParityReport(step + 1, num_parameters, f"at step {step}, {difference}")
    return ParityReport(steps, num_parameters)


def _first_on_any_rank(*found: str | None) -> str | None:
    """Returns the first difference that any rank found, the same on every rank, so that all ranks stop together."""
    assert dist.group.WORLD is not None
    own = next((each for each in found if each is not None), "")
    everywhere = all_gather_bytes(own.encode(), dist.group.WORLD)
    return next((each.decode() for each in everywhere if each), None)


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def _call_model(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _loss_of(output: Any, loss: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    if loss is not None:
        return loss(output)
    named = getattr(output, "loss", None)
    if isinstance(named, torch.Tensor):
        return named
    if isinstance(output, torch.Tensor):
        return output if output.dim() == 0 else output.float().square().mean()
    if isinstance(output, (tuple, list)) and isinstance(output[0], torch.Tensor):
        return _loss_of(output[0], None)
    raise ConfigError(
        f"the model returns a {type(output).__name__}, from which no loss can be computed",
        where="check_parity(model, batch)",
        fix="pass loss=, a function that computes a scalar from the model's output",
    )


def _average_in_rank_order(plain: nn.Module) -> None:
    world = dist.get_world_size()
    for param in plain.parameters():
        has_any = torch.tensor(float(param.grad is not None), device=param.device)
        dist.all_reduce(has_any)
        if not has_any:
            continue
        own = torch.zeros_like(param) if param.grad is None else param.grad.contiguous()
        terms = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(terms, own)
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        param.grad = total / world


def _first_difference(plain: nn.Module, sharded: nn.Module, allowed: float, of: str) -> str | None:
    first: str | None = None
    of_plain = [param.grad if of == "grad" else param.detach() for param in plain.parameters()]
    largest = max((_max_abs(tensor) for tensor in of_plain if tensor is not None), default=0.0)
    for want, (name, param) in zip(of_plain, sharded.named_parameters(), strict=True):
        # Every rank asks for every parameter: gathering a full tensor takes all ranks.
        have = param.grad if of == "grad" else param.detach()
        whole = full_tensor_of(have)
        if first is not None:
            continue
        what = f"the gradient of '{name}'" if of == "grad" else f"parameter '{name}'"
        if (want is None) != (whole is None):
            first = f"{what} is {'there' if whole is not None else 'missing'} in the sharded copy only"
        elif want is not None and whole is not None:
            first = _describe_difference(what, want, whole, allowed, largest / 100)
    return first


def _max_abs(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _describe_difference(
    what: str, expected: torch.Tensor, found: torch.Tensor, allowed: float, at_least: float = 0.0
) -> str | None:
    if torch.equal(expected, found):
        return None
    scale = max(_max_abs(expected), at_least, torch.finfo(torch.float32).tiny)
    error = _max_abs(expected - found) / scale
    # Written this way round so that NaN counts as a difference.
    if error <= allowed:
        return None
    return (
        f"{what} differs by {error:.2g} of its largest value on rank {dist.get_rank()} (allowed: {allowed:g})"
    )
