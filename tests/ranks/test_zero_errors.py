"""Bad input is refused on every rank, with what to do about it, and nothing is lost."""

from pathlib import Path

import pytest
import torch

from shardwise.errors import StateError
from shardwise.testing import run_ranks
from shardwise.zero import ZeroRedundancyOptimizer
from tests.ranks.zero_cases import errors


def test_without_a_process_group_it_says_to_start_one() -> None:
    with pytest.raises(StateError, match="init_process_group"):
        ZeroRedundancyOptimizer([torch.zeros(1)], torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_bad_parameters_are_refused_with_torchs_error_types(kind: str) -> None:
    run_ranks(errors.refuses_bad_parameters, 2, kind=kind)


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_ranks_that_bring_other_parameters_are_told_apart_at_construction(kind: str) -> None:
    run_ranks(errors.finds_ranks_with_other_parameters, 3, kind=kind)


def test_a_group_that_is_refused_leaves_the_optimizer_as_it_was() -> None:
    run_ranks(errors.keeps_its_groups_when_an_added_one_is_refused, 2, kind="gloo")


def test_the_state_of_another_model_is_refused_before_anything_changes() -> None:
    run_ranks(errors.refuses_the_state_of_another_model, 2, kind="gloo")


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run_ranks(errors.refuses_a_checkpoint_of_another_model, 2, str(tmp_path / "checkpoint"), kind="gloo")


def test_a_checkpoint_of_another_memory_format_is_refused(tmp_path: Path) -> None:
    run_ranks(
        errors.refuses_a_checkpoint_of_another_memory_format, 2, str(tmp_path / "checkpoint"), kind="gloo"
    )


def test_options_that_cannot_work_are_refused() -> None:
    run_ranks(errors.refuses_options_that_cannot_work, 2, kind="gloo")


def test_overlap_that_would_never_step_is_refused() -> None:
    run_ranks(errors.refuses_overlap_that_would_never_step, 2, kind="gloo")


def test_memory_with_gaps_that_a_parameter_was_given_is_refused() -> None:
    run_ranks(errors.refuses_memory_with_gaps_that_a_parameter_was_given, 2, kind="gloo")


def test_a_sparse_gradient_is_refused_only_where_it_would_be_split() -> None:
    run_ranks(errors.refuses_a_sparse_gradient_only_where_it_would_be_split, 2, kind="gloo")
