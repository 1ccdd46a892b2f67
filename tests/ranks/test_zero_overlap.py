"""Stepping inside DDP's backward gives, from the first step, what stepping after it gives."""

import pytest

from shardwise.testing import run_ranks
from tests.ranks.zero_cases import overlap

both_hooks = pytest.mark.parametrize("interleaved", [False, True], ids=["after_last", "interleaved"])
both_sharings = pytest.mark.parametrize(
    "shard_buckets", [False, True], ids=["whole_buckets", "shared_buckets"]
)


@both_hooks
@both_sharings
@pytest.mark.parametrize(
    ("world", "name"),
    [(2, "adam"), (2, "momentum"), (2, "rmsprop"), (2, "adagrad"), (3, "adamw"), (4, "nesterov")],
)
def test_overlap_equals_ddp_with_a_local_optimizer_from_the_first_step(
    world: int, name: str, interleaved: bool, shard_buckets: bool
) -> None:
    run_ranks(
        overlap.overlap_equals_ddp_with_a_local_optimizer,
        world,
        name,
        kind="gloo",
        interleaved=interleaved,
        shard_buckets=shard_buckets,
    )


@both_hooks
@pytest.mark.parametrize("world", [2, 4])
def test_overlap_steps_split_parameters_too(world: int, interleaved: bool) -> None:
    run_ranks(
        overlap.overlap_equals_ddp_with_a_local_optimizer,
        world,
        "sgd",
        kind="gloo",
        interleaved=interleaved,
        shard_buckets=True,
        balanced=True,
    )


@both_hooks
def test_a_bucket_belongs_to_one_rank_also_after_ddp_rearranged_its_buckets(interleaved: bool) -> None:
    run_ranks(
        overlap.a_bucket_belongs_to_one_rank_also_after_ddp_rearranged_its_buckets,
        2,
        kind="gloo",
        interleaved=interleaved,
    )


@both_hooks
def test_only_the_interleaved_hook_steps_while_backward_still_runs(interleaved: bool) -> None:
    # Rank 0 owns the first bucket.
    moved = run_ranks(
        overlap.steps_the_first_bucket_before_the_last_is_ready, 2, kind="gloo", interleaved=interleaved
    )
    assert moved[0] is interleaved


@both_hooks
@pytest.mark.parametrize("static_graph", [False, True])
def test_parameters_no_rank_used_are_left_alone(interleaved: bool, static_graph: bool) -> None:
    run_ranks(
        overlap.overlap_leaves_unused_parameters_alone,
        2,
        kind="gloo",
        interleaved=interleaved,
        static_graph=static_graph,
    )


@both_hooks
def test_without_gradient_sync_nothing_is_stepped(interleaved: bool) -> None:
    run_ranks(
        overlap.overlap_steps_only_where_gradients_are_synchronised, 2, kind="gloo", interleaved=interleaved
    )


@both_hooks
def test_a_hook_may_give_its_result_in_another_tensor(interleaved: bool) -> None:
    run_ranks(
        overlap.overlap_takes_a_hook_that_gives_its_result_elsewhere, 2, kind="gloo", interleaved=interleaved
    )


@both_hooks
def test_a_group_added_later_is_stepped_too(interleaved: bool) -> None:
    run_ranks(overlap.overlap_steps_a_group_that_was_added_later, 2, kind="gloo", interleaved=interleaved)


def test_a_scheduler_is_followed_although_step_is_never_called() -> None:
    run_ranks(overlap.overlap_follows_a_scheduler_without_a_call_of_step, 2, kind="gloo")


@both_hooks
@both_sharings
def test_uneven_inputs_join(interleaved: bool, shard_buckets: bool) -> None:
    run_ranks(
        overlap.overlap_joins_uneven_inputs,
        3,
        kind="gloo",
        interleaved=interleaved,
        shard_buckets=shard_buckets,
    )


@both_hooks
@both_sharings
def test_ranks_and_hooks_that_sleep_at_random_neither_hang_nor_differ(
    interleaved: bool, shard_buckets: bool
) -> None:
    # The long version, 20 seeds of 50 steps, is benchmarks/zero_soak.py.
    run_ranks(overlap.soaks, 3, 1, 8, kind="gloo", interleaved=interleaved, shard_buckets=shard_buckets)
