"""Names of a unit's collectives: as text for people, as codes for the collective log that ranks compare.

Two ranks issue the same collective only if everything about it is equal, so the name says all that may differ between
ranks: the unit, the phase, which parameters are trained and which of them had a gradient, the dtype. Names are made
once; a step only looks their codes up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise import trace
from shardwise.comm.channels.channel import collective_code, listed

if TYPE_CHECKING:
    from shardwise.engine.buffers import Presence
    from shardwise.engine.reduce.reduce_plan import ReducePlan

_PHASES = {
    trace.IN_FORWARD: "in forward",
    trace.IN_PRE_BACKWARD: "in backward",
    trace.IN_POST_BACKWARD: "at the end of backward",
    trace.IDLE: "between steps",
}

STEP = collective_code("let an optimizer use the step")
REPLAY = collective_code("replay a captured step")


class CollectiveNames:
    """The codes of one unit's collectives."""

    def __init__(self, unit: str, num_slots: int, model: int = 1) -> None:
        self._name = f"'{unit}'" if unit else "the root"
        if model > 1:
            self._name += f" of model {model}"
        self._num_slots = num_slots
        self.gather = {
            phase: collective_code(f"gather {self._name} {words}") for phase, words in _PHASES.items()
        }

    def reduce(self, plan: ReducePlan, present: Presence, divide_factor: float | None) -> tuple[int, int]:
        """Names a reduce; returns its codes: over the shard axis, and over replicas. ``plan`` keeps them."""
        words = f"reduce {self._name} in {str(plan.dtype).removeprefix('torch.')}"
        if len(plan.slots) < self._num_slots:
            words += f", training only {listed([slot.name for slot in plan.slots])}"
        if absent := _without_gradients(plan, present):
            words += f", without gradients of {listed(absent)}"
        if divide_factor is not None:
            words += f", divided by {divide_factor:g}"
        return collective_code(words), collective_code(f"{words}, over replicas")


def _without_gradients(plan: ReducePlan, present: Presence) -> list[str]:
    """Names parameters that get no gradient; one inside a flat parameter gets zeros if another there has one."""
    if present is None:
        return []
    served = {
        member
        for part in plan.views
        if any(present[member] for member in part.members)
        for member in part.members
    }
    return [slot.name for number, slot in enumerate(plan.slots) if number not in served]


class UnnamedCollectives(CollectiveNames):
    """The same codes for all units: for models whose ranks may diverge with a warning."""

    def __init__(self) -> None:
        self.gather = {phase: collective_code(f"gather a unit {words}") for phase, words in _PHASES.items()}

    def reduce(self, plan: ReducePlan, present: Presence, divide_factor: float | None) -> tuple[int, int]:
        return collective_code("reduce a unit"), collective_code("reduce a unit, over replicas")
