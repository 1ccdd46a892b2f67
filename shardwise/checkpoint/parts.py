"""What a rank has of a tensor, whatever way the tensor is sharded: a *part*, a block of it and where the block lies.

So what was saved on some ranks in some sharding is loaded on any others in any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from shardwise.torch_internals import local_of

__all__ = ["Part", "dtype_name", "part_of"]


@dataclass(frozen=True)
class Part:
    """This rank's block of a tensor of ``shape``, at ``offsets``; DCP asks it for the methods below."""

    tensor: torch.Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def size(self) -> torch.Size:
        return torch.Size(self.shape)

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)

    def __create_write_items__(self, name: str, _part: object) -> list[WriteItem]:
        if not self.tensor.numel() and 0 not in self.shape:
            return []  # a rank without a share of a short tensor
        data = TensorWriteData(self._chunk(), TensorProperties(self.tensor.dtype), self.size())
        return [WriteItem(MetadataIndex(name, self.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()]


def part_of(tensor: torch.Tensor) -> Part:
    """What this rank has of a tensor: all of a plain one, its shard of a DTensor. Shares its memory."""
    detached = tensor.detach()
    if isinstance(detached, DTensor):
        (chunk,) = detached.__create_chunk_list__()
        return Part(local_of(detached), tuple(chunk.offsets), tuple(detached.shape))
    return Part(detached, (0,) * detached.dim(), tuple(detached.shape))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
