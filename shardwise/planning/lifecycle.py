"""The states of a unit's parameters, and every step between them.

                 gather               arrive                 keep_part
    SHARDED ───────────▶ GATHERING ───────────▶ UNSHARDED ───────────▶ SHARDED_AFTER_FORWARD
       ▲ ▲                │      ▲                  │                       │         │
       │ └────abandon─────┘      └──────────────────┼────────gather─────────┘         │
       └───────────────────reshard──────────────────┴─────────────────reshard─────────┘

Any other step is a bug in the engine and raises.
"""

from __future__ import annotations

from enum import Enum

from shardwise.errors import StateError


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
