"""What a rank has of a tensor, whatever way the tensor is sharded: a *part*, a block of it and where the block lies.

So what was saved on some ranks in some sharding is loaded on any others in any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor

from shardwise.torch_internals import Spec, local_of, spec_of

__all__ = ["Offsets", "Part", "dtype_name", "part_of"]

Offsets = dict[Spec, tuple[int, ...]]
"""Of this rank's shard, by the way a tensor is sharded: asking torch takes longer than all else about a part."""


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

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()]


def part_of(tensor: torch.Tensor, known: Offsets | None = None) -> Part:
    """What this rank has of a tensor: all of a plain one, its shard of a DTensor. Shares its memory.

    ``known`` remembers where shards begin; it is for this rank alone.
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Part(tensor.detach(), (0,) * len(shape), shape)
    known = {} if known is None else known
    spec = spec_of(tensor)
    offsets = known.get(spec)
    if offsets is None:
        (chunk,) = tensor.__create_chunk_list__()
        offsets = known[spec] = tuple(chunk.offsets)
    return Part(local_of(tensor).detach(), offsets, shape)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
