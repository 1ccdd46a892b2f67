"""Converts state between the local optimizer and the format of an unsharded optimizer's ``state_dict()``.

    local         on the owner, by stepped tensor: the local optimizer's state
    consolidated  on one rank, by parameter number: the state of an unsharded optimizer's state_dict()

State with an element for each element of its piece is split and joined like the piece. Anything else, such as a step
count, is the same for every piece of a parameter and is taken from the first. A value may be a list or dict of tensors;
each tensor is treated this way. *Global* state belongs to no parameter, and is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.planning.ownership import OwnedPiece
from shardwise.torch_internals import join_trees, map_tree
from shardwise.zero.partition import Partition, in_memory_order

__all__ = [
    "PieceState",
    "check_fits",
    "consolidate",
    "global_state",
    "is_per_element",
    "owned_state",
    "saved_global_state",
    "saved_positions",
    "state_of_own_pieces",
]

State = dict[str, Any]


@dataclass(frozen=True)
class PieceState:
    """The state of one piece, on the CPU, ready to be sent."""

    piece: OwnedPiece
    is_whole: bool
    values: State
    off_cpu: frozenset[str]
    """Names of values that were on the parameter's device; step counts are often on the CPU."""

    def values_for(self, device: torch.device) -> State:
        return {
            name: map_tree(lambda tensor: tensor.to(device), value) if name in self.off_cpu else value
            for name, value in self.values.items()
        }


# --- local to consolidated -----------------------------------------------------------------------------------


def owned_state(
    partition: Partition, local: Mapping[Tensor, State], *, only: Iterable[int] | None = None
) -> list[PieceState]:
    """Returns the state of this rank's pieces, or of those of the parameters ``only``, copied to the CPU."""
    chosen = None if only is None else set(only)
    return [
        _piece_state(piece, partition.is_whole(piece), values)
        for piece in partition.owned
        if (chosen is None or piece.param in chosen)
        and (values := local.get(partition.stepped_tensor(piece)))
    ]


def _piece_state(piece: OwnedPiece, is_whole: bool, values: State) -> PieceState:
    off_cpu: set[str] = set()

    def to_cpu(name: str, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            off_cpu.add(name)
        return _copy_to_cpu(tensor)

    copied = {name: map_tree(partial(to_cpu, name), value) for name, value in values.items()}
    return PieceState(piece, is_whole, copied, frozenset(off_cpu))


def global_state(local: Mapping[Any, Any]) -> State:
    """Returns what the local optimizer keeps by name instead of by parameter, copied to the CPU."""
    return {name: map_tree(_copy_to_cpu, value) for name, value in local.items() if isinstance(name, str)}


def consolidate(
    by_rank: Sequence[tuple[list[PieceState], State]], params: Sequence[Tensor]
) -> dict[int | str, Any]:
    """Combines the owned and the global state of all ranks, by parameter number or name."""
    consolidated: dict[int | str, Any] = {}
    by_param: dict[int, list[PieceState]] = {}
    # In reverse, so that the first rank's global state wins.
    for states, of_no_param in reversed(by_rank):
        consolidated.update(of_no_param)
        for state in states:
            by_param.setdefault(state.piece.param, []).append(state)
    for index, parts in sorted(by_param.items()):
        parts.sort(key=lambda state: state.piece)
        consolidated[index] = _join_pieces(parts, params[index])
    return consolidated


def _join_pieces(parts: Sequence[PieceState], param: Tensor) -> State:
    first = parts[0]
    if first.is_whole:
        return first.values

    def join(tensors: list[Tensor]) -> Tensor:
        if not is_per_element(tensors[0], (first.piece.numel,)):
            return tensors[0]
        return torch.cat(tensors).as_strided(param.size(), param.stride())

    return {name: join_trees(join, [part.values[name] for part in parts]) for name in first.values}


# --- consolidated to local -----------------------------------------------------------------------------------


def check_fits(
    state_dict: Mapping[str, Any], groups: Sequence[Sequence[Tensor]], *, element_wise: bool
) -> None:
    """Raises unless a consolidated state dict fits these parameter groups; changes nothing."""
    where = "ZeroRedundancyOptimizer.load_state_dict()"
    fix = "load a state dict that was saved for the same model with the same parameter groups"
    missing = {"state", "param_groups"} - set(state_dict)
    if missing:
        raise ConfigError(
            f"the state dict has no {sorted(missing)}, only {sorted(state_dict)}", where=where, fix=fix
        )
    saved_sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    sizes = [len(group) for group in groups]
    if saved_sizes != sizes:
        raise ConfigError(
            f"the state dict has groups of {saved_sizes} parameters, this optimizer has groups of {sizes}",
            where=where,
            fix=fix,
        )
    positions = saved_positions(state_dict)
    params = [param for group in groups for param in group]
    of_no_param = saved_global_state(state_dict)
    for number, values in state_dict["state"].items():
        if number in of_no_param:
            continue
        if number not in positions:
            raise ConfigError(
                f"the state dict has state of parameter {number!r}, which is in none of its groups",
                where=where,
                fix=fix,
            )
        if values is None or not element_wise:
            continue
        shape = params[positions[number]].shape
        for name, value in values.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != shape:
                raise ConfigError(
                    f"{name!r} of parameter {number} has shape {tuple(value.shape)} in the state dict, but the "
                    f"parameter has shape {tuple(shape)}",
                    where=where,
                    fix=fix,
                )


def saved_positions(state_dict: Mapping[str, Any]) -> dict[Any, int]:
    """Maps a state dict's parameter numbers, which are arbitrary, to positions in the order of its groups."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    return {number: position for position, number in enumerate(numbers)}


def saved_global_state(state_dict: Mapping[str, Any]) -> State:
    """Returns the state in a state dict that belongs to no parameter."""
    positions = saved_positions(state_dict)
    if any(isinstance(number, str) for number in positions):
        return {}
    return {name: value for name, value in state_dict["state"].items() if isinstance(name, str)}


def state_of_own_pieces(partition: Partition, by_param: Mapping[int, State]) -> dict[OwnedPiece, State]:
    """Returns a copy of this rank's part of a consolidated state."""
    return {
        piece: map_tree(partial(_part_of, piece, partition), values)
        for piece in partition.owned
        if (values := by_param.get(piece.param))
    }


def _part_of(piece: OwnedPiece, partition: Partition, value: Tensor) -> Tensor:
    param = partition.params[piece.param]
    if partition.is_whole(piece) or value.shape != param.shape or value.dim() == 0:
        return value.clone()
    ordered = torch.empty_strided(param.size(), param.stride(), dtype=value.dtype).copy_(value)
    return in_memory_order(ordered)[piece.start : piece.stop].clone()


def is_per_element(value: Any, shape: Sequence[int]) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == torch.Size(shape)


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
