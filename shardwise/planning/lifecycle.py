"""The states of a unit's parameters, every step between them, and what a unit keeps after forward.

                 gather               arrive                 keep_part
    SHARDED ───────────▶ GATHERING ───────────▶ UNSHARDED ───────────▶ SHARDED_AFTER_FORWARD
       ▲ ▲                │      ▲                  │                       │         │
       │ └────abandon─────┘      └──────────────────┼────────gather─────────┘         │
       └───────────────────reshard──────────────────┴─────────────────reshard─────────┘

Any other step is a bug in the engine and raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shardwise.errors import ConfigError, StateError


class State(Enum):
    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"
    SHARDED_AFTER_FORWARD = "sharded after forward"

    # Enum hashes the member's name on every lookup, which costs time in every training step.
    __hash__ = object.__hash__


class Step(Enum):
    GATHER = "gather"
    ARRIVE = "arrive"
    ABANDON = "abandon"
    RESHARD = "reshard"
    KEEP_PART = "keep_part"

    __hash__ = object.__hash__


# Module-level names, because looking up a member in its Enum class is slow.
SHARDED, GATHERING, UNSHARDED, SHARDED_AFTER_FORWARD = State
GATHER, ARRIVE, ABANDON, RESHARD, KEEP_PART = Step


class Transitions(dict[tuple[State, Step], State]):
    """The next state, by state and step."""

    def __missing__(self, key: tuple[State, Step]) -> State:
        state, step = key
        raise StateError(
            f"a unit that is {state.value} cannot take the step '{step.value}'",
            fix="this is a defect of shardwise: please report it with the trace of the step",
        )


TRANSITIONS = Transitions(
    {
        (State.SHARDED, Step.GATHER): State.GATHERING,
        (State.SHARDED_AFTER_FORWARD, Step.GATHER): State.GATHERING,
        (State.GATHERING, Step.ARRIVE): State.UNSHARDED,
        (State.GATHERING, Step.ABANDON): State.SHARDED,
        (State.UNSHARDED, Step.RESHARD): State.SHARDED,
        (State.UNSHARDED, Step.KEEP_PART): State.SHARDED_AFTER_FORWARD,
        (State.SHARDED_AFTER_FORWARD, Step.RESHARD): State.SHARDED,
    }
)


# --- after forward ----------------------------------------------------------------------------------------------------


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
