"""Memory of a unit: one buffer of shards that stays, and elastic buffers that come and go.

Shards live in one flat buffer for as long as the model. Each sharded parameter is an alias of its part of it, made
through dlpack: a plain view would carry its offset into the buffer, and then saving or copying one parameter takes
the whole buffer along.

An elastic buffer's tensors are persistent objects over memory that is not: its storage is grown before use and shrunk
to nothing after. Autograd's saved tensors, hooks and compiled code keep pointing at the same tensors throughout.
Each of its tensors has a version counter of its own (they are not views of one another), so filling one through an
alias does not look to autograd like a change of the parameter.
"""

from __future__ import annotations

import sys
from math import prod

import torch
from torch.utils.dlpack import from_dlpack

from shardwise.errors import ConfigError
from shardwise.plan.layout import Layout
from shardwise.torch_internals import storage_use_count, tensor_over


def allocate_shards(
    layout: Layout, device: torch.device, dtypes: list[torch.dtype], rank: int, pins: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A rank's buffer of shards, zeroed so that padding is zero, and each parameter's part as a tensor of its own."""
    try:
        buffer = torch.zeros(layout.stored_bytes, dtype=torch.uint8, device=device, pin_memory=pins)
    except RuntimeError as error:
        if not pins:
            raise
        raise ConfigError(
            f"{layout.stored_bytes} bytes of page-locked host memory could not be had: {error}",
            where="CPUOffloadPolicy(pin_memory=True)",
            fix="raise the limit of locked memory (ulimit -l), or pass CPUOffloadPolicy(pin_memory=False)",
        ) from error
    parts = []
    for index, dtype in enumerate(dtypes):
        shape = layout.own_shape(index, rank)
        part = alias(buffer, layout.own_start_bytes(index, rank), prod(shape), dtype)
        parts.append(part.view(shape))
    return buffer, parts


def alias(buffer: torch.Tensor, start_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Part of a byte buffer as a tensor that owns exactly that part, as far as torch can see."""
    part = buffer[start_bytes : start_bytes + numel * dtype.itemsize]
    if buffer.device.type == "meta":
        return torch.empty(numel, dtype=dtype, device="meta")
    return from_dlpack(part).view(dtype)


class ElasticBuffer:
    """A buffer whose tensors persist while its memory comes and goes."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self._size_bytes = size_bytes
        self._storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        self.is_grown = False

    def tensor(
        self,
        dtype: torch.dtype,
        start_bytes: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """A tensor over this memory, present or not; ``strides`` default to contiguous ones."""
        strides = contiguous_strides(shape) if strides is None else strides
        return tensor_over(self._storage, dtype, start_bytes // dtype.itemsize, shape, strides)

    def note_own_uses(self, tensors: list[torch.Tensor]) -> None:
        """Remembers who has this memory now; ``tensors`` are those handed out that somebody might keep.

        An owner in C++ (a parameter whose gradient it is, a graph that saved it) counts among a tensor's references.
        """
        self._watched = tensors
        self._own_refs = list(map(sys.getrefcount, tensors))
        self._own_uses = storage_use_count(self._storage)

    def is_own(self) -> bool:
        """Whether nobody has a tensor of this memory, or a view of one, that had none when uses were noted."""
        return (
            storage_use_count(self._storage) == self._own_uses
            and list(map(sys.getrefcount, self._watched)) == self._own_refs
        )

    def takes_along(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` stands in memory that goes when the buffer shrinks."""
        try:
            return 0 <= tensor.data_ptr() - self._storage.data_ptr() < self._size_bytes
        except RuntimeError:
            # A sparse tensor, say: it has no memory in one piece.
            return False

    @property
    def device(self) -> torch.device:
        return self._storage.device

    def grow(self) -> None:
        if not self.is_grown:
            self._storage.resize_(self._size_bytes)
            self.is_grown = True

    def shrink(self) -> None:
        if self.is_grown:
            self._storage.resize_(0)
            self.is_grown = False


class RelocatableBuffer(ElasticBuffer):
    """An elastic buffer that can stand in memory of somebody else's instead."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        super().__init__(size_bytes, device)
        self.size_bytes = size_bytes
        self._made: list[tuple[torch.Tensor, int]] = []
        self._is_away = False

    def tensor(
        self,
        dtype: torch.dtype,
        start_bytes: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        made = super().tensor(dtype, start_bytes, shape, strides)
        self._made.append((made, start_bytes))
        return made

    def grow_in(self, lent: torch.Tensor | None) -> None:
        """Grows in these bytes, whose owner takes care of them; None: in memory of its own."""
        if lent is not None:
            self.shrink()
            self.is_grown = self._is_away = True
            self._stand_in(lent.untyped_storage(), int(lent.storage_offset()))
        elif self._is_away:
            self.is_grown = self._is_away = False
            self.grow()
            self._stand_in(self._storage, 0)
        else:
            self.grow()

    def _stand_in(self, storage: torch.UntypedStorage, base_bytes: int) -> None:
        for made, start_bytes in self._made:
            offset = (base_bytes + start_bytes) // made.itemsize
            made.set_(storage, offset, made.shape, made.stride())


class PermanentBuffer(ElasticBuffer):
    """Tensors over memory that is there all the time."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._storage = buffer.untyped_storage()
        self.is_grown = True

    def takes_along(self, tensor: torch.Tensor) -> bool:
        return False

    def shrink(self) -> None:
        pass


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return tuple(strides)
