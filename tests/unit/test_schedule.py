"""What a unit keeps after forward, and what a backward prefetches."""

from __future__ import annotations

import gc
import weakref

import pytest

from shardwise.engine.unit.autograd_signals import Window
from shardwise.errors import ConfigError
from shardwise.planning.lifecycle import FREE, KEEP, AfterForward, plan_after_forward


def planned(requested: object, world: int = 8) -> AfterForward:
    return plan_after_forward(requested, world, "layers.3", "here")


@pytest.mark.parametrize(
    ("requested", "expected"),
    [(True, FREE), (None, FREE), (False, KEEP), (8, FREE), (1, KEEP), (2, AfterForward(True, 2))],
)
def test_reshard_after_forward_is_read_as_documented(requested: object, expected: AfterForward) -> None:
    assert planned(requested) == expected


@pytest.mark.parametrize("requested", [3, 16, 0, -2])
def test_an_int_that_does_not_divide_the_world_is_refused_with_the_divisors(requested: int) -> None:
    with pytest.raises(ConfigError, match=f"groups of {requested}") as refusal:
        planned(requested)
    assert "2 or 4" in str(refusal.value)
    assert "layers.3" in str(refusal.value)


def test_something_else_than_bool_or_int_is_refused() -> None:
    with pytest.raises(ConfigError, match="'often'"):
        planned("often")


def test_a_world_without_proper_divisors_offers_none() -> None:
    with pytest.raises(ConfigError) as refusal:
        planned(2, world=3)
    assert refusal.value.fix == "use True / False"


def test_backward_prefetches_the_unit_that_ran_before() -> None:
    window = Window()
    places = [window.ran(unit) for unit in (5, 6, 7)]
    assert window.before(places[2], lambda unit: True) == 6
    assert window.before(places[1], lambda unit: True) == 5
    assert window.before(places[0], lambda unit: True) is None


def test_backward_passes_over_units_it_will_not_use() -> None:
    window = Window()
    places = [window.ran(unit) for unit in (0, 1, 2)]
    assert window.before(places[2], lambda unit: unit == 0) == 0


def test_a_unit_that_runs_twice_in_a_row_does_not_prefetch_itself() -> None:
    window = Window()
    places = [window.ran(unit) for unit in (4, 9, 9)]
    assert window.before(places[2], lambda unit: True) == 4


def test_a_window_goes_with_the_passes_that_hold_it() -> None:
    window = Window()
    gone = weakref.ref(window)
    del window
    gc.collect()
    assert gone() is None
