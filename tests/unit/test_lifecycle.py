"""A unit moves between states only as the table says."""

from __future__ import annotations

import pytest

from shardwise.errors import StateError
from shardwise.planning.lifecycle import TRANSITIONS, State, Step


def test_a_training_step_with_parts_walks_the_whole_table() -> None:
    state = State.SHARDED
    for step, following in (
        (Step.GATHER, State.GATHERING),
        (Step.ARRIVE, State.UNSHARDED),
        (Step.KEEP_PART, State.SHARDED_AFTER_FORWARD),
        (Step.GATHER, State.GATHERING),
        (Step.ARRIVE, State.UNSHARDED),
        (Step.RESHARD, State.SHARDED),
    ):
        state = TRANSITIONS[state, step]
        assert state is following


def test_a_prefetch_can_be_called_off() -> None:
    assert TRANSITIONS[State.GATHERING, Step.ABANDON] is State.SHARDED


@pytest.mark.parametrize(
    ("state", "step"), [(s, t) for s in State for t in Step if (s, t) not in TRANSITIONS], ids=str
)
def test_every_other_step_is_refused_by_name(state: State, step: Step) -> None:
    with pytest.raises(StateError, match=f"{state.value}.*{step.value}"):
        TRANSITIONS[state, step]


def test_every_state_can_be_left_and_reached() -> None:
    assert {state for state, _ in TRANSITIONS} == set(State)
    assert set(TRANSITIONS.values()) == set(State)
