"""Optimizer state as an unsharded optimizer saves it: on one rank, by parameter number.

    local         on the owner, by stepped tensor: what the local optimizer works with
    consolidated  on one rank, by parameter number: what an unsharded optimizer's state_dict() looks like

State that has an element for each element of its piece is cut and joined like the piece; anything else (a step
count) is the same for every piece of a parameter and is taken from the first. A value may be a list or a dict of
tensors, in which each is treated so. What an optimizer keeps for no parameter is *loose*: the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.plan.ownership import OwnedPiece
from shardwise.torch_internals import join_trees, map_tree
from shardwise.zero.partition import Partition, in_memory_order

__all__ = [
    "PieceState",
    "check_fits",
    "consolidate",
    "is_per_element",
    "loose_part",
    "loose_state",
    "owned_state",
    "saved_positions",
    "state_of_own_pieces",
]

State = dict[str, Any]


@dataclass(frozen=True)
class PieceState:
    """The state of one piece, on the CPU, ready to travel."""

    piece: OwnedPiece
    is_whole: bool
    values: State
    off_cpu: frozenset[str]
    """Names of what was beside the parameter on its device; step counts often stay on the CPU."""

    def values_for(self, device: torch.device) -> State:
        return {
            name: map_tree(lambda tensor: tensor.to(device), value) if name in self.off_cpu else value
            for name, value in self.values.items()
        }


# --- local to consolidated -----------------------------------------------------------------------------------


def owned_state(
    partition: Partition, local: Mapping[Tensor, State], *, only: Iterable[int] | None = None
) -> list[PieceState]:
    """The state of this rank's pieces, copied to the CPU."""
    chosen = None if only is None else set(only)
    return [
        _travelling(piece, partition.is_whole(piece), values)
        for piece in partition.owned
        if (chosen is None or piece.param in chosen) and (values := local.get(partition.stepped(piece)))
    ]


def _travelling(piece: OwnedPiece, is_whole: bool, values: State) -> PieceState:
    off_cpu: set[str] = set()

    def to_cpu(name: str, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            off_cpu.add(name)
        return _copy_on_cpu(tensor)

    copied = {name: map_tree(partial(to_cpu, name), value) for name, value in values.items()}
    return PieceState(piece, is_whole, copied, frozenset(off_cpu))


def loose_state(local: Mapping[Any, Any]) -> State:
    """What the local optimizer keeps under names of its own, such as a count of all steps; on the CPU."""
    return {name: map_tree(_copy_on_cpu, value) for name, value in local.items() if isinstance(name, str)}


def consolidate(
    by_rank: Sequence[tuple[list[PieceState], State]], params: Sequence[Tensor]
) -> dict[int | str, Any]:
    """Puts the owned and the loose state of all ranks together, by parameter number or name."""
    consolidated: dict[int | str, Any] = {}
    by_param: dict[int, list[PieceState]] = {}
    # The first rank's loose state is the one that stays.
    for states, loose in reversed(by_rank):
        consolidated.update(loose)
        for state in states:
            by_param.setdefault(state.piece.param, []).append(state)
    for index, parts in sorted(by_param.items()):
        parts.sort(key=lambda state: state.piece)
        consolidated[index] = _join(parts, params[index])
    return consolidated


def _join(parts: Sequence[PieceState], param: Tensor) -> State:
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
    """Raises unless a consolidated state dict can be of this model; touches nothing."""
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
    loose = loose_part(state_dict)
    for number, values in state_dict["state"].items():
        if number in loose:
            continue
        if number not in positions:
            raise ConfigError(
                f"the state dict has state of a parameter {number!r} of no group", where=where, fix=fix
            )
        if values is None or not element_wise:
            continue
        shape = params[positions[number]].shape
        for name, value in values.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != shape:
                raise ConfigError(
                    f"{name!r} of parameter {number} has shape {tuple(value.shape)} in the state dict, and the "
                    f"parameter {tuple(shape)}",
                    where=where,
                    fix=fix,
                )


def saved_positions(state_dict: Mapping[str, Any]) -> dict[Any, int]:
    """A state dict numbers parameters as it likes; their order in its groups says which is which."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    return {number: position for position, number in enumerate(numbers)}


def loose_part(state_dict: Mapping[str, Any]) -> State:
    """What a state dict has under names that are no parameter's."""
    positions = saved_positions(state_dict)
    if any(isinstance(number, str) for number in positions):
        return {}
    return {name: value for name, value in state_dict["state"].items() if isinstance(name, str)}


def state_of_own_pieces(partition: Partition, by_param: Mapping[int, State]) -> dict[OwnedPiece, State]:
    """This rank's part of a consolidated state, in memory of its own."""
    return {
        piece: map_tree(partial(_cut, piece, partition), values)
        for piece in partition.owned
        if (values := by_param.get(piece.param))
    }


def _cut(piece: OwnedPiece, partition: Partition, value: Tensor) -> Tensor:
    param = partition.params[piece.param]
    if partition.is_whole(piece) or value.shape != param.shape or value.dim() == 0:
        return value.clone()
    ordered = torch.empty_strided(param.size(), param.stride(), dtype=value.dtype).copy_(value)
    return in_memory_order(ordered)[piece.start : piece.stop].clone()


def is_per_element(value: Any, shape: Sequence[int]) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == torch.Size(shape)


def _copy_on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
