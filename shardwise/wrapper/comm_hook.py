"""A user's function in the place of a unit's reduce, as torch's communication hooks are."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shardwise.engine.gather.full_tensors import is_flat
from shardwise.engine.unit.unit import Unit
from shardwise.errors import ConfigError, StateError


def reduce_with_hook(units: Iterable[Unit], state: object, hook: Callable[..., object]) -> None:
    """Has ``hook`` reduce the gradients of all these units; checked before the first one changes."""
    flat_units = [unit for unit in units if is_flat(unit)]
    for unit in flat_units:
        where = f"register_comm_hook, unit '{unit.name}', rank {unit.rank}"
        if unit.mesh.replicate is not None and unit.mesh.shard.world > 1:
            raise ConfigError(
                "hybrid strategies reduce in two stages, and a communication hook is one",
                where=where,
                fix="use FULL_SHARD, SHARD_GRAD_OP or NO_SHARD",
            )
        if unit.gradients.settings.is_hooked:
            raise StateError(
                "a communication hook is registered already", where=where, fix="register one hook, once"
            )
    for unit in flat_units:
        unit.gradients.settings.use_hook(unit.mesh.shard, unit.mesh.replicate, state, hook)
