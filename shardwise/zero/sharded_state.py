"""Converts state between the local optimizer and the entries that ``torch.distributed.checkpoint`` saves per rank.

    local     on the owner, by stepped tensor: the local optimizer's state
    sharded   the same memory, under keys that are the same on every rank and for every world size

State with an element for each element of its piece is saved as a span of the flattened parameter; anything else, such
as a step count, as it is. Values may be lists and dicts of tensors. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardwise.engine.checkpoint_span import CheckpointSpan
from shardwise.errors import CheckpointError
from shardwise.planning.ownership import OwnedPiece
from shardwise.torch_internals import map_tree
from shardwise.zero.consolidated_state import is_per_element
from shardwise.zero.partition import Partition, in_memory_order

__all__ = [
    "CheckpointSpan",
    "check_memory_orders",
    "load_templates",
    "memory_orders",
    "saved_global_state",
    "sharded_entries",
    "state_of_own_pieces",
]

State = dict[str, Any]
Path = tuple[str | int, ...]

_GLOBAL = "loose"
_GLOBAL_KEYS = ("param_groups", "memory_orders", _GLOBAL)
# The key around a tensor that is not a span but has the size of one.
_NO_SPAN = "__no_span__"


def sharded_entries(partition: Partition, local: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns this rank's state under keys that are the same on every rank, without copies."""
    entries: dict[str, Any] = {}
    for piece in partition.owned:
        for name, value in local.get(partition.stepped_tensor(piece), {}).items():
            entries[f"state.{piece.param}.{name}"] = map_tree(
                partial(_to_checkpoint, piece, partition), value
            )
    of_no_param = {name: value for name, value in local.items() if isinstance(name, str)}
    return entries | ({_GLOBAL: of_no_param} if of_no_param else {})


def _to_checkpoint(piece: OwnedPiece, partition: Partition, value: Tensor) -> Any:
    param = partition.params[piece.param]
    shape = param.shape if partition.is_whole(piece) else (piece.numel,)
    if is_per_element(value, shape):
        return _span_of(value, piece, partition)
    return {_NO_SPAN: value} if value.shape == (param.numel(),) else value


def _span_of(value: Tensor, piece: OwnedPiece, partition: Partition) -> CheckpointSpan:
    param = partition.params[piece.param]
    if partition.is_whole(piece) and value.stride() != param.stride():
        value = torch.empty_like(param, dtype=value.dtype).copy_(value)
    return CheckpointSpan.of(in_memory_order(value), piece.start, param.numel())


def memory_orders(params: Sequence[Tensor]) -> list[list[int]]:
    """Returns the order of each parameter's dims in memory, which is the order of elements in its spans."""
    return [
        sorted(
            (dim for dim in range(param.dim()) if param.size(dim) > 1), key=lambda dim: -param.stride()[dim]
        )
        for param in params
    ]


def check_memory_orders(saved: Sequence[list[int]], params: Sequence[Tensor]) -> None:
    """Raises if a checkpoint was saved with another order of dims in memory; changes nothing."""
    for index, (theirs, ours) in enumerate(zip(saved, memory_orders(params), strict=True)):
        if theirs != ours:
            raise CheckpointError(
                f"parameter {index} has its dims in memory in the order {ours}, and in the checkpoint {theirs}",
                where="ZeroRedundancyOptimizer.load_sharded_state_dict()",
                fix="give the model the memory format it was saved with, such as torch.channels_last",
            )


def load_templates(
    partition: Partition, metadata: Metadata, prefix: str, *, element_wise: bool
) -> dict[str, Any]:
    """Returns empty entries for what a checkpoint holds of this rank's pieces and of the groups, to load into."""
    pieces = {piece.param: piece for piece in partition.owned}
    entries: dict[str, Any] = {}
    for key, saved in metadata.state_dict_metadata.items():
        if not key.startswith(prefix):
            continue
        path = _strip_prefix(prefix, _path_of(key, metadata))
        name = str(path[0])
        empty: Tensor | None = None
        if not name.startswith("state.") and name not in _GLOBAL_KEYS:
            continue
        if name.startswith("state."):
            index = int(name.split(".", 2)[1])
            _check_known(index, partition)
            if index not in pieces:
                continue
            if isinstance(saved, TensorStorageMetadata):
                is_span = path[-1] != _NO_SPAN
                empty = _template(saved, pieces[index], partition, element_wise=element_wise, is_span=is_span)
        elif isinstance(saved, TensorStorageMetadata):
            empty = torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")
        _insert(entries, path, empty)
    return entries


def _path_of(key: str, metadata: Metadata) -> Path:
    """Returns the nested keys under which a value was saved; a checkpoint's own keys are flat."""
    paths: Mapping[str, Path] = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    return paths.get(key, (key,))


def _strip_prefix(prefix: str, path: Path) -> Path:
    """Removes a prefix from a path; the prefix may be several keys of it, or part of one."""
    for number, key in enumerate(path):
        if not prefix.startswith(f"{key}."):
            return (str(key).removeprefix(prefix), *path[number + 1 :]) if prefix else path[number:]
        prefix = prefix.removeprefix(f"{key}.")
    raise AssertionError("the path ends within the prefix")


def _insert(tree: Any, path: Path, value: Any) -> None:
    """Inserts a value into nested dicts and lists, which are created as needed."""
    key: Any = path[0]
    if isinstance(tree, list):
        tree.extend([None] * (key + 1 - len(tree)))
    if len(path) == 1:
        tree[key] = value
        return
    inner = tree[key] if isinstance(tree, list) else tree.get(key)
    if inner is None:
        inner = tree[key] = [] if isinstance(path[1], int) else {}
    _insert(inner, path[1:], value)


def _check_known(index: int, partition: Partition) -> None:
    if index >= len(partition.params):
        raise CheckpointError(
            f"the checkpoint has state of parameter {index}, this optimizer has {len(partition.params)} parameters",
            where="ZeroRedundancyOptimizer.sharded_state_dict(like=…)",
            fix="load a checkpoint of the same model with the same parameter groups",
        )


def _template(
    saved: TensorStorageMetadata,
    piece: OwnedPiece,
    partition: Partition,
    *,
    element_wise: bool,
    is_span: bool,
) -> Tensor:
    param = partition.params[piece.param]
    dtype = saved.properties.dtype
    if is_span and saved.size == (param.numel(),):
        empty = torch.empty(piece.numel, dtype=dtype, device=param.device)
        return CheckpointSpan.of(empty, piece.start, param.numel())
    if element_wise and len(saved.size) > 0:
        raise CheckpointError(
            f"the checkpoint has state of {saved.size.numel()} elements for parameter {piece.param}, which has "
            f"{param.numel()}",
            where=f"ZeroRedundancyOptimizer.sharded_state_dict(like=…), rank {partition.rank}",
            fix="load a checkpoint of the same model with the same parameter groups",
        )
    return torch.empty(saved.size, dtype=dtype, device="cpu")


def state_of_own_pieces(partition: Partition, entries: Mapping[str, Any]) -> dict[OwnedPiece, State]:
    """Returns the state of this rank's pieces from loaded entries."""
    by_param: dict[int, State] = {}
    for key, value in entries.items():
        if key.startswith("state."):
            _, index, name = key.split(".", 2)
            by_param.setdefault(int(index), {})[name] = value
    return {
        piece: {name: _from_checkpoint(piece, partition, value) for name, value in values.items()}
        for piece in partition.owned
        if (values := by_param.get(piece.param))
    }


def saved_global_state(entries: Mapping[str, Any]) -> State:
    """Returns the state that belongs to no parameter."""
    found: State = entries.get(_GLOBAL, {})
    return found


def _from_checkpoint(piece: OwnedPiece, partition: Partition, value: Any) -> Any:
    if isinstance(value, Mapping):
        if value.keys() == {_NO_SPAN}:
            return value[_NO_SPAN]
        return {key: _from_checkpoint(piece, partition, inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_from_checkpoint(piece, partition, inner) for inner in value]
    if not isinstance(value, CheckpointSpan):
        return value
    if not partition.is_whole(piece):
        return value.elements
    param = partition.params[piece.param]
    return value.elements.as_strided(param.size(), param.stride())
