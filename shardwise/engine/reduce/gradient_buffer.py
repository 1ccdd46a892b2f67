"""Memory for the gradients of shards, laid out once and reused in every backward.

A unit's reduced row is its gradient buffer: each shard's gradient is a DTensor over a span of it, made once. A backward
assigns these to the parameters; only the last one is made anew each time, and carries a *lease* that ends when it is
deleted. ``zero_grad`` drops gradients in that order, so when the lease ends none is in use, and the memory is freed.

If something still uses one (a reference to a gradient, its local tensor, a view, a graph that saved one), that memory
is left alone, and the unit makes a new buffer with new gradients.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from shardwise.engine.buffers import ElasticBuffer
from shardwise.engine.unit.binding import Slot
from shardwise.planning.memory import SHARD_GRADIENTS
from shardwise.torch_internals import dtensor, have_local_tensors, local_of, spec_of

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


class Lease:
    """Frees the buffer when the gradient that carries it is deleted. Copies of that gradient carry an empty lease."""

    def __init__(self, buffer: GradientBuffer | None = None) -> None:
        # Weak, because the buffer refers to the parameters: Python's garbage collector does not see that a parameter
        # owns its gradient, so this cycle would keep the whole model alive.
        self._buffer = weakref.ref(buffer) if buffer is not None else None

    def __del__(self) -> None:
        # Nothing needs to be freed while the interpreter shuts down.
        buffer = self._buffer() if self._buffer is not None and not sys.is_finalizing() else None
        if buffer is not None:
            buffer.take_back()

    def __deepcopy__(self, memo: dict[int, object]) -> Lease:
        return Lease()

    def __reduce__(self) -> tuple[type[OrderedDict[str, object]], tuple[()]]:
        # Saved gradients must load without shardwise, and with torch.load(weights_only=True).
        return (OrderedDict, ())


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
