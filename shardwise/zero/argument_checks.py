"""Checks the arguments of a ZeRO optimizer: its class, its parameters, and that all ranks pass the same."""

from __future__ import annotations

import hashlib
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from shardwise.comm.collectives.agreement import describe_first_difference
from shardwise.comm.exchange import all_gather_bytes
from shardwise.errors import ConfigError, ConfigTypeError, RankDisagreement, StateError
from shardwise.optim.elementwise_classes import is_elementwise
from shardwise.zero.partition import is_dense

__all__ = [
    "check_class",
    "check_parameters",
    "check_ranks_agree",
    "group_or_world",
    "list_parameters",
    "reporting_to_peers",
]


def group_or_world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        if not dist.is_initialized():
            raise StateError(
                "there is no process group to shard over",
                where="ZeroRedundancyOptimizer()",
                fix="call torch.distributed.init_process_group() first, or pass process_group=",
            )
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        is_outside = group == dist.GroupMember.NON_GROUP_MEMBER
        raise ConfigTypeError(
            "this rank is not in process_group" if is_outside else f"process_group is {group!r}",
            where=f"ZeroRedundancyOptimizer(process_group=…), rank {dist.get_rank()}",
            fix="create the optimizer on the ranks of the group only"
            if is_outside
            else "pass a torch.distributed.ProcessGroup, or None for all ranks",
        )
    return group


def list_parameters(params: Any) -> list[Any]:
    """Returns the argument, which may be any iterable, as a list of tensors, of named tensors, or of group dicts."""
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
    """Raises unless every parameter occurs once, is not sharded, and is dense in memory."""
    positions: dict[Tensor, int] = {}
    for index, param in enumerate(params, first):
        where = f"ZeroRedundancyOptimizer(), parameter {index}"
        if positions.setdefault(param, index) != index:
            raise ConfigError(
                f"a parameter of shape {tuple(param.shape)} comes twice, as {positions[param]} and {index}: it would "
                "have two owners",
                where=where,
                fix="pass each parameter once; a shared one is listed once by model.parameters()",
            )
        if isinstance(param, DTensor):
            raise ConfigError(
                f"a parameter of shape {tuple(param.shape)} is a DTensor with placements {param.placements}: it and "
                "its state are sharded already",
                where=where,
                fix="pass sharded parameters to the optimizer class itself, without ZeroRedundancyOptimizer",
            )
        if param.is_meta:
            raise ConfigError(
                f"a parameter of shape {tuple(param.shape)} is on the meta device, and will be replaced by another "
                "tensor when it gets memory",
                where=where,
                fix="create the optimizer after model.to_empty(device=…)",
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


def check_class(optimizer_class: type[Optimizer], world: int, *, balanced: bool, overlap: bool) -> None:
    """Raises unless it is an optimizer class that can be used with these options."""
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise ConfigTypeError(
            f"the optimizer class is {optimizer_class!r}, which is not a subclass of torch.optim.Optimizer",
            where="ZeroRedundancyOptimizer()",
            fix="pass the class itself, and its options by name: (params, torch.optim.AdamW, lr=1e-3)",
        )
    name = optimizer_class.__name__
    if balanced and not is_elementwise(optimizer_class):
        raise ConfigError(
            f"balanced=True splits parameters, and {name} is not known to be element-wise",
            where="ZeroRedundancyOptimizer()",
            fix=f"use balanced=False, or set {name}.elementwise = True if it updates each element by itself",
        )
    if overlap and _needs_closure(optimizer_class):
        raise ConfigError(
            f"overlap_with_ddp=True steps during backward, and {name}.step() needs a closure",
            where="ZeroRedundancyOptimizer()",
            fix="use overlap_with_ddp=False, or an optimizer that needs no closure",
        )
    if issubclass(optimizer_class, LBFGS) and world > 1:
        warnings.warn(
            f"{name} searches along directions of all parameters together, but each rank of a ZeroRedundancyOptimizer "
            "steps only its own parameters: the result differs from that of one optimizer",
            stacklevel=3,
        )


def _needs_closure(optimizer_class: type[Optimizer]) -> bool:
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


@contextmanager
def reporting_to_peers(process_group: dist.ProcessGroup) -> Iterator[None]:
    """Sends this rank's error to the other ranks, which otherwise would wait for it in ``check_ranks_agree``."""
    try:
        yield
    except Exception as error:
        first_line = str(error).splitlines()[:1] or [""]
        with suppress(RankDisagreement):
            _check_same([f"a {type(error).__name__}: {first_line[0]}"], process_group)
        raise


def check_ranks_agree(
    groups: Sequence[Mapping[str, Any]], options: str, process_group: dist.ProcessGroup, *, first: int = 0
) -> None:
    """Raises on every rank, with the first difference, unless all ranks pass the same parameters and options."""
    lines = [options]
    index = first
    for number, group in enumerate(groups):
        lines.append(f"group {number} of {len(group['params'])} parameters{_simple_options(group)}")
        names = group.get("param_names", [""] * len(group["params"]))
        for name, param in zip(names, group["params"], strict=True):
            lines.append(_description(index, name, param))
            index += 1
    _check_same(lines, process_group)
    _check_same_order([param for group in groups for param in group["params"]], process_group, first)


def _simple_options(group: Mapping[str, Any]) -> str:
    simple = (bool, int, float, str, tuple)
    return "".join(f", {name}={value}" for name, value in sorted(group.items()) if isinstance(value, simple))


def _check_same(lines: Sequence[str], process_group: dist.ProcessGroup) -> None:
    text = "\n".join(lines).encode()
    if len(set(all_gather_bytes(hashlib.sha256(text).digest(), process_group))) == 1:
        return
    # All ranks have seen the same digests, so all of them get here.
    by_rank = [gathered.decode().split("\n") for gathered in all_gather_bytes(text, process_group)]
    raise RankDisagreement(
        f"ranks pass different parameters: {describe_first_difference(by_rank, range(len(by_rank)))}",
        where=f"ZeroRedundancyOptimizer, found on every rank; this is rank {process_group.rank()}",
        fix="create the same model and the same parameter groups, in the same order, on every rank",
    )


def _check_same_order(params: Sequence[Tensor], process_group: dist.ProcessGroup, first: int) -> None:
    """Raises on every rank if ranks pass the same values in different orders.

    Parameters are identified by their position. Different values are no error: models may be synchronised later.
    """
    own = b"".join(map(_fingerprint, params))
    by_rank = all_gather_bytes(own, process_group)
    size = len(own) // max(len(params), 1)
    prints = [[each[at : at + size] for at in range(0, len(each), size or 1)] for each in by_rank]
    for rank, theirs in enumerate(prints):
        if theirs != prints[0] and sorted(theirs) == sorted(prints[0]):
            number = next(
                at for at, (one, other) in enumerate(zip(theirs, prints[0], strict=True)) if one != other
            )
            raise RankDisagreement(
                f"ranks pass their parameters in different orders: parameter {first + number} of rank 0 is parameter "
                f"{first + theirs.index(prints[0][number])} of rank {rank}",
                where=f"ZeroRedundancyOptimizer, found on every rank; this is rank {process_group.rank()}",
                fix="pass the parameters in the same order on every rank",
            )


def _fingerprint(param: Tensor) -> bytes:
    """Returns a short hash of a parameter's first values, to tell parameters of the same shape apart."""
    if param.layout is not torch.strided or param.is_meta or isinstance(param, DTensor) or not param.numel():
        return bytes(8)
    row = param.detach()
    for _ in range(param.dim() - 1):
        row = row[0]
    return hashlib.sha256(repr(row.reshape(-1)[:16].tolist()).encode()).digest()[:8]


def _description(index: int, name: str, param: Tensor) -> str:
    trainable = "" if param.requires_grad else ", frozen"
    layout = f"strides {param.stride()}" if param.layout is torch.strided else "sparse"
    quoted = f" '{name}'" if name else ""
    return (
        f"parameter {index}{quoted}: {str(param.dtype).removeprefix('torch.')} {tuple(param.shape)} "
        f"{layout} on {param.device.type}{trainable}"
    )
