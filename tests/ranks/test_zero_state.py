"""State of a sharded optimizer: on one rank as an unsharded optimizer has it, or on all ranks as it is."""

from pathlib import Path

import pytest

from shardwise.testing import run_ranks
from tests.ranks.tables import cases_of, run_cases
from tests.ranks.zero_cases import state
from tests.ranks.zero_cases.table import STATE, Run, each_run


@each_run(STATE, "gloo", "threads")
def test_it(run: Run) -> None:
    run.check()


@pytest.mark.parametrize(
    ("saved_on", "saved_balanced", "loaded_on", "loaded_balanced"),
    [(2, False, 3, False), (3, True, 2, False), (2, False, 4, True), (4, True, 1, True), (1, False, 3, True)],
)
def test_a_sharded_checkpoint_loads_on_any_world_size(
    saved_on: int, saved_balanced: bool, loaded_on: int, loaded_balanced: bool, tmp_path: Path
) -> None:
    checkpoints = [{"path": str(tmp_path / name), "name": name} for name in ("adam", "momentum")]
    saved = [{**each, "balanced": saved_balanced} for each in checkpoints]
    loaded = [{**each, "balanced": loaded_balanced} for each in checkpoints]
    run_cases(state.saves_sharded, saved_on, saved, kind="gloo")
    run_cases(state.loads_sharded, loaded_on, loaded, kind="gloo")


def test_state_of_any_form_is_saved_and_loaded_in_parts(tmp_path: Path) -> None:
    cases = [{"path": str(tmp_path / form), "form": form} for form in state.ANY_FORM]
    run_cases(state.saves_sharded_state_of_any_form, 2, cases, kind="gloo")


def test_options_are_loaded_as_they_were_saved(tmp_path: Path) -> None:
    run_ranks(state.loads_options_as_they_were_saved, 2, str(tmp_path / "checkpoint"), kind="gloo")


def test_state_that_is_not_per_element_is_saved_and_loaded(tmp_path: Path) -> None:
    run_ranks(
        state.saves_and_loads_state_that_is_not_per_element, 2, str(tmp_path / "checkpoint"), kind="gloo"
    )


def test_copies_are_made_on_any_rank_and_step_as_the_original() -> None:
    run_cases(state.copies_step_as_the_original, 2, cases_of(balanced=(False, True), views=(False, True)))
    run_ranks(state.a_pickled_copy_needs_the_default_group, 2)
