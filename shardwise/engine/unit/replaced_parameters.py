"""Parameters that were replaced from outside: what may take the place of a unit's shards, and what is refused.

``.to()`` and ``to_empty()`` leave a unit's buffer, ``load_state_dict(assign=True)`` brings new parameters. What came
must still be the unit's shards, on the device where they live. Or it is another sharded parameter: then the two names
have been tied, and the one that was there before is no longer used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from shardwise.engine.unit.binding import Place, Slot, membership
from shardwise.errors import StateError

if TYPE_CHECKING:
    from shardwise.engine.unit.unit import Unit


def follow_ties(unit: Unit) -> list[Unit]:
    """Gives names that show another sharded parameter to that one's slot; returns the units whose parameters these are.

    A slot may be left without a name.
    """
    owners: dict[Unit, None] = {}
    for slot in unit.slots:
        for place in tuple(slot.places):
            shown = place.params.get(place.name)
            if shown is slot.sharded or (found := _tied_to(shown, slot)) is None:
                continue
            owner, tied = found
            if owner.precision.param_dtype != unit.precision.param_dtype:
                raise StateError(
                    f"parameter '{slot.name}' was tied to '{tied.name}' of unit '{owner.name}', which computes in "
                    f"{owner.precision.param_dtype or 'its own dtype'} and not in "
                    f"{unit.precision.param_dtype or 'its own dtype'}",
                    where=f"unit '{unit.name}', rank {unit.rank}",
                    fix="give both units the same param_dtype, or tie the parameters before fully_shard",
                )
            slot.places.remove(place)
            tied.places.append(place)
            owners[owner] = None
    return list(owners)


def _tied_to(shown: torch.Tensor | None, slot: Slot) -> tuple[Unit, Slot] | None:
    """Whose parameter a name shows that was ``slot``'s, if it is another unit's or slot's."""
    found = None if shown is None else membership(shown)
    if (
        found is None
        or found[1] is slot
        or (shown is not found[1].sharded and shown is not found[1].unsharded)
    ):
        return None
    return found


def ties_while_gathered(unit: Unit) -> dict[Place, Slot]:
    """The places of gathered parameters that show another sharded parameter now, and its slot; refuses any other."""
    tied: dict[Place, Slot] = {}
    for slot in unit.slots:
        for place in slot.places:
            shown = place.params.get(place.name)
            if shown is slot.unsharded or shown is slot.sharded:
                continue
            if (found := _tied_to(shown, slot)) is None:
                raise StateError(
                    f"parameter '{slot.name}' was replaced by {_described(shown)} while it was gathered, and what "
                    "came would be forgotten",
                    where=f"unit '{unit.name}', rank {unit.rank}",
                    fix="call reshard() first, and give the sharded parameter new values with copy_() or "
                    "load_state_dict()",
                )
            tied[place] = found[1]
    return tied


def take_written(slot: Slot, own_part: torch.Tensor | None, unit: str, rank: int) -> None:
    """Somebody wrote to a parameter while it was gathered: its shard takes that over, where it is the same dtype."""
    if own_part is None or slot.compute_dtype != slot.stored_dtype:
        raise StateError(
            f"parameter '{slot.name}' was written to while it was gathered, which its shard of {slot.stored_dtype} "
            "cannot take over",
            where=f"unit '{unit}', rank {rank}",
            fix="write to the sharded parameter: call reshard() first",
        )
    with torch.no_grad():
        slot.local.copy_(own_part)


def adopt_found(slots: list[Slot], unit: str, rank: int) -> None:
    """Takes what stands in the parameters' places now for them; refuses all of it if one does not fit."""
    found = [slot.found() for slot in slots]
    for slot, param in zip(slots, found, strict=True):
        if slot.is_shown and any(place.params.get(place.name) is not param for place in slot.places):
            raise StateError(
                f"parameter '{slot.name}' has several names, and only some of them were given a new parameter",
                where=f"unit '{unit}', rank {rank}",
                fix="give all of them the new parameter, or untie them before the model is sharded",
            )
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
