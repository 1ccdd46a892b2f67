"""A *part*: what a rank has of a tensor, as a block and its offsets in the full tensor.

It does not depend on how the tensor is sharded, so a checkpoint can be loaded with any sharding and number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor

from shardwise.torch_internals import Spec, local_of, spec_of

__all__ = ["Offsets", "Part", "dtype_name", "part_of"]

Offsets = dict[Spec, tuple[int, ...]]
"""A cache of this rank's offsets by DTensor spec, because torch takes long to compute them."""


@dataclass(frozen=True)
class Part:
    """This rank's block, at ``offsets``, of a tensor of ``shape``; DCP calls the methods."""

    tensor: torch.Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def size(self) -> torch.Size:
        return torch.Size(self.shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)]


def part_of(tensor: torch.Tensor, known: Offsets | None = None) -> Part:
    """Returns this rank's part of a tensor: a plain tensor as a whole, the local shard of a DTensor; no copy.

    ``known`` caches offsets of this rank's shards.
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
