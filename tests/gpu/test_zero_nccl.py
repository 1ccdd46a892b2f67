"""ZeroRedundancyOptimizer on CUDA: the cases of tests/ranks on NCCL, with 2 and 4 ranks that may share a GPU."""

from pathlib import Path

import pytest

from shardwise.testing import run_ranks
from tests.ranks.zero_cases import errors, interface, join, models, overlap, parity, state

pytestmark = pytest.mark.gpu

worlds = pytest.mark.parametrize("world", [2, 4])
layouts = pytest.mark.parametrize(
    ("as_views", "balanced"), [(False, False), (True, False), (False, True), (True, True)]
)
both_hooks = pytest.mark.parametrize("interleaved", [False, True], ids=["after_last", "interleaved"])
both_sharings = pytest.mark.parametrize(
    "shard_buckets", [False, True], ids=["whole_buckets", "shared_buckets"]
)


@worlds
@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("name", models.OPTIMIZERS)
def test_parameters_are_stepped_to_the_same_bits_as_unsharded(name: str, balanced: bool, world: int) -> None:
    run_ranks(parity.matches_the_unsharded_optimizer, world, name, kind="nccl", balanced=balanced)


@layouts
@worlds
def test_parameters_of_several_dtypes_are_stepped_together(
    world: int, as_views: bool, balanced: bool
) -> None:
    run_ranks(
        parity.steps_parameters_of_several_dtypes, world, kind="nccl", as_views=as_views, balanced=balanced
    )


@layouts
def test_a_model_on_the_cpu_and_the_gpu_is_stepped(as_views: bool, balanced: bool) -> None:
    run_ranks(parity.steps_a_model_of_two_devices, 2, kind="nccl", as_views=as_views, balanced=balanced)


@layouts
def test_cuda_parameters_are_stepped_over_gloo(as_views: bool, balanced: bool) -> None:
    run_ranks(_steps_cuda_parameters_over_gloo, 2, kind="gloo-cuda", as_views=as_views, balanced=balanced)


def _steps_cuda_parameters_over_gloo(*, as_views: bool, balanced: bool) -> None:
    with models.on_cuda():
        parity.steps_a_model_of_two_devices(as_views=as_views, balanced=balanced)


@worlds
def test_reduced_gradients_give_the_local_optimizers_step(world: int) -> None:
    run_ranks(parity.reduced_gradients_give_the_local_optimizers_step, world, kind="nccl")


@layouts
def test_groups_up_front_and_added_later_agree_with_the_unsharded_optimizer(
    as_views: bool, balanced: bool
) -> None:
    run_ranks(
        parity.groups_up_front_and_added_later_agree_with_the_unsharded_optimizer,
        2,
        kind="nccl",
        as_views=as_views,
        balanced=balanced,
    )


@pytest.mark.parametrize(
    "case",
    [
        interface.exposes_state_and_groups_as_any_optimizer_does,
        interface.follows_a_learning_rate_scheduler,
        interface.clears_gradients_of_parameters_it_does_not_own,
        interface.takes_parameters_in_any_form,
        interface.shares_out_equal_element_counts,
        errors.refuses_bad_parameters,
        errors.finds_ranks_with_other_parameters,
        errors.refuses_the_state_of_another_model,
        errors.refuses_a_sparse_gradient_only_where_it_would_be_split,
        join.steps_normally_after_a_join,
    ],
    ids=lambda case: case.__name__,
)
def test_on_nccl_it(case: object) -> None:
    run_ranks(case, 2, kind="nccl")  # type: ignore[arg-type]


def test_optimizers_with_steps_of_their_own_are_stepped() -> None:
    run_ranks(interface.steps_optimizers_with_steps_of_their_own, 1, kind="nccl")


@layouts
def test_a_closure_runs_once_and_gives_its_loss(as_views: bool, balanced: bool) -> None:
    run_ranks(interface.steps_with_a_closure, 2, kind="nccl", as_views=as_views, balanced=balanced)


@layouts
def test_a_parameter_frozen_at_first_is_stepped_once_it_trains(as_views: bool, balanced: bool) -> None:
    run_ranks(
        interface.steps_a_parameter_that_was_frozen_at_first,
        2,
        kind="nccl",
        as_views=as_views,
        balanced=balanced,
    )


@layouts
def test_channels_last_parameters_keep_their_memory_format(as_views: bool, balanced: bool) -> None:
    run_ranks(
        interface.keeps_the_memory_format_of_parameters, 2, kind="nccl", as_views=as_views, balanced=balanced
    )


@worlds
def test_state_a_rank_is_a_fair_share_even_if_one_parameter_dominates(world: int) -> None:
    run_ranks(interface.shares_out_state_evenly, world, kind="nccl", dominating=300_000)


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_consolidated_state_is_what_an_unsharded_optimizer_has(name: str, balanced: bool) -> None:
    run_ranks(state.consolidated_state_is_an_unsharded_optimizers, 2, name, kind="nccl", balanced=balanced)


def test_every_rank_loads_what_one_rank_consolidated() -> None:
    run_ranks(
        state.every_rank_loads_what_one_rank_consolidated, 2, kind="nccl", balanced=True, loads_balanced=False
    )


def test_a_sharded_checkpoint_loads_on_another_world_size(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    run_ranks(state.saves_sharded, 4, path, "adam", kind="nccl", balanced=True)
    run_ranks(state.loads_sharded, 2, path, "adam", kind="nccl", balanced=False)


@worlds
def test_a_joined_rank_steps_by_gradients_another_hook_sets(world: int) -> None:
    run_ranks(join.joins_with_gradients_set_by_another_hook, world, kind="nccl")


@pytest.mark.parametrize(("as_views", "balanced"), [(False, False), (True, True)])
def test_a_joined_rank_beside_ddp_steps_by_the_gradients_of_the_others(
    as_views: bool, balanced: bool
) -> None:
    run_ranks(join.joins_with_ddp, 2, kind="nccl", as_views=as_views, balanced=balanced, unused=True)


@both_hooks
@both_sharings
@pytest.mark.parametrize(("world", "name"), [(2, "adam"), (2, "momentum"), (4, "adamw")])
def test_overlap_equals_ddp_with_a_local_optimizer_from_the_first_step(
    world: int, name: str, interleaved: bool, shard_buckets: bool
) -> None:
    run_ranks(
        overlap.overlap_equals_ddp_with_a_local_optimizer,
        world,
        name,
        kind="nccl",
        interleaved=interleaved,
        shard_buckets=shard_buckets,
    )


@both_hooks
def test_overlap_steps_split_parameters_too(interleaved: bool) -> None:
    run_ranks(
        overlap.overlap_equals_ddp_with_a_local_optimizer,
        2,
        "sgd",
        kind="nccl",
        interleaved=interleaved,
        shard_buckets=True,
        balanced=True,
    )


@both_hooks
@pytest.mark.parametrize("static_graph", [False, True])
def test_parameters_no_rank_used_are_left_alone(interleaved: bool, static_graph: bool) -> None:
    run_ranks(
        overlap.overlap_leaves_unused_parameters_alone,
        2,
        kind="nccl",
        interleaved=interleaved,
        static_graph=static_graph,
    )


@both_hooks
def test_a_bucket_belongs_to_one_rank_also_after_ddp_rearranged_its_buckets(interleaved: bool) -> None:
    run_ranks(
        overlap.a_bucket_belongs_to_one_rank_also_after_ddp_rearranged_its_buckets,
        2,
        kind="nccl",
        interleaved=interleaved,
    )


@both_hooks
def test_uneven_inputs_join_an_overlapped_backward(interleaved: bool) -> None:
    run_ranks(
        overlap.overlap_joins_uneven_inputs, 2, kind="nccl", interleaved=interleaved, shard_buckets=True
    )


@both_hooks
@both_sharings
def test_ranks_and_hooks_that_sleep_at_random_neither_hang_nor_differ(
    interleaved: bool, shard_buckets: bool
) -> None:
    run_ranks(overlap.soaks, 2, 1, 8, kind="nccl", interleaved=interleaved, shard_buckets=shard_buckets)
