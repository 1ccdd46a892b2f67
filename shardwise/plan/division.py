"""How a sum of gradients becomes their average, in a dtype of limited range."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Division:
    """Divide by ``before``, reduce (averaging if the group does it), divide by ``after``."""

    before: float
    after: float
    group_averages: bool


def plan_division(
    world: int, narrow_range: bool, group_averages: bool, factor: float | None = None
) -> Division:
    """Splits the division by ``factor`` (the world, unless the user says otherwise).

    Where the range is wide, all of it comes after the sum, on a shard instead of the whole. In fp16 the sum of many
    ranks could overflow and an early division by the whole world could underflow: half of it goes to each side.
    """
    if narrow_range:
        divisor = float(world) if factor is None else factor
        before = 1.0
        while divisor / (before * 2) >= before * 2:
            before *= 2
        return Division(before, divisor / before, group_averages=False)
    if factor is None and group_averages:
        return Division(1.0, 1.0, group_averages=True)
    return Division(1.0, float(world) if factor is None else factor, group_averages=False)
