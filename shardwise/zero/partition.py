"""The parameters of a ZeRO optimizer, shared out: which pieces this rank steps, and as which tensors.

A piece that is a whole parameter is stepped as that parameter. A piece of a split parameter is stepped as a
*slice*: a tensor of its own over the same memory, which the local optimizer takes for a parameter.

    parameter   [ 0 1 2 3 4 5 6 7 8 9 ]     .grad   [ . . . . . . . . . . ]
    slice                 [ 5 6 7 8 9 ]     .grad             [ . . . . . ]     bound for each step

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
from shardwise.plan.ownership import (
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
    """Parameters that can share one buffer: on one device, and all trainable or all frozen when they came."""

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
        self.runs: list[SharedBuffer] = []
        self.index_of: dict[Tensor, int] = {}
        self.revision = 0
        """Grows when parameters are added or move in memory: whatever was planned for them is out of date."""
        self._cut: list[int] = []
        self._slices: dict[OwnedPiece, Tensor] = {}
        self._addresses: list[int] = []
        self._kinds: list[tuple[torch.dtype, torch.device]] = []

    # --- who owns what ---------------------------------------------------------------------------------------

    def add_groups(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Takes in new parameter groups; those taken in before keep their owners."""
        first = len(self.params)
        for group in groups:
            self.params.extend(group)
            self.group_of.extend([self.num_groups] * len(group))
            self.num_groups += 1
        added = range(first, len(self.params))
        self.index_of.update((self.params[index], index) for index in added)
        self.pieces.extend([] for _ in added)
        if self.balanced:
            self._share_out_evenly(added)
        else:
            self._share_out_whole(added)
        self._slice_split_parameters(added)
        self.follow()

    def _share_out_whole(self, added: Iterable[int]) -> None:
        by_group: dict[int, list[int]] = defaultdict(list)
        for index in added:
            by_group[self.group_of[index]].append(index)
        for indices in by_group.values():
            loads = loads_of([piece for pieces in self.pieces for piece in pieces], self.world)
            for piece in whole_pieces([self.params[index].numel() for index in indices], loads):
                index = indices[piece.param]
                self.pieces[index] = [piece._replace(param=index)]
        self.runs += [self._run_of(indices) for indices in self._by_run(added)]

    def _share_out_evenly(self, added: Iterable[int]) -> None:
        for indices in self._by_run(added):
            pieces, layout = even_pieces([self._extent(index) for index in indices], self.world)
            for piece in pieces:
                index = indices[piece.param]
                self.pieces[index].append(piece._replace(param=index))
            self.runs.append(SharedBuffer(tuple(indices), layout))

    def _by_run(self, added: Iterable[int]) -> Iterable[list[int]]:
        """Frozen parameters have no state, so they must not count when state is shared out evenly."""
        members: dict[tuple[torch.device, bool], list[int]] = defaultdict(list)
        for index in added:
            members[self.params[index].device, self.params[index].requires_grad].append(index)
        return members.values()

    def _extent(self, index: int) -> ParamSize:
        param = self.params[index]
        return ParamSize(param.numel(), param.element_size())

    def _run_of(self, indices: Sequence[int]) -> SharedBuffer:
        """Parameters in one buffer, laid out for the owners they have."""
        pieces = [
            piece._replace(param=position)
            for position, index in enumerate(indices)
            for piece in self.pieces[index]
        ]
        sizes = [self._extent(index) for index in indices]
        return SharedBuffer(tuple(indices), owned_layout(sizes, pieces, self.world))

    def give(self, index: int, owner: int) -> None:
        """Makes one rank the owner of a whole parameter, whoever owned it before."""
        self.pieces[index] = [OwnedPiece(index, 0, self.params[index].numel(), owner)]

    @property
    def owned(self) -> list[OwnedPiece]:
        """The pieces this rank steps, in the order of the parameters."""
        return [piece for pieces in self.pieces for piece in pieces if piece.owner == self.rank]

    def is_whole(self, piece: OwnedPiece) -> bool:
        return piece.numel == self.params[piece.param].numel()

    # --- the tensors the local optimizer steps ---------------------------------------------------------------

    def stepped(self, piece: OwnedPiece) -> Tensor:
        """The tensor that stands for an owned piece in the local optimizer."""
        return self.params[piece.param] if self.is_whole(piece) else self._slices[piece]

    def memory_of(self, piece: OwnedPiece) -> Tensor:
        """The memory of any piece, flat."""
        return in_memory_order(self.params[piece.param])[piece.start : piece.stop]

    def _slice_split_parameters(self, added: Iterable[int]) -> None:
        for index in added:
            if len(self.pieces[index]) > 1:
                self._cut.append(index)
            for piece in self.pieces[index]:
                if piece.owner == self.rank and not self.is_whole(piece):
                    tensor = self._slices[piece] = self.memory_of(piece)
                    # Whatever gradient the parameter may have, the slice may.
                    tensor.grad_dtype = None

    def bind_gradients(self) -> None:
        """Shows each slice its part of the parameter's gradient."""
        for piece, tensor in self._slices.items():
            grad = self.params[piece.param].grad
            tensor.grad = None if grad is None else self.gradient_of(piece, grad)

    def check_gradients(self) -> None:
        """Raises if a parameter that is cut has a gradient that cannot be: on every rank, whoever owns its pieces."""
        for index in self._cut:
            grad = self.params[index].grad
            if grad is not None:
                self._check_dense(index, grad)

    def _check_dense(self, index: int, grad: Tensor) -> None:
        if grad.layout is not torch.strided:
            raise StateError(
                f"parameter {index} has a sparse gradient, which cannot be cut or handed on",
                where=f"ZeroRedundancyOptimizer(balanced=True).step(), rank {self.rank}",
                fix="build the optimizer with balanced=False, or make the gradient dense",
            )

    def gradient_of(self, piece: OwnedPiece, grad: Tensor) -> Tensor:
        """A piece's part of its parameter's gradient, flat."""
        param = self.params[piece.param]
        self._check_dense(piece.param, grad)
        if grad.stride() != param.stride():
            grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
        return in_memory_order(grad)[piece.start : piece.stop]

    def release_gradients(self) -> None:
        for tensor in self._slices.values():
            tensor.grad = None

    def with_gradients(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, after which slices see the gradients it made."""
        if not self._slices:
            return closure

        def closure_that_binds() -> Any:
            loss = closure()
            self.bind_gradients()
            return loss

        return closure_that_binds

    # --- parameters that move --------------------------------------------------------------------------------

    def follow(self) -> None:
        """Notices parameters that are new, or whose memory was replaced (``.to()``, ``param.data = …``)."""
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
            # Elements of other sizes do not fit where these lay, nor do those of another device.
            self.runs = [self._run_of(indices) for run in self.runs for indices in self._by_run(run.params)]
        self._kinds = kinds
        for piece, tensor in self._slices.items():
            tensor.data = self.memory_of(piece)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in whatever order of dims."""
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
    """A dense tensor's elements as one flat tensor over the same memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
