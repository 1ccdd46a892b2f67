"""Joins small units that were made one by one, so that they travel together: one gather, one free, one reduce.

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, group_bytes=16 * 2**20)

Units are joined where nobody can tell but by the number of collectives: neighbours in one parent, sharded alike, which
have not run yet. Their sharded parameters stay the same objects, so optimizers made before are right.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from shardwise.engine.gather.tensor_extensions import is_tensor_extension
from shardwise.engine.step.root import Root
from shardwise.engine.unit.dtensor_form import DTensorForm
from shardwise.engine.unit.hooks import UnitHooks
from shardwise.engine.unit.membership import UNITS_ATTRIBUTE, move_tags, units_in, units_of
from shardwise.engine.unit.unit import Unit
from shardwise.planning.lifecycle import SHARDED


def join_units(model: nn.Module, group_bytes: int) -> list[Unit]:
    """Joins units below ``model`` that follow each other in one parent, as long as they fit into ``group_bytes``.

    Returns the units that were made of several.
    """
    units = units_in(model.modules())
    bound = {needed for unit in units for needed in unit.needs if len(unit.needs) > 1}
    bound |= {
        chosen
        for unit in units
        for chosen in (*unit.settings.forward_prefetch, *(unit.settings.backward_prefetch or ()))
    }
    made = []
    # A list, because modules get other units on the way.
    for parent in list(model.modules()):
        for group in _groups(parent, group_bytes, bound):
            if len(group) > 1:
                made.append(_joined(group))
    return made


def _groups(parent: nn.Module, group_bytes: int, bound: set[Unit]) -> list[list[Unit]]:
    """The units of the parent's children, cut into runs that may become one unit each."""
    children = list(parent.children())
    groups: list[list[Unit]] = []
    num_bytes = 0
    for unit in units_in(children):
        can_join = unit not in bound and set(unit.modules) <= set(children) and _is_fresh(unit)
        size = sum(slot.sharded.numel() * slot.sharded.element_size() for slot in unit.slots)
        num_bytes += size
        if not (groups and can_join and num_bytes <= group_bytes and _are_alike(groups[-1][-1], unit)):
            groups.append([])
            # Nothing joins a unit that cannot be joined itself.
            num_bytes = size if can_join else group_bytes + 1
        groups[-1].append(unit)
    return groups


def _is_fresh(unit: Unit) -> bool:
    """Whether the unit is as ``fully_shard`` made it, and nothing beside its modules knows it."""
    inside = {module for top in unit.modules for module in top.modules()}
    return (
        isinstance(unit.form, DTensorForm)
        and unit.state is SHARDED
        and not (unit.root.has_adopted or unit.root.is_busy)
        and all(units_of(module) == (unit,) for module in unit.modules)
        and unit.settings.recorder is None
        and unit.settings.gather_calls is unit.mesh.shard
        and not unit.settings.forward_prefetch
        and unit.settings.backward_prefetch is None
        and _reduces_as_made(unit)
        and all(
            not is_tensor_extension(slot.local)
            and all(
                place.module in inside and place.params.get(place.name) is slot.sharded
                for place in slot.places
            )
            for slot in unit.slots
        )
    )


def _reduces_as_made(unit: Unit) -> bool:
    found, made = unit.gradients.settings, unit.gradients.sums.settings(unit.mesh)
    return (
        type(found.calls) is type(made.calls)
        and found.calls.channel is made.calls.channel
        and type(found.replicate_calls) is type(made.replicate_calls)
        and replace(found, calls=made.calls, replicate_calls=made.replicate_calls) == made
    )


def _are_alike(one: Unit, other: Unit) -> bool:
    assert isinstance(one.form, DTensorForm)
    assert isinstance(other.form, DTensorForm)
    return (
        one.mesh is other.mesh
        and one.settings == other.settings
        and one.form.placement_fn is other.form.placement_fn
        and one.gradients.sums is other.gradients.sums
        and one.gradients.are_synced == other.gradients.are_synced
        and one.gradients.max_inputs == other.gradients.max_inputs
    )


def _joined(units: list[Unit]) -> Unit:
    """One unit of the modules and slots of these, whose shards move into its buffers."""
    first = units[0]
    unit = Unit(
        first.name,
        tuple(_flat(unit.modules for unit in units)),
        [slot for each in units for slot in each.slots],
        first.form,
        first.mesh,
        first.settings,
        first.gradients.sums,
        UnitHooks,
        Root,
    )
    unit.gradients.are_synced = first.gradients.are_synced
    unit.gradients.max_inputs = first.gradients.max_inputs
    move_tags(unit.slots, unit)
    unit.show_in_all_places()
    for module in unit.modules:
        module.__dict__[UNITS_ATTRIBUTE] = (unit,)
    return unit


def _flat(modules: Iterable[tuple[nn.Module, ...]]) -> Iterable[nn.Module]:
    return (module for each in modules for module in each)
