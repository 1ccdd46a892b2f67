"""Stepping inside DDP's backward gives, from the first step, what stepping after it gives."""

import pytest

from shardwise.testing import run_ranks
from tests.ranks.tables import run_cases
from tests.ranks.zero_cases import overlap
from tests.ranks.zero_cases.table import BOTH_HOOKS, OVERLAP, Run, each_run


@each_run(OVERLAP, "gloo")
def test_it(run: Run) -> None:
    run.check()


# Torch's own errors, and those of a group that has lost a rank, are both of the second kind.
@pytest.mark.parametrize("error", [ZeroDivisionError, RuntimeError])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_rank_whose_step_raises_in_backward_keeps_no_other_waiting(
    interleaved: bool, error: type[Exception]
) -> None:
    # Each in a group of its own, whose connections are closed to let the other ranks out.
    run_ranks(
        overlap.a_rank_whose_step_raises_in_backward_keeps_no_other_waiting,
        3,
        kind="gloo",
        interleaved=interleaved,
        error=error,
    )


def test_only_the_interleaved_hook_steps_while_backward_still_runs() -> None:
    # Rank 0 owns the first bucket.
    moved = run_cases(overlap.steps_the_first_bucket_before_the_last_is_ready, 2, BOTH_HOOKS, kind="gloo")
    assert moved[0] == [hook["interleaved"] for hook in BOTH_HOOKS]
