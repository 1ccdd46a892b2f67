"""Names of what is in an optimizer's state: nested state comes back as it was, and hostile names are refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.state_names import named_values, nested_state
from shardwise.errors import CheckpointError

keys = st.text("abc_", min_size=1, max_size=4)
numbers = st.one_of(st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False))
states = st.dictionaries(
    keys,
    st.recursive(
        numbers,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3), st.dictionaries(keys, inner, min_size=1, max_size=3)
        ),
        max_leaves=6,
    ),
    max_size=4,
)


@given(states)
def test_numbers_in_lists_and_dicts_come_back_as_they_were(state):
    found = nested_state(named_values(state))
    assert found == state
    assert repr(found) == repr(state)  # True is not 1


def test_tensors_keep_their_names_and_tuples_become_lists():
    one, other = torch.ones(2), torch.zeros(3)
    values = named_values({"exp_avg": one, "sides": (one, other), "note": "not saved", "nothing": None})
    assert list(values) == ["exp_avg", "sides[0]", "sides[1]"]
    state = nested_state(values)
    assert state["exp_avg"] is one
    assert state["sides"][1] is other


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a", "a[0]"], "which is a value itself"),
        (["a[0]", "a"], "comes twice"),
        (["a:int"], "has 2 elements"),
        (["a[b]", "a[b][c]"], "which is a value itself"),
    ],
)
def test_names_of_no_state_are_refused(names, said):
    with pytest.raises(CheckpointError, match=said):
        nested_state({name: torch.zeros(2) for name in names})
