"""Bad input is refused on every rank, with what to do about it, and nothing is lost."""

from pathlib import Path

import pytest
import torch

from shardwise.errors import StateError
from shardwise.testing import run_ranks
from shardwise.zero import ZeroRedundancyOptimizer
from tests.ranks.zero_cases import errors
from tests.ranks.zero_cases.table import ERRORS, Run, each_run


@each_run(ERRORS, "gloo", "threads")
def test_it(run: Run) -> None:
    run.check()


def test_without_a_process_group_it_says_to_start_one() -> None:
    with pytest.raises(StateError, match="init_process_group"):
        ZeroRedundancyOptimizer([torch.zeros(1)], torch.optim.SGD, lr=0.1)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run_ranks(errors.refuses_a_checkpoint_of_another_model, 2, str(tmp_path / "checkpoint"), kind="gloo")


def test_a_checkpoint_of_another_memory_format_is_refused(tmp_path: Path) -> None:
    run_ranks(
        errors.refuses_a_checkpoint_of_another_memory_format, 2, str(tmp_path / "checkpoint"), kind="gloo"
    )
