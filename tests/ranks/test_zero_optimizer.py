"""ZeroRedundancyOptimizer is an optimizer like any other, with its state shared out over the ranks."""

from pathlib import Path

import pytest

from shardwise.testing import run_ranks
from tests.ranks.tables import run_cases
from tests.ranks.zero_cases import interface, parity
from tests.ranks.zero_cases.table import LAYOUTS, OPTIMIZER, Run, each_run

pytestmark = pytest.mark.arithmetic


@each_run(OPTIMIZER, "gloo", "threads")
def test_it(run: Run) -> None:
    run.check()


def test_a_parameter_in_a_buffer_still_saves_only_itself(tmp_path: Path) -> None:
    run_ranks(
        interface.a_parameter_saves_no_more_than_itself_from_a_view,
        2,
        str(tmp_path / "model.pt"),
        kind="gloo",
    )


def test_a_step_sends_a_message_a_peer_however_many_parameters_there_are() -> None:
    # One to the peer and one from it; torch makes a broadcast for each of the 40 parameters. On one host, none.
    cases = [{**layout, "on_one_host": near} for layout in LAYOUTS for near in (False, True)]
    for messages in run_cases(interface.sends_few_messages, 2, cases, kind="gloo"):
        for case, sent in zip(cases, messages, strict=True):
            assert sent == (0 if case["on_one_host"] else 2), case


def test_one_rank_alone_needs_no_communication() -> None:
    assert run_ranks(interface.sends_few_messages, 1, kind="gloo", as_views=False, balanced=False) == [0]


def test_many_ranks_as_threads_agree() -> None:
    run_ranks(_sixteen_ranks_agree, 16)


def _sixteen_ranks_agree() -> None:
    parity.matches_the_unsharded_optimizer("adam", balanced=True, steps=1)
