"""Optimizer state as every rank saves its own part of it, through ``torch.distributed.checkpoint``.

    local     on the owner, by stepped tensor: what the local optimizer works with
    sharded   the same memory, under keys that mean the same on every rank and in every world size

State that has an element for each element of its piece is saved as a span of the parameter's, end to end; anything
else (a step count) as it is. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardwise.errors import CheckpointError
from shardwise.plan.ownership import Piece
from shardwise.zero.consolidated import is_per_element
from shardwise.zero.partition import Partition, in_memory_order

__all__ = [
    "StateSpan",
    "check_memory_orders",
    "memory_orders",
    "sharded_entries",
    "state_of_sharded",
    "templates",
]

State = dict[str, Any]


class StateSpan(Tensor):
    """Elements of a larger flat tensor, which distributed checkpoints save and load as just that."""

    start = 0
    # What is computed from a span is a plain tensor, and has no larger one behind it.
    total_numel = -1

    @classmethod
    def of(cls, elements: Tensor, start: int, total_numel: int) -> StateSpan:
        span = elements.detach().as_subclass(cls)
        span.start, span.total_numel = start, total_numel
        return span

    @property
    def elements(self) -> Tensor:
        return self.as_subclass(Tensor)

    def size(self, dim: Any = None) -> Any:
        """The size of the larger tensor: what a checkpoint compares with what it holds."""
        whole = torch.Size([self.total_numel]) if self.total_numel >= 0 else self.elements.size()
        return whole if dim is None else whole[dim]

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(
            offsets=torch.Size([self.start]), sizes=torch.Size([self.elements.numel()])
        )

    def __create_write_items__(self, fqn: str, _span: object) -> list[WriteItem]:
        chunk = self._chunk()
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self.elements),
                    size=torch.Size([self.total_numel]),
                ),
            )
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()]

    def __get_tensor_shard__(self, _index: MetadataIndex) -> Tensor:
        return self.elements


def sharded_entries(partition: Partition, local: Mapping[Tensor, State]) -> dict[str, Any]:
    """This rank's state under keys that mean the same on every rank; no copies, no communication."""
    entries: dict[str, Any] = {}
    for piece in partition.owned:
        shape = partition.params[piece.param].shape if partition.is_whole(piece) else (piece.numel,)
        for name, value in local.get(partition.stepped(piece), {}).items():
            if is_per_element(value, shape):
                value = _span_of(value, piece, partition)
            entries[_key(piece.param, name)] = value
    return entries


def _span_of(value: Tensor, piece: Piece, partition: Partition) -> StateSpan:
    param = partition.params[piece.param]
    if partition.is_whole(piece) and value.stride() != param.stride():
        value = torch.empty_like(param, dtype=value.dtype).copy_(value)
    return StateSpan.of(in_memory_order(value), piece.start, param.numel())


def memory_orders(params: Sequence[Tensor]) -> list[list[int]]:
    """The order in which each parameter's dims lie in memory: that of its spans."""
    return [
        sorted(
            (dim for dim in range(param.dim()) if param.size(dim) > 1), key=lambda dim: -param.stride()[dim]
        )
        for param in params
    ]


def check_memory_orders(saved: Sequence[list[int]], params: Sequence[Tensor]) -> None:
    """Raises if a checkpoint's spans are of parameters that lay otherwise in memory; touches nothing."""
    for index, (theirs, ours) in enumerate(zip(saved, memory_orders(params), strict=True)):
        if theirs != ours:
            raise CheckpointError(
                f"parameter {index} lies in memory with its dims in order {ours}, and in the checkpoint {theirs}",
                where="ZeroRedundancyOptimizer.load_sharded_state_dict()",
                fix="give the model the memory format it was saved in, such as torch.channels_last",
            )


def templates(partition: Partition, metadata: Metadata, prefix: str, *, element_wise: bool) -> dict[str, Any]:
    """Room for what a checkpoint holds of this rank's pieces, under the keys of ``sharded_entries``."""
    names: dict[int, list[str]] = {}
    for key in metadata.state_dict_metadata:
        if key.startswith(f"{prefix}state."):
            number, name = key.removeprefix(f"{prefix}state.").split(".", 1)
            names.setdefault(int(number), []).append(name)
    beyond = [index for index in names if index >= len(partition.params)]
    if beyond:
        raise CheckpointError(
            f"the checkpoint has state of parameter {beyond[0]}, this optimizer has {len(partition.params)} parameters",
            where="ZeroRedundancyOptimizer.sharded_state_dict(like=…)",
            fix="load a checkpoint of the same model with the same parameter groups",
        )
    entries: dict[str, Any] = {}
    for piece in partition.owned:
        for name in names.get(piece.param, ()):
            key = _key(piece.param, name)
            saved = metadata.state_dict_metadata[prefix + key]
            if isinstance(saved, TensorStorageMetadata):
                entries[key] = _template(saved, piece, partition, element_wise=element_wise)
            else:
                entries[key] = None
    return entries


def _template(
    saved: TensorStorageMetadata, piece: Piece, partition: Partition, *, element_wise: bool
) -> Tensor:
    param = partition.params[piece.param]
    dtype = saved.properties.dtype
    if saved.size == (param.numel(),):
        room = torch.empty(piece.numel, dtype=dtype, device=param.device)
        return StateSpan.of(room, piece.start, param.numel())
    if element_wise and len(saved.size) > 0:
        raise CheckpointError(
            f"the checkpoint has state of {saved.size.numel()} elements for parameter {piece.param}, which has "
            f"{param.numel()}",
            where=f"ZeroRedundancyOptimizer.sharded_state_dict(like=…), rank {partition.rank}",
            fix="load a checkpoint of the same model with the same parameter groups",
        )
    return torch.empty(saved.size, dtype=dtype)


def state_of_sharded(partition: Partition, entries: Mapping[str, Any]) -> dict[Piece, State]:
    """This rank's pieces' state from entries that were loaded."""
    by_param: dict[int, State] = {}
    for key, value in entries.items():
        if key.startswith("state."):
            _, index, name = key.split(".", 2)
            by_param.setdefault(int(index), {})[name] = value
    return {
        piece: {name: _unspanned(value, piece, partition) for name, value in values.items()}
        for piece in partition.owned
        if (values := by_param.get(piece.param))
    }


def _unspanned(value: Any, piece: Piece, partition: Partition) -> Any:
    if not isinstance(value, StateSpan):
        return value
    if not partition.is_whole(piece):
        return value.elements
    param = partition.params[piece.param]
    return value.elements.as_strided(param.size(), param.stride())


def _key(index: int, name: str) -> str:
    return f"state.{index}.{name}"
