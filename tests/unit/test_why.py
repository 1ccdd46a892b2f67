"""Who reads the last lines of a run that failed knows why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.testing import RankFailure, RankReport
from shardwise.testing.failures import Outcome, failure_of
from tests.why import reason_of

REPOSITORY = Path(__file__).parents[2]


def test_the_reason_ends_with_the_error_of_the_rank_that_failed_first():
    reports = [
        RankReport(0, Outcome.RAISED, "raised KeyError: 'later'", "a story of\nrank 0's", 2.0),
        RankReport(
            1, Outcome.RAISED, "raised ValueError: empty", "Traceback\n  there\nValueError: empty", 1.0
        ),
        RankReport(2, Outcome.TORN_DOWN),
    ]
    message = str(failure_of(reports, call="a call", timeout_seconds=1.0))
    assert list(reason_of(message)) == [
        "rank 1 of 3 raised ValueError: empty",
        "  where: a call",
        "--- rank 1 raised ValueError: empty",
        "Traceback",
        "  there",
        "ValueError: empty",
    ]


def test_the_reason_of_any_other_failure_is_what_it_says():
    assert list(reason_of("AssertionError: it is\nassert 1 == 2\n\nand much more")) == [
        "AssertionError: it is",
        "assert 1 == 2",
    ]


FAILING = """
import torch.distributed as dist
from shardwise.testing import run_ranks

def fail_on_one():
    if dist.get_rank() == 1:
        raise ValueError("the batch of this rank is empty")
    dist.barrier()

def test_with_a_name_that_is_much_longer_than_what_a_terminal_has_room_for_in_one_of_its_lines():
    run_ranks(fail_on_one, 2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "distributed"])
def test_a_run_that_failed_ends_with_the_error_of_the_rank_that_failed_first(options, tmp_path):
    (tmp_path / "test_failing.py").write_text(FAILING)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.why", *options, "test_failing.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "80"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    *_, error, counts = done.stdout.rstrip().splitlines()
    assert error == "    ValueError: the batch of this rank is empty"
    assert "1 failed" in counts
    assert RankFailure.__name__ in done.stdout
