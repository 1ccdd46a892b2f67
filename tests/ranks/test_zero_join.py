"""Ranks that run out of inputs keep stepping what they own, by the gradients of those that go on."""

import pytest

from shardwise.testing import run_ranks
from tests.ranks.zero_cases import join


@pytest.mark.parametrize("world", [2, 4])
def test_a_joined_rank_steps_by_gradients_another_hook_sets(world: int) -> None:
    run_ranks(join.joins_with_gradients_set_by_another_hook, world, kind="gloo")


def test_a_joined_rank_needs_no_gradients_and_keeps_no_old_ones() -> None:
    run_ranks(join.joins_without_gradients_of_its_own, 3, kind="gloo")


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize(("as_views", "balanced"), [(False, False), (True, True)])
def test_a_joined_rank_beside_ddp_steps_by_the_gradients_of_the_others(
    as_views: bool, balanced: bool, unused: bool
) -> None:
    run_ranks(join.joins_with_ddp, 3, kind="gloo", as_views=as_views, balanced=balanced, unused=unused)


def test_steps_after_a_join_are_plain_again() -> None:
    run_ranks(join.steps_normally_after_a_join, 2, kind="gloo")
