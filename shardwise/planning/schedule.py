"""What a unit keeps after forward, and which unit a backward needs next.

The order of units is recorded per root forward, in a *window*. The visits of that forward own the window: it is freed
with their autograd graph, so a forward without a backward leaves nothing behind.

    window of one forward     layers.0   layers.1   layers.2   (root)
    backward is here                                   ▲
    prefetch                                ◀──────────┘   the nearest earlier unit that this backward will use
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwise.errors import ConfigError


@dataclass(frozen=True)
class AfterForward:
    """What a unit keeps between its forward and its backward.

    ``frees``: the unsharded parameters are freed. ``part_world``: with ``frees``, the number of ranks over which the
    parameters stay sharded until backward, so that its gather is smaller; 0: over the whole shard world.
    """

    frees: bool
    part_world: int = 0


KEEP = AfterForward(frees=False)
FREE = AfterForward(frees=True)


def plan_after_forward(requested: object, shard_world: int, unit: str, where: str) -> AfterForward:
    """Reads ``reshard_after_forward``: None or True frees, False keeps, an int reshards to that many ranks."""
    if requested is None or requested is True:
        return FREE
    if requested is False:
        return KEEP
    if not isinstance(requested, int):
        raise ConfigError(
            f"unit '{unit}' cannot reshard to {requested!r}: that is neither a bool nor an int",
            where=where,
            fix="pass True, False, None, or the number of ranks that keep the parameters between them",
        )
    if requested < 1 or shard_world % requested:
        proper = [str(k) for k in range(2, shard_world) if shard_world % k == 0]
        divisors = f"use a divisor of {shard_world} ({' or '.join(proper)}), or True / False"
        raise ConfigError(
            f"unit '{unit}' cannot reshard to groups of {requested}: its shard world is {shard_world}",
            where=where,
            fix=divisors if proper else "use True / False",
        )
    if requested == shard_world:
        return FREE
    return KEEP if requested == 1 else AfterForward(frees=True, part_world=requested)


class Window:
    """The order in which units ran in one root forward. What stands for a unit is the caller's choice."""

    __slots__ = ("__weakref__", "_units")

    def __init__(self) -> None:
        self._units: list[Any] = []

    def ran(self, unit: Any) -> int:
        """Records that ``unit`` has run; returns its position."""
        self._units.append(unit)
        return len(self._units) - 1

    def __contains__(self, unit: Any) -> bool:
        return unit in self._units

    def before(self, position: int, wanted: Callable[[Any], bool]) -> Any:
        """The nearest ``wanted`` unit that ran before ``position``, which a backward there prefetches; None if none."""
        units = self._units
        current = units[position]
        for earlier in range(position - 1, -1, -1):
            unit = units[earlier]
            if unit != current and wanted(unit):
                return unit
        return None
