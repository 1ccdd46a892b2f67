"""Optimizer state as an unsharded optimizer saves it: on one rank, by parameter number.

    local         on the owner, by stepped tensor: what the local optimizer works with
    consolidated  on one rank, by parameter number: what an unsharded optimizer's state_dict() looks like

State that has an element for each element of its piece is cut and joined like the piece; anything else (a step
count) is the same for every piece of a parameter and is taken from the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.plan.ownership import Piece
from shardwise.zero.partition import Partition, in_memory_order

__all__ = [
    "PieceState",
    "check_fits",
    "consolidate",
    "is_per_element",
    "owned_state",
    "saved_positions",
    "state_of_own_pieces",
]

State = dict[str, Any]


@dataclass(frozen=True)
class PieceState:
    """The state of one piece, on the CPU, ready to travel."""

    piece: Piece
    is_whole: bool
    values: State
    off_cpu: frozenset[str]
    """Names of what was beside the parameter on its device; step counts often stay on the CPU."""

    def values_for(self, device: torch.device) -> State:
        return {
            name: value.to(device) if name in self.off_cpu else value for name, value in self.values.items()
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


def _travelling(piece: Piece, is_whole: bool, values: State) -> PieceState:
    off_cpu = {
        name for name, value in values.items() if isinstance(value, Tensor) and value.device.type != "cpu"
    }
    return PieceState(
        piece, is_whole, {name: _to_cpu(value) for name, value in values.items()}, frozenset(off_cpu)
    )


def consolidate(states: Iterable[PieceState], params: Sequence[Tensor]) -> dict[int, State]:
    """Puts the pieces of all ranks together, by parameter number."""
    by_param: dict[int, list[PieceState]] = {}
    for state in sorted(states, key=lambda state: state.piece):
        by_param.setdefault(state.piece.param, []).append(state)
    return {index: _join(parts, params[index]) for index, parts in sorted(by_param.items())}


def _join(parts: Sequence[PieceState], param: Tensor) -> State:
    first = parts[0]
    if first.is_whole:
        return first.values
    joined = {}
    for name, value in first.values.items():
        if is_per_element(value, (first.piece.numel,)):
            flat = torch.cat([part.values[name] for part in parts])
            joined[name] = flat.as_strided(param.size(), param.stride())
        else:
            joined[name] = value
    return joined


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
    for number, values in state_dict["state"].items():
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


def state_of_own_pieces(partition: Partition, by_param: Mapping[int, State]) -> dict[Piece, State]:
    """This rank's part of a consolidated state, in memory of its own."""
    return {
        piece: {name: _cut(value, piece, partition) for name, value in values.items()}
        for piece in partition.owned
        if (values := by_param.get(piece.param))
    }


def _cut(value: Any, piece: Piece, partition: Partition) -> Any:
    if not isinstance(value, Tensor):
        return value
    param = partition.params[piece.param]
    if partition.is_whole(piece) or value.shape != param.shape or value.dim() == 0:
        return value.clone()
    ordered = torch.empty_strided(param.size(), param.stride(), dtype=value.dtype).copy_(value)
    return in_memory_order(ordered)[piece.start : piece.stop].clone()


def is_per_element(value: Any, shape: Sequence[int]) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == torch.Size(shape)


def _to_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
