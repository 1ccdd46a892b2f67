"""What a ZeRO optimizer takes in: parameters it can share out, and only if all ranks bring the same ones."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from shardwise.comm.coalesced import all_gather_bytes
from shardwise.errors import ConfigError, ConfigTypeError, RankDisagreement, StateError
from shardwise.zero.partition import is_dense

__all__ = [
    "check_parameters",
    "check_ranks_agree",
    "group_or_world",
    "list_parameters",
    "needs_closure",
]


def group_or_world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        if not dist.is_initialized():
            raise StateError(
                "there is no process group to share the parameters over",
                where="ZeroRedundancyOptimizer()",
                fix="call torch.distributed.init_process_group() first, or pass process_group=",
            )
        group = dist.group.WORLD
    assert group is not None
    return group


def list_parameters(params: Any) -> list[Any]:
    """The argument as a list of tensors, of named ones, or of group dicts, whichever iterable it came as."""
    where = "ZeroRedundancyOptimizer(params=…)"
    fix = "pass tensors, such as model.parameters() or model.named_parameters(), or dicts with a 'params' key"
    if isinstance(params, Tensor):
        raise ConfigTypeError("params is a single tensor", where=where, fix=fix)
    try:
        listed = list(params)
    except TypeError:
        raise ConfigTypeError(f"params is a {type(params).__name__}", where=where, fix=fix) from None
    if not listed:
        raise ConfigError("params is empty", where=where, fix="pass at least one parameter")
    kinds = {_kind(item) for item in listed}
    if kinds not in ({"dict"}, {"Tensor"}, {"named Tensor"}):
        raise ConfigTypeError(f"params holds items of types {', '.join(sorted(kinds))}", where=where, fix=fix)
    for number, item in enumerate(listed):
        if isinstance(item, dict) and "params" not in item:
            raise ConfigError(
                f"group {number} has no 'params' key, only {sorted(item)}",
                where=where,
                fix="add its parameters",
            )
    return listed


def _kind(item: Any) -> str:
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Tensor):
        return "named Tensor"
    for known in (dict, Tensor):
        if isinstance(item, known):
            return known.__name__
    return type(item).__name__


def check_parameters(params: Sequence[Tensor], *, first: int = 0) -> None:
    """Raises unless every parameter is there once, and dense in memory."""
    places: dict[Tensor, int] = {}
    for index, param in enumerate(params, first):
        where = f"ZeroRedundancyOptimizer(), parameter {index}"
        if places.setdefault(param, index) != index:
            raise ConfigError(
                f"a parameter of shape {tuple(param.shape)} comes twice, as {places[param]} and {index}: it would have "
                "two owners",
                where=where,
                fix="pass each parameter once; a shared one is listed once by model.parameters()",
            )
        if param.layout is not torch.strided:
            raise ConfigError(
                f"a parameter of shape {tuple(param.shape)} is sparse ({param.layout})",
                where=where,
                fix="make it dense with .to_dense(), or leave it to another optimizer",
            )
        if not is_dense(param):
            raise ConfigError(
                f"a parameter of shape {tuple(param.shape)} has gaps in memory (strides {param.stride()})",
                where=where,
                fix="make it dense: param.data = param.data.contiguous()",
            )


def needs_closure(optimizer_class: type[Optimizer]) -> bool:
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def check_ranks_agree(
    groups: Sequence[Sequence[Tensor]], options: str, process_group: dist.ProcessGroup, *, first: int = 0
) -> None:
    """Raises on every rank, with the first difference, unless all ranks bring the same parameters and options."""
    lines = [options]
    index = first
    for number, group in enumerate(groups):
        lines.append(f"group {number} of {len(group)} parameters")
        for param in group:
            lines.append(_description(index, param))
            index += 1
    text = "\n".join(lines).encode()
    if len(set(all_gather_bytes(hashlib.sha256(text).digest(), process_group))) == 1:
        return
    # All ranks have seen the same digests, so all of them come here.
    by_rank = [gathered.decode().split("\n") for gathered in all_gather_bytes(text, process_group)]
    rank, other, mine, theirs = _first_difference(by_rank)
    raise RankDisagreement(
        f"ranks bring different parameters: rank {rank} has {mine}; rank {other} has {theirs}",
        where=f"ZeroRedundancyOptimizer, found on every rank; this is rank {process_group.rank()}",
        fix="build the same model and the same parameter groups, in the same order, on every rank",
    )


def _description(index: int, param: Tensor) -> str:
    trainable = "" if param.requires_grad else ", frozen"
    layout = f"strides {param.stride()}" if param.layout is torch.strided else "sparse"
    return (
        f"parameter {index}: {str(param.dtype).removeprefix('torch.')} {tuple(param.shape)} "
        f"{layout} on {param.device.type}{trainable}"
    )


def _first_difference(by_rank: Sequence[Sequence[str]]) -> tuple[int, int, str, str]:
    """Rank 0, the first rank that differs from it, and what each of them has there."""
    other, lines = next((rank, lines) for rank, lines in enumerate(by_rank) if lines != by_rank[0])
    for ours, theirs in zip_longest(by_rank[0], lines, fillvalue="nothing more"):
        if ours != theirs:
            return 0, other, ours, theirs
    raise AssertionError("lists that differ have a first difference")
