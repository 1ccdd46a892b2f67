"""Memory for the gradients of shards, laid out once and lent out in every backward.

A unit's reduced row is its gradient buffer: each shard's gradient is a DTensor over its part of it, made once. A
backward lends them out; the last one is made anew each time and carries a *lease*, which ends with it. ``zero_grad``
drops gradients in that order, so when the lease ends nobody has any of them any more, and the memory goes.

Where somebody does (a gradient, its local tensor, a view, a slice, a graph that saved one), that memory stays as it is,
and the unit lays out new memory and gradients for itself.
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
from shardwise.torch_internals import dtensor, have_local_tensors, local_of, spec_of

LEASE_ATTRIBUTE = "_shardwise_lease"


@dataclass(frozen=True, slots=True)
class GradientView:
    """Where the gradient of a sharded parameter lies in its run of the own row.

    ``slot`` shows that parameter; ``members`` are the numbers of the full gradients it is made of. ``is_run``: the run
    is this gradient and nothing else. ``is_none``: this rank has no element of the parameter, and its gradient is None.
    """

    slot: Slot
    run: int
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    members: tuple[int, ...]
    is_run: bool = False
    is_none: bool = False


# Which of a reduce's gradients came; None if all did, as is usual.
Presence = tuple[bool, ...] | None


def presence(gradients: list[torch.Tensor | None]) -> Presence:
    for gradient in gradients:
        if gradient is None:
            return tuple(gradient is not None for gradient in gradients)
    return None


class Lease:
    """Ends with the gradient that carries it; copies and saved files of that one carry an empty one."""

    def __init__(self, buffer: GradientBuffer | None = None) -> None:
        # Weak: Python's garbage collector does not see that a parameter holds its gradient, and through a buffer that
        # leads back to the parameter it would hold the whole model.
        self._buffer = weakref.ref(buffer) if buffer is not None else None

    def __del__(self) -> None:
        # ``is_finalizing``: at the end of the process there is nothing left to free.
        buffer = self._buffer() if self._buffer is not None and not sys.is_finalizing() else None
        if buffer is not None:
            buffer.take_back()

    def __deepcopy__(self, memo: dict[int, object]) -> Lease:
        return Lease()

    def __reduce__(self) -> tuple[type[OrderedDict[str, object]], tuple[()]]:
        # What is saved must load without shardwise, and with torch.load(weights_only=True).
        return (OrderedDict, ())


class GradientBuffer:
    """The gradient memory of one set of slots."""

    def __init__(
        self, parts: Sequence[GradientView], row_numel: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._memory = ElasticBuffer(row_numel * dtype.itemsize, device)
        self.grow = self._memory.grow
        self.row = self._memory.tensor(dtype, 0, (row_numel,))
        self._locals = {
            part.slot: self._memory.tensor(dtype, part.start * dtype.itemsize, part.shape, part.strides)
            for part in parts
        }
        self.locals = list(self._locals.values())
        self.gradients = {slot: slot.gradient(local) for slot, local in self._locals.items()}
        self._memory.note_own_uses([*self.locals, *self.gradients.values()])
        # Whether there is nothing but gradients in it, no padding.
        self.is_full = row_numel == sum(local.numel() for local in self.locals)
        self.is_lent = False

    def is_own(self) -> bool:
        """Whether nobody but the unit has memory of it, or a gradient, and gradients are as they were made."""
        # Memory that went was the unit's own.
        return not self._memory.is_grown or (
            self._memory.is_own() and have_local_tensors(self.gradients.values(), self.locals)
        )

    @property
    def is_all_lent(self) -> bool:
        """Whether each parameter's gradient now is the one that lies here."""
        if not self.is_lent:
            return False
        for slot, local in self._locals.items():
            gradient = slot.sharded.grad
            if not isinstance(gradient, DTensor) or local_of(gradient) is not local:
                return False
        return True

    def lend(self, parts: list[GradientView]) -> None:
        """Gives parameters their gradients, and the memory with them until the last of these is dropped."""
        gradients = self.gradients
        for part in parts[:-1]:
            slot = part.slot
            slot.sharded.grad = gradients[slot]
        last = parts[-1].slot
        last.sharded.grad = gradient = last.gradient(self._locals[last])
        gradient.__dict__[LEASE_ATTRIBUTE] = Lease(self)
        self.is_lent = True

    def take_back(self) -> None:
        self.is_lent = False
        if self.is_own():
            self._memory.shrink()


def make_traceable(params: Iterable[torch.Tensor]) -> None:
    """Gives parameters gradients that torch.compile can take in, over the same memory.

    It expects a DTensor to have the storage offset of its local tensor, with which torch cannot copy or save one.
    """
    for param in params:
        gradient = param.grad
        if isinstance(gradient, DTensor) and local_of(gradient).storage_offset():
            made = dtensor(local_of(gradient), spec_of(gradient))
            made.__dict__.update(gradient.__dict__)
            param.grad = made


def gradient_version(gradient: torch.Tensor) -> int:
    """Rises when somebody writes to a gradient."""
    # In-place operations on a DTensor raise its own version, writes to its local tensor that one's.
    return gradient._version + (local_of(gradient)._version if isinstance(gradient, DTensor) else 0)
