"""ZeroRedundancyOptimizer is an optimizer like any other, with its state shared out over the ranks."""

from pathlib import Path

import pytest

from shardwise.testing import run_ranks
from tests.ranks.zero_cases import interface, models, parity

WORLDS = (2, 3, 4)
layouts = pytest.mark.parametrize(
    ("as_views", "balanced"), [(False, False), (True, False), (False, True), (True, True)]
)


@pytest.mark.parametrize("name", models.OPTIMIZERS)
@pytest.mark.parametrize("world", WORLDS)
def test_whole_parameters_are_stepped_to_the_same_bits_as_unsharded(name: str, world: int) -> None:
    run_ranks(parity.matches_the_unsharded_optimizer, world, name, kind="gloo", balanced=False)


@pytest.mark.parametrize("name", models.OPTIMIZERS)
@pytest.mark.parametrize("world", WORLDS)
def test_split_parameters_are_stepped_to_the_same_bits_where_cuts_are_aligned(name: str, world: int) -> None:
    run_ranks(parity.matches_the_unsharded_optimizer, world, name, kind="gloo", balanced=True)


@pytest.mark.parametrize("name", models.OPTIMIZERS)
def test_a_small_parameter_that_is_cut_stays_within_an_ulp_a_step(name: str) -> None:
    run_ranks(parity.stays_within_an_ulp_a_step_where_a_small_parameter_is_cut, 3, name, kind="gloo")


@layouts
@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_parameters_of_several_dtypes_are_stepped_together(kind: str, as_views: bool, balanced: bool) -> None:
    run_ranks(parity.steps_parameters_of_several_dtypes, 3, kind=kind, as_views=as_views, balanced=balanced)


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_reduced_gradients_give_the_local_optimizers_step(kind: str) -> None:
    run_ranks(parity.reduced_gradients_give_the_local_optimizers_step, 2, kind=kind)


@layouts
def test_groups_up_front_and_added_later_agree_with_the_unsharded_optimizer(
    as_views: bool, balanced: bool
) -> None:
    run_ranks(
        parity.groups_up_front_and_added_later_agree_with_the_unsharded_optimizer,
        3,
        kind="gloo",
        as_views=as_views,
        balanced=balanced,
    )


@layouts
def test_some_ranks_share_among_themselves(as_views: bool, balanced: bool) -> None:
    run_ranks(parity.shares_out_over_some_of_the_ranks, 3, kind="gloo", as_views=as_views, balanced=balanced)


@pytest.mark.parametrize("world", [1, 2])
def test_state_and_groups_are_exposed_as_any_optimizers(world: int) -> None:
    run_ranks(interface.exposes_state_and_groups_as_any_optimizer_does, world, kind="gloo")


@pytest.mark.parametrize("world", [1, 2])
def test_a_learning_rate_scheduler_is_followed(world: int) -> None:
    run_ranks(interface.follows_a_learning_rate_scheduler, world, kind="gloo")


def test_optimizers_with_steps_of_their_own_are_stepped() -> None:
    # One parameter is owned by one rank, and only that rank's local optimizer has something to add a key to.
    run_ranks(interface.steps_optimizers_with_steps_of_their_own, 1, kind="gloo")


@layouts
def test_a_closure_runs_once_and_gives_its_loss(as_views: bool, balanced: bool) -> None:
    run_ranks(interface.steps_with_a_closure, 2, kind="gloo", as_views=as_views, balanced=balanced)


@pytest.mark.parametrize("as_views", [False, True])
def test_each_parameter_is_stepped_by_its_owners_gradient(as_views: bool) -> None:
    run_ranks(interface.steps_each_parameter_by_its_owners_gradient, 2, kind="gloo", as_views=as_views)


@layouts
def test_gradients_that_a_closure_makes_are_the_ones_stepped_by(as_views: bool, balanced: bool) -> None:
    run_ranks(
        interface.steps_by_gradients_a_closure_makes, 2, kind="gloo", as_views=as_views, balanced=balanced
    )


def test_zero_grad_clears_what_other_ranks_own_too() -> None:
    run_ranks(interface.clears_gradients_of_parameters_it_does_not_own, 2)


def test_parameters_come_as_generator_list_or_groups() -> None:
    run_ranks(interface.takes_parameters_in_any_form, 2)


@pytest.mark.parametrize("balanced", [False, True])
def test_named_parameters_keep_their_names(balanced: bool) -> None:
    run_ranks(interface.takes_named_parameters, 2, kind="gloo", balanced=balanced)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_element_counts_come_out_equal_and_stay_so_when_a_group_is_added(world: int) -> None:
    run_ranks(interface.shares_out_equal_element_counts, world)


@layouts
def test_a_large_frozen_parameter_is_left_alone(as_views: bool, balanced: bool) -> None:
    run_ranks(
        interface.steps_beside_a_large_frozen_parameter, 2, kind="gloo", as_views=as_views, balanced=balanced
    )


@layouts
def test_a_parameter_frozen_at_first_is_stepped_once_it_trains(as_views: bool, balanced: bool) -> None:
    run_ranks(
        interface.steps_a_parameter_that_was_frozen_at_first,
        2,
        kind="gloo",
        as_views=as_views,
        balanced=balanced,
    )


@layouts
def test_parameters_whose_memory_was_replaced_are_followed(as_views: bool, balanced: bool) -> None:
    run_ranks(
        interface.follows_parameters_whose_memory_was_replaced,
        3,
        kind="gloo",
        as_views=as_views,
        balanced=balanced,
    )


@layouts
def test_channels_last_parameters_keep_their_memory_format(as_views: bool, balanced: bool) -> None:
    run_ranks(
        interface.keeps_the_memory_format_of_parameters, 3, kind="gloo", as_views=as_views, balanced=balanced
    )


def test_a_parameter_in_a_buffer_still_saves_only_itself(tmp_path: Path) -> None:
    run_ranks(
        interface.a_parameter_saves_no_more_than_itself_from_a_view,
        2,
        str(tmp_path / "model.pt"),
        kind="gloo",
    )


@pytest.mark.parametrize("world", [2, 3, 4])
def test_state_a_rank_is_a_fair_share_even_if_one_parameter_dominates(world: int) -> None:
    run_ranks(interface.shares_out_state_evenly, world, dominating=300_000)


@layouts
def test_a_step_sends_a_message_a_peer_however_many_parameters_there_are(
    as_views: bool, balanced: bool
) -> None:
    # One to the peer and one from it; torch makes a broadcast for each of the 40 parameters.
    assert run_ranks(interface.sends_few_messages, 2, kind="gloo", as_views=as_views, balanced=balanced) == [
        2,
        2,
    ]


def test_one_rank_alone_needs_no_communication() -> None:
    assert run_ranks(interface.sends_few_messages, 1, kind="gloo", as_views=False, balanced=False) == [0]


def test_many_ranks_as_threads_agree() -> None:
    run_ranks(_sixteen_ranks_agree, 16)


def _sixteen_ranks_agree() -> None:
    parity.matches_the_unsharded_optimizer("adam", balanced=True, steps=1)
