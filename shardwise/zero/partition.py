"""Partitions a ZeRO optimizer's parameters over the ranks: which pieces this rank steps, and as which tensors.

A piece that is a whole parameter is stepped as that parameter. A piece of a split parameter is stepped as a
*slice*: a separate tensor over the same memory, which is a parameter for the local optimizer.

    parameter   [ 0 1 2 3 4 5 6 7 8 9 ]     .grad   [ . . . . . . . . . . ]
    slice                 [ 5 6 7 8 9 ]     .grad             [ . . . . . ]     set in each step

Nothing here communicates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import StateError
from shardwise.planning.ownership import (
    BufferLayout,
    OwnedPiece,
    ParamSize,
    even_pieces,
    loads_of,
    owned_layout,
    whole_pieces,
)

__all__ = ["Partition", "SharedBuffer", "in_memory_order", "is_dense"]


@dataclass(frozen=True)
class SharedBuffer:
    """Parameters that can share one buffer: on one device, and all trainable or all frozen when they were added."""

    params: tuple[int, ...]
    layout: BufferLayout


class Partition:
    """Every parameter in the order of the groups, cut into pieces with owners."""

    def __init__(self, rank: int, world: int, *, balanced: bool) -> None:
        self.rank = rank
        self.world = world
        self.balanced = balanced
        self.params: list[Tensor] = []
        self.group_of: list[int] = []
        self.num_groups = 0
        self.pieces: list[list[OwnedPiece]] = []
        self.shared_buffers: list[SharedBuffer] = []
        self.index_of: dict[Tensor, int] = {}
        self.revision = 0
        """Incremented when parameters are added or move in memory, which makes plans for them out of date."""
        self._split_params: list[int] = []
        self._slices: dict[OwnedPiece, Tensor] = {}
        self._addresses: list[int] = []
        self._kinds: list[tuple[torch.dtype, torch.device]] = []

    # --- who owns what ---------------------------------------------------------------------------------------

    def add_groups(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Adds parameter groups; parameters added before keep their owners."""
        first = len(self.params)
        for group in groups:
            self.params.extend(group)
            self.group_of.extend([self.num_groups] * len(group))
            self.num_groups += 1
        added = range(first, len(self.params))
        self.index_of.update((self.params[index], index) for index in added)
        self.pieces.extend([] for _ in added)
        if self.balanced:
            self._assign_evenly(added)
        else:
            self._assign_whole(added)
        self._make_slices(added)
        self.detect_moves()

    def _assign_whole(self, added: Iterable[int]) -> None:
        by_group: dict[int, list[int]] = defaultdict(list)
        for index in added:
            by_group[self.group_of[index]].append(index)
        for indices in by_group.values():
            loads = loads_of([piece for pieces in self.pieces for piece in pieces], self.world)
            for piece in whole_pieces([self.params[index].numel() for index in indices], loads):
                index = indices[piece.param]
                self.pieces[index] = [piece._replace(param=index)]
        self.shared_buffers += [self._shared_buffer(indices) for indices in self._group_by_buffer(added)]

    def _assign_evenly(self, added: Iterable[int]) -> None:
        for indices in self._group_by_buffer(added):
            pieces, layout = even_pieces([self._param_size(index) for index in indices], self.world)
            for piece in pieces:
                index = indices[piece.param]
                self.pieces[index].append(piece._replace(param=index))
            self.shared_buffers.append(SharedBuffer(tuple(indices), layout))

    def _group_by_buffer(self, added: Iterable[int]) -> Iterable[list[int]]:
        """Groups parameters by device, and frozen ones separately: those have no state to balance."""
        members: dict[tuple[torch.device, bool], list[int]] = defaultdict(list)
        for index in added:
            members[self.params[index].device, self.params[index].requires_grad].append(index)
        return members.values()

    def _param_size(self, index: int) -> ParamSize:
        param = self.params[index]
        return ParamSize(param.numel(), param.element_size())

    def _shared_buffer(self, indices: Sequence[int]) -> SharedBuffer:
        """Lays parameters out in one buffer, by their owners."""
        pieces = [
            piece._replace(param=position)
            for position, index in enumerate(indices)
            for piece in self.pieces[index]
        ]
        sizes = [self._param_size(index) for index in indices]
        return SharedBuffer(tuple(indices), owned_layout(sizes, pieces, self.world))

    def set_owner(self, index: int, owner: int) -> None:
        """Makes one rank the owner of a whole parameter."""
        self.pieces[index] = [OwnedPiece(index, 0, self.params[index].numel(), owner)]

    @property
    def owned(self) -> list[OwnedPiece]:
        """The pieces this rank steps, in the order of the parameters."""
        return [piece for pieces in self.pieces for piece in pieces if piece.owner == self.rank]

    def is_whole(self, piece: OwnedPiece) -> bool:
        return piece.numel == self.params[piece.param].numel()

    # --- the tensors the local optimizer steps ---------------------------------------------------------------

    def stepped_tensor(self, piece: OwnedPiece) -> Tensor:
        """The tensor as which the local optimizer steps an owned piece."""
        return self.params[piece.param] if self.is_whole(piece) else self._slices[piece]

    def memory_of(self, piece: OwnedPiece) -> Tensor:
        """The memory of any piece, flat."""
        return in_memory_order(self.params[piece.param])[piece.start : piece.stop]

    def _make_slices(self, added: Iterable[int]) -> None:
        for index in added:
            if len(self.pieces[index]) > 1:
                self._split_params.append(index)
            for piece in self.pieces[index]:
                if piece.owner == self.rank and not self.is_whole(piece):
                    tensor = self._slices[piece] = self.memory_of(piece)
                    # The parameter's gradient may have any dtype, so the slice's may too.
                    tensor.grad_dtype = None

    def bind_gradients(self) -> None:
        """Sets each slice's gradient to its part of the parameter's gradient."""
        for piece, tensor in self._slices.items():
            grad = self.params[piece.param].grad
            tensor.grad = None if grad is None else self.gradient_of(piece, grad)

    def check_gradients(self) -> None:
        """Raises if a split parameter has a sparse gradient; on every rank, not only on owners of its pieces."""
        for index in self._split_params:
            grad = self.params[index].grad
            if grad is not None:
                self._check_dense(index, grad)

    def _check_dense(self, index: int, grad: Tensor) -> None:
        if grad.layout is not torch.strided:
            raise StateError(
                f"parameter {index} has a sparse gradient, which cannot be split",
                where=f"ZeroRedundancyOptimizer(balanced=True).step(), rank {self.rank}",
                fix="build the optimizer with balanced=False, or make the gradient dense",
            )

    def gradient_of(self, piece: OwnedPiece, grad: Tensor) -> Tensor:
        """Returns a piece's part of its parameter's gradient, flat."""
        param = self.params[piece.param]
        self._check_dense(piece.param, grad)
        if grad.stride() != param.stride():
            grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
        return in_memory_order(grad)[piece.start : piece.stop]

    def release_gradients(self) -> None:
        for tensor in self._slices.values():
            tensor.grad = None

    def wrap_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Returns a closure that also sets the slices' gradients."""
        if not self._slices:
            return closure

        def closure_that_binds() -> Any:
            loss = closure()
            self.bind_gradients()
            return loss

        return closure_that_binds

    # --- parameters that move --------------------------------------------------------------------------------

    def detect_moves(self) -> None:
        """Detects parameters that are new or have new memory (``.to()``, ``param.data = …``); moves their slices."""
        addresses = list(map(Tensor.data_ptr, self.params))
        if addresses == self._addresses:
            return
        for index, param in enumerate(self.params):
            if not is_dense(param):
                raise StateError(
                    f"parameter {index} was given memory with gaps (shape {tuple(param.shape)}, "
                    f"strides {param.stride()})",
                    where=f"ZeroRedundancyOptimizer, rank {self.rank}",
                    fix="make it dense: param.data = param.data.contiguous()",
                )
        self._addresses = addresses
        self.revision += 1
        kinds = [(param.dtype, param.device) for param in self.params]
        if kinds[: len(self._kinds)] != self._kinds:
            # With another dtype or device, parameters no longer fit into their shared buffers.
            self.shared_buffers = [
                self._shared_buffer(indices)
                for shared in self.shared_buffers
                for indices in self._group_by_buffer(shared.params)
            ]
        self._kinds = kinds
        for piece, tensor in self._slices.items():
            tensor.data = self.memory_of(piece)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one range of memory without gaps, in any order of dims."""
    if not tensor.numel():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def in_memory_order(tensor: Tensor) -> Tensor:
    """Returns a dense tensor's elements as a flat tensor over the same memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
