"""Sums of gradients become averages without leaving the range of their dtype."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.planning.sums import Division, plan_division


@given(world=st.integers(1, 4096), narrow=st.booleans(), averages=st.booleans())
def test_the_division_comes_to_the_world(world: int, narrow: bool, averages: bool) -> None:
    division = plan_division(world, narrow, averages)
    divided_by_group = world if division.group_averages else 1
    assert division.before * division.after * divided_by_group == pytest.approx(world)


@given(world=st.integers(2, 4096))
def test_in_a_narrow_range_neither_side_divides_by_much_more_than_the_root(world: int) -> None:
    division = plan_division(world, narrow_range=True, group_averages=True)
    assert not division.group_averages
    assert division.before <= world**0.5
    assert division.after <= 2 * world**0.5 * (1 + 1e-9) or world < 4


def test_in_a_wide_range_all_of_it_comes_after_the_sum() -> None:
    assert plan_division(6, narrow_range=False, group_averages=False) == Division(1.0, 6.0, False)


def test_a_factor_of_the_users_own_replaces_the_world_everywhere() -> None:
    assert plan_division(8, False, True, factor=3.0) == Division(1.0, 3.0, False)
    assert plan_division(8, True, True, factor=16.0) == Division(4.0, 4.0, False)
