"""Parameters that were replaced from outside: what may take the place of a unit's shards, and what is refused.

``.to()`` and ``to_empty()`` leave a unit's buffer, ``load_state_dict(assign=True)`` brings new parameters. What came
must still be the unit's shards, on the device where they live.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from shardwise.engine.binding import Slot
from shardwise.errors import StateError


def adopt_found(slots: list[Slot], unit: str, rank: int) -> None:
    """Takes what stands in the parameters' places now for them; refuses all of it if one does not fit."""
    found = [slot.found() for slot in slots]
    for slot, param in zip(slots, found, strict=True):
        if param is None or not slot.fits(param):
            raise StateError(
                f"parameter '{slot.name}' was replaced by {_described(param)}, which cannot take the place of "
                f"{slot.wanted}",
                where=f"unit '{unit}', rank {rank}",
                fix="replace it with what it was, on the same mesh, or load values with load_state_dict",
            )
    for slot, param in zip(slots, found, strict=True):
        assert param is not None
        slot.adopt(param)


def check_are_home(slots: list[Slot], home: torch.device, is_offloaded: bool, unit: str, rank: int) -> None:
    """Raises unless all shards have memory on the unit's own kind of device."""
    if meta := [slot.name for slot in slots if slot.local.device.type == "meta"]:
        raise StateError(
            f"parameters {meta} of unit '{unit}' are still on the meta device",
            where=f"rank {rank}",
            fix="give them memory and values before the first forward: model.to_empty(device=...), then "
            "initialise (e.g. reset_parameters()) or load a state dict",
        )
    if moved := [slot for slot in slots if slot.local.device.type != home.type]:
        raise StateError(
            f"parameters {[slot.name for slot in moved]} of unit '{unit}' were moved to "
            f"{moved[0].local.device}, but its shards live on {home}",
            where=f"rank {rank}",
            fix=f"move the model back with .to('{home.type}')"
            + (": with CPUOffloadPolicy shards stay on the host" if is_offloaded else ""),
        )


def _described(param: object) -> str:
    if isinstance(param, DTensor):
        return f"a DTensor of shape {tuple(param.shape)} placed {tuple(param.placements)}"
    if isinstance(param, torch.Tensor):
        return f"a plain tensor of shape {tuple(param.shape)}"
    return "nothing" if param is None else f"a {type(param).__name__}"
