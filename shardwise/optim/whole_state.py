"""Converts the state of whole matrices between their owners and shards, for state dicts.

    owners   each matrix's state is whole, on one rank
    shards   the same state on all ranks: DTensors, so that checkpoints load on any number of them

Values may be nested lists, tuples and dicts of tensors. Scalars and values that are no tensors are the same on all
ranks. Called on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardwise.comm.collectives.agreement import gather_objects
from shardwise.comm.collectives.group import GroupCollectives
from shardwise.optim.held_parameters import HeldParameter, block_of, ranks_of
from shardwise.optim.matrix_moves import Batch, MatrixMoves, Route, route
from shardwise.optim.owned_matrices import OwnedMatrices, State
from shardwise.planning.layout import cut_evenly
from shardwise.planning.matrix_owners import Held, HeldBlock
from shardwise.torch_internals import dtensor, dtensor_spec, leaves_of, spec_of, with_leaves


@dataclass(frozen=True)
class _Moved:
    """Stands in a description for a tensor that is moved by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    # The dims in the order of memory, outermost first: kernels may round differently in another order.
    order: tuple[int, ...]
    block: HeldBlock | None = None

    def empty(self, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        """Returns a tensor of another shape with its dims in the same order in memory."""
        memory = torch.empty([shape[dim] for dim in self.order], dtype=self.dtype, device=device)
        return memory.permute([self.order.index(dim) for dim in range(len(shape))])


class WholeState:
    """The state of one optimizer."""

    def __init__(self, calls: GroupCollectives, moves: MatrixMoves, owned: OwnedMatrices) -> None:
        self._calls, self._moves, self._owned = calls, moves, owned

    # --- to shards ------------------------------------------------------------------------------------------------

    def to_shards(
        self,
        held: Sequence[HeldParameter],
        blocks: Sequence[Held],
        owners: Sequence[int],
        rounds: Sequence[Sequence[int]],
    ) -> dict[int, State]:
        """Returns, on every rank, this rank's shards of the state of all parameters."""
        own = {index: state for index in self._owned.copies if (state := self._owned.state_of(index))}
        flat = {index: leaves_of(state) for index, state in own.items()}
        described = {index: with_leaves(own[index], map(_describe, leaves)) for index, leaves in flat.items()}
        everything: dict[int, State] = {}
        for of_rank in gather_objects(described, self._calls):
            everything.update(of_rank)
        shards: dict[int, State] = {}
        for members in rounds:
            indices = [index for index in members if index in everything]
            shards.update(self._shard_round(indices, everything, flat, held, blocks, owners))
        return {index: shards[index] for index in sorted(shards)}

    def _shard_round(
        self,
        indices: Sequence[int],
        described: Mapping[int, Any],
        flat: Mapping[int, Any],
        held: Sequence[HeldParameter],
        blocks: Sequence[Held],
        owners: Sequence[int],
    ) -> dict[int, State]:
        made: dict[int, list[Any]] = {}
        routes: list[Route] = []
        wholes: list[torch.Tensor | None] = []
        locals_: list[torch.Tensor | None] = []
        for index in indices:
            made[index] = []
            for position, value in enumerate(leaves_of(described[index])):
                if not isinstance(value, _Moved):
                    made[index].append(value.clone() if isinstance(value, torch.Tensor) else value)
                    continue
                shown, local, of_ranks = _empty_shard(value, held[index], blocks[index], self._calls)
                made[index].append(shown)
                routes.append(route(of_ranks, owners[index], value.shape, value.dtype))
                locals_.append(local)
                source = flat[index][position] if index in flat else None
                wholes.append(None if source is None else source.detach())
        self._moves.from_owners(Batch(routes), wholes, locals_).wait()
        return {index: _as_lists(with_leaves(described[index], values)) for index, values in made.items()}

    # --- to owners ------------------------------------------------------------------------------------------------

    def to_owners(
        self, states: Mapping[int, State], held: Sequence[HeldParameter], owners: Sequence[int]
    ) -> tuple[dict[int, State], list[int]]:
        """Returns whole state of the matrices that this rank owns, and which parameters have any.

        Args:
            states: what this rank has: full tensors or shards; nothing of a matrix whose owner has all of it.
            held: the parameters.
            owners: their owners.
        """
        flat = {index: leaves_of(state) for index, state in states.items() if state}
        described = {
            index: with_leaves(states[index], [_describe(value, held[index]) for value in leaves])
            for index, leaves in flat.items()
        }
        by_rank = gather_objects(described, self._calls)
        present = sorted({index for of_rank in by_rank for index in of_rank})
        loaded: dict[int, State] = {}
        for index in present:
            # One matrix at a time: what arrives stays, what is sent need not.
            state = self._collect(index, by_rank, flat, owners[index])
            if state is not None:
                loaded[index] = state
        return loaded, present

    def _collect(
        self, index: int, by_rank: Sequence[Mapping[int, Any]], flat: Mapping[int, Any], owner: int
    ) -> State | None:
        known = [of_rank.get(index) for of_rank in by_rank]
        described = known[owner] or next(each for each in known if each is not None)
        leaves = [None if each is None else leaves_of(each) for each in known]
        is_owner = owner == self._calls.rank
        values: list[Any] = []
        routes, shards, wholes = [], [], []
        for position, value in enumerate(leaves_of(described)):
            if not isinstance(value, _Moved):
                values.append(value)
                continue
            of_ranks = [None if each is None else each[position].block for each in leaves]
            whole = None
            if is_owner:
                device = self._owned.copies[index].device
                whole = value.empty(value.shape, device)
            routes.append(route(of_ranks, owner, value.shape, value.dtype))
            own = flat[index][position] if index in flat else None
            shards.append(None if own is None else _elements(own))
            wholes.append(whole)
            values.append(whole)
        self._moves.to_owners(Batch(routes), shards, wholes).wait()
        if not is_owner:
            return None
        existing = self._owned.state_of(index)
        # Tuples have become lists in a state dict.
        if len(leaves_of(existing)) == len(values) and existing.keys() == described.keys():
            described = existing
        state: State = with_leaves(described, values)
        return state


def _as_lists(value: Any) -> Any:
    """Turns tuples with tensors into lists: torch.distributed.checkpoint would pickle a tuple on one rank alone."""
    if isinstance(value, dict):
        return {key: _as_lists(inner) for key, inner in value.items()}
    if isinstance(value, list) or (
        isinstance(value, tuple) and any(isinstance(leaf, torch.Tensor) for leaf in leaves_of(value))
    ):
        return [_as_lists(inner) for inner in value]
    return value


def _describe(value: Any, held: HeldParameter | None = None) -> Any:
    """Returns a value as other ranks are told of it: a scalar as it is, a larger tensor as a stand-in."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value.detach().cpu() if isinstance(value, torch.Tensor) else value
    shape = tuple(value.shape)
    order = tuple(sorted(range(value.dim()), key=lambda dim: -value.stride()[dim]))
    if isinstance(value, DTensor):
        return _Moved(shape, value.dtype, order, block_of(value))
    if held is not None and held.is_flat and shape != held.shape and shape == tuple(held.param.shape):
        return _Moved(held.shape, value.dtype, tuple(range(len(held.shape))), held.block)
    return _Moved(shape, value.dtype, order, HeldBlock((0,) * len(shape), shape))


def _elements(value: torch.Tensor) -> torch.Tensor:
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.detach()


def _empty_shard(
    value: _Moved, held: HeldParameter, blocks: Held, calls: GroupCollectives
) -> tuple[torch.Tensor, torch.Tensor, Held]:
    """Returns an empty tensor to show users, this rank's part of it to be filled, and what all ranks hold of it."""
    param = held.param
    if value.shape == held.shape and not isinstance(param, DTensor):
        shown = torch.empty_like(param, dtype=value.dtype, requires_grad=False)
        return shown, held.elements_of(shown), blocks
    if not isinstance(param, DTensor):
        shown = value.empty(value.shape, param.device)
        whole = HeldBlock((0,) * len(value.shape), value.shape)
        return shown, shown, [None if block is None else whole for block in blocks]
    if value.shape == held.shape:
        spec = spec_of(param)
        local = value.empty(held.local().shape, param.device)
        return _shown(local, value, spec.mesh, spec.placements), local, blocks
    return _empty_dtensor(value, param, calls)


def _empty_dtensor(
    value: _Moved, param: DTensor, calls: GroupCollectives
) -> tuple[torch.Tensor, torch.Tensor, Held]:
    """A DTensor of another shape than the parameter's: its rows over the last axis of the mesh."""
    mesh = param.device_mesh
    axis = mesh.ndim - 1
    placements: tuple[Placement, ...] = (*[Replicate()] * axis, Shard(0))
    of_ranks = [_rows_of(value.shape, mesh, axis, rank) for rank in ranks_of(calls)]
    own = of_ranks[calls.rank]
    assert own is not None
    local = value.empty(own.sizes, param.device)
    return _shown(local, value, mesh, placements), local, of_ranks


def _shown(
    local: torch.Tensor, value: _Moved, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> DTensor:
    strides = value.empty(value.shape, torch.device("meta")).stride()
    return dtensor(local, dtensor_spec(mesh, placements, torch.Size(value.shape), strides, value.dtype))


def _rows_of(shape: tuple[int, ...], mesh: DeviceMesh, axis: int, rank: int) -> HeldBlock | None:
    found = (mesh.mesh == rank).nonzero()
    if not len(found):
        return None
    span = cut_evenly(shape[0], mesh.size(axis), int(found[0][axis]))
    return HeldBlock((span.start, *[0] * (len(shape) - 1)), (span.numel, *shape[1:]))
