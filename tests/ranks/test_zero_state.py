"""State of a sharded optimizer: on one rank as an unsharded optimizer has it, or on all ranks as it is."""

from pathlib import Path

import pytest

from shardwise.testing import run_ranks
from tests.ranks.zero_cases import state


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("name", ["momentum", "adam", "adagrad", "rmsprop"])
def test_consolidated_state_is_what_an_unsharded_optimizer_has(name: str, balanced: bool) -> None:
    run_ranks(state.consolidated_state_is_an_unsharded_optimizers, 3, name, kind="gloo", balanced=balanced)


def test_ranks_as_threads_consolidate_too() -> None:
    run_ranks(state.consolidated_state_is_an_unsharded_optimizers, 3, "adam", balanced=True)


@pytest.mark.parametrize(("balanced", "loads_balanced"), [(False, False), (False, True), (True, False)])
def test_every_rank_loads_what_one_rank_consolidated(balanced: bool, loads_balanced: bool) -> None:
    run_ranks(
        state.every_rank_loads_what_one_rank_consolidated,
        3,
        kind="gloo",
        balanced=balanced,
        loads_balanced=loads_balanced,
    )


@pytest.mark.parametrize("balanced", [False, True])
def test_an_unsharded_optimizers_state_is_loaded(balanced: bool) -> None:
    run_ranks(state.loads_an_unsharded_optimizers_state, 2, kind="gloo", balanced=balanced)


def test_the_state_dict_is_as_old_as_the_last_consolidation() -> None:
    run_ranks(state.state_dict_shows_what_was_consolidated_last, 2, kind="gloo")


def test_hooks_around_saving_and_loading_are_run() -> None:
    run_ranks(state.runs_the_hooks_around_saving_and_loading, 2, kind="gloo")


@pytest.mark.parametrize(
    ("saved_on", "saved_balanced", "loaded_on", "loaded_balanced"),
    [(2, False, 3, False), (3, True, 2, False), (2, False, 4, True), (4, True, 1, True), (1, False, 3, True)],
)
@pytest.mark.parametrize("name", ["adam", "momentum"])
def test_a_sharded_checkpoint_loads_on_any_world_size(
    name: str, saved_on: int, saved_balanced: bool, loaded_on: int, loaded_balanced: bool, tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint")
    run_ranks(state.saves_sharded, saved_on, path, name, kind="gloo", balanced=saved_balanced)
    run_ranks(state.loads_sharded, loaded_on, path, name, kind="gloo", balanced=loaded_balanced)


def test_state_that_is_not_per_element_is_saved_and_loaded(tmp_path: Path) -> None:
    run_ranks(
        state.saves_and_loads_state_that_is_not_per_element, 2, str(tmp_path / "checkpoint"), kind="gloo"
    )


def test_a_sharded_state_dict_needs_no_communication() -> None:
    run_ranks(state.a_sharded_state_dict_needs_no_communication, 2, kind="gloo")


@pytest.mark.parametrize("shard_buckets", [False, True])
def test_state_loaded_before_an_overlapped_backward_is_kept(shard_buckets: bool) -> None:
    run_ranks(state.overlap_keeps_state_that_was_loaded, 2, kind="gloo", shard_buckets=shard_buckets)
