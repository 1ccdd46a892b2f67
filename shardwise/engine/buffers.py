"""Memory of a unit: a permanent buffer of shards, elastic buffers of each gather and reduce, and gradients' buffers.

Shards live in one flat buffer for as long as the model. Each sharded parameter aliases a span of it through dlpack: a
plain view would share the buffer's storage, and saving or copying one parameter would save or copy the whole buffer.

An elastic buffer's tensors persist while its storage is resized: grown before use, shrunk to zero after. Autograd's
saved tensors, hooks and compiled code keep referring to the same tensor objects. Its tensors are not views of one
another, so each has its own version counter, and filling one through another does not count as a change to autograd.

The gradients of shards lie in such a buffer, too, laid out once and reused in every backward: a unit's reduced row is
its gradient buffer, and each shard's gradient is a DTensor over a span of it, made once. A backward assigns these to
the parameters; only the last one is made anew each time, and carries a *lease* that ends when it is deleted.
``zero_grad`` drops gradients in that order, so when the lease ends none is in use, and the memory is freed. If
something still uses one (a reference to a gradient, its local tensor, a view, a graph that saved one), that memory is
left alone, and the unit makes a new buffer with new gradients.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.distributed.tensor import DTensor
from torch.utils.dlpack import from_dlpack

from shardwise.comm.dry_run import current_dry_run, is_dry
from shardwise.engine.unit.binding import Attachment, Slot
from shardwise.errors import ConfigError
from shardwise.planning.layout import Layout
from shardwise.planning.memory import SHARD_GRADIENTS
from shardwise.torch_internals import (
    dtensor,
    have_local_tensors,
    local_of,
    spec_of,
    storage_use_count,
    tensor_over,
)


def allocate_shards(
    layout: Layout, device: torch.device, dtypes: list[torch.dtype], rank: int, pins: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Allocates a rank's row of shards, zeroed so that padding is zero; returns it, and each shard as a tensor."""
    try:
        buffer = torch.zeros(layout.stored_bytes, dtype=torch.uint8, device=device, pin_memory=pins)
    except RuntimeError as error:
        if not pins:
            raise
        raise ConfigError(
            f"cannot allocate {layout.stored_bytes} bytes of page-locked host memory: {error}",
            where="CPUOffloadPolicy(pin_memory=True)",
            fix="raise the limit on locked memory (ulimit -l), or pass CPUOffloadPolicy(pin_memory=False)",
        ) from error
    shards = []
    for index, dtype in enumerate(dtypes):
        shape = layout.shard_shape(index, rank)
        shard = alias(buffer, layout.shard_start_bytes(index, rank), prod(shape), dtype)
        shards.append(shard.view(shape))
    return buffer, shards


def alias(buffer: torch.Tensor, start_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A span of a byte buffer as a tensor whose storage is exactly that span."""
    span = buffer[start_bytes : start_bytes + numel * dtype.itemsize]
    if buffer.device.type == "meta":
        return torch.empty(numel, dtype=dtype, device="meta")
    return from_dlpack(span).view(dtype)


class ElasticBuffer:
    """A buffer whose tensors persist while its memory is allocated and freed."""

    def __init__(self, size_bytes: int, device: torch.device, holds: str = "") -> None:
        self.size_bytes = size_bytes
        # What the memory is for, in the words of ``planning/memory``.
        self._holds = holds
        self._storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        self._is_dry = is_dry(device)
        self.is_grown = False

    def tensor(
        self,
        dtype: torch.dtype,
        start_bytes: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """Makes a tensor over this memory, allocated or not; by default contiguous."""
        strides = contiguous_strides(shape) if strides is None else strides
        return tensor_over(self._storage, dtype, start_bytes // dtype.itemsize, shape, strides)

    def note_own_uses(self, tensors: list[torch.Tensor]) -> None:
        """Records the current references to this memory; ``tensors`` are those that users may get and keep.

        References from C++ (a parameter whose gradient it is, a graph that saved it) count as well.
        """
        self._watched = tensors
        self._own_refs = list(map(sys.getrefcount, tensors))
        self._own_uses = storage_use_count(self._storage)

    def is_own(self) -> bool:
        """Whether nothing refers to this memory, or to a tensor of it, beyond what ``note_own_uses`` recorded."""
        return (
            storage_use_count(self._storage) == self._own_uses
            and list(map(sys.getrefcount, self._watched)) == self._own_refs
        )

    def frees(self, tensor: torch.Tensor) -> bool:
        """Whether shrinking this buffer frees the memory of ``tensor``."""
        if tensor.is_meta:
            return bool(tensor.untyped_storage()._cdata == self._storage._cdata)
        try:
            return 0 <= tensor.data_ptr() - self._storage.data_ptr() < self.size_bytes
        except RuntimeError:
            # A tensor without one storage, such as a sparse tensor.
            return False

    @property
    def device(self) -> torch.device:
        return self._storage.device

    def grow(self) -> None:
        if not self.is_grown:
            self._storage.resize_(self.size_bytes)
            self.is_grown = True
            if self._is_dry:
                current_dry_run().resized(self._storage, self.size_bytes, self._holds)

    def shrink(self) -> None:
        if self.is_grown:
            self._storage.resize_(0)
            self.is_grown = False
            if self._is_dry:
                current_dry_run().resized(self._storage, 0, self._holds)


class RelocatableBuffer(ElasticBuffer):
    """An elastic buffer whose tensors can also be placed in borrowed memory."""

    def __init__(self, size_bytes: int, device: torch.device, holds: str = "") -> None:
        super().__init__(size_bytes, device, holds)
        self._tensors: list[tuple[torch.Tensor, int]] = []
        # The storage that the tensors are in, and where it begins there.
        self._place = (self._storage._cdata, 0)
        self._is_borrowed = False

    def tensor(
        self,
        dtype: torch.dtype,
        start_bytes: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        tensor = super().tensor(dtype, start_bytes, shape, strides)
        self._tensors.append((tensor, start_bytes))
        return tensor

    def grow_in(self, lent: torch.Tensor | None) -> None:
        """Places the buffer in these bytes, which their owner keeps alive; None: in memory of its own."""
        if lent is not None:
            self.shrink()
            self.is_grown = self._is_borrowed = True
            self._place_in(lent.untyped_storage(), int(lent.storage_offset()))
            return
        if self._is_borrowed:
            self.shrink()
        self.grow()
        self._place_in(self._storage, 0)

    def shrink(self) -> None:
        if self._is_borrowed:
            self.is_grown = self._is_borrowed = False
        else:
            super().shrink()

    def _place_in(self, storage: torch.UntypedStorage, base_bytes: int) -> None:
        # A storage that the tensors are in lives: no other one can have its address.
        place = (storage._cdata, base_bytes)
        if place == self._place:
            return
        self._place = place
        for tensor, start_bytes in self._tensors:
            offset = (base_bytes + start_bytes) // tensor.itemsize
            tensor.set_(storage, offset, tensor.shape, tensor.stride())


class PermanentBuffer(ElasticBuffer):
    """A buffer whose memory is always allocated."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._storage = buffer.untyped_storage()
        self.size_bytes = 0
        self.is_grown = True

    def frees(self, tensor: torch.Tensor) -> bool:
        return False

    def shrink(self) -> None:
        pass


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return tuple(strides)


# --- gradients --------------------------------------------------------------------------------------------------------

LEASE_ATTRIBUTE = "_shardwise_lease"


@dataclass(frozen=True, slots=True)
class GradientView:
    """Where the gradient of a sharded parameter lies in its segment of the own row.

    ``members`` are the indices of the full gradients it is made of. ``is_segment``: the gradient is the whole segment.
    ``is_none``: this rank has no element of the parameter, and its gradient is None.
    """

    slot: Slot
    segment: int
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    members: tuple[int, ...]
    is_segment: bool = False
    is_none: bool = False


# Which of a reduce's gradients are present; None if all are, as usual.
Presence = tuple[bool, ...] | None


def presence(gradients: list[torch.Tensor | None]) -> Presence:
    for gradient in gradients:
        if gradient is None:
            return tuple(gradient is not None for gradient in gradients)
    return None


class Lease(Attachment):
    """Frees the buffer when the gradient that carries it is deleted."""

    def __init__(self, buffer: GradientBuffer | None = None) -> None:
        # Weak, because the buffer refers to the parameters: Python's garbage collector does not see that a parameter
        # owns its gradient, so this cycle would keep the whole model alive.
        self._buffer = weakref.ref(buffer) if buffer is not None else None

    def __del__(self) -> None:
        # Nothing needs to be freed while the interpreter shuts down.
        buffer = self._buffer() if self._buffer is not None and not sys.is_finalizing() else None
        if buffer is not None:
            buffer.take_back()


class GradientBuffer:
    """The gradient memory of one set of slots."""

    def __init__(
        self, views: Sequence[GradientView], row_numel: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.memory = ElasticBuffer(row_numel * dtype.itemsize, device, SHARD_GRADIENTS)
        self.row = self.memory.tensor(dtype, 0, (row_numel,))
        self._locals = {
            view.slot: self.memory.tensor(dtype, view.start * dtype.itemsize, view.shape, view.strides)
            for view in views
        }
        self.locals = list(self._locals.values())
        self.gradients = {slot: slot.gradient(local) for slot, local in self._locals.items()}
        self.memory.note_own_uses([*self.locals, *self.gradients.values()])
        # Whether the row has no padding.
        self.is_full = row_numel == sum(local.numel() for local in self.locals)
        self.is_lent = False

    def is_own(self) -> bool:
        """Whether nothing but the unit refers to the memory or the gradients, and the gradients are unchanged."""
        return not self.memory.is_grown or (
            self.memory.is_own() and have_local_tensors(self.gradients.values(), self.locals)
        )

    @property
    def is_all_lent(self) -> bool:
        """Whether the current gradient of every parameter lies in this buffer."""
        if not self.is_lent:
            return False
        for slot, local in self._locals.items():
            gradient = slot.sharded.grad
            if not isinstance(gradient, DTensor) or local_of(gradient) is not local:
                return False
        return True

    def lend(self, views: list[GradientView]) -> None:
        """Assigns the gradients to their parameters, which own the memory until the last of them is dropped."""
        gradients = self.gradients
        for view in views[:-1]:
            slot = view.slot
            slot.sharded.grad = gradients[slot]
        last = views[-1].slot
        last.sharded.grad = gradient = last.gradient(self._locals[last])
        gradient.__dict__[LEASE_ATTRIBUTE] = Lease(self)
        self.is_lent = True

    def take_back(self) -> None:
        self.is_lent = False
        if self.is_own():
            self.memory.shrink()


def make_traceable(params: Iterable[torch.Tensor]) -> None:
    """Replaces gradients by ones over the same memory that torch.compile can trace.

    torch.compile expects a DTensor to have the storage offset of its local tensor; but torch cannot copy or save such a
    DTensor, so gradients are made without one.
    """
    for param in params:
        gradient = param.grad
        if isinstance(gradient, DTensor) and local_of(gradient).storage_offset():
            made = dtensor(local_of(gradient), spec_of(gradient))
            made.__dict__.update(gradient.__dict__)
            param.grad = made


def gradient_version(gradient: torch.Tensor) -> int:
    """A version counter that every in-place write to a gradient raises."""
    # In-place operations on a DTensor raise its own version; writes to its local tensor raise the local tensor's.
    return gradient._version + (local_of(gradient)._version if isinstance(gradient, DTensor) else 0)
