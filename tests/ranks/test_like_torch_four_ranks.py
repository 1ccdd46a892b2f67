"""The programs of the differential tests on four ranks: wider shards, empty ones, and both axes of a mesh in use."""

from __future__ import annotations

import pytest

from shardwise.testing import run_ranks
from tests.ranks import test_like_torch as composable
from tests.ranks import test_wrapper_like_torch as wrapper
from tests.ranks import test_wrapper_state_peer as states

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (composable.all_programs, (composable.here(composable.PROGRAMS, composable.USES), composable.both)),
        (
            composable.all_programs,
            (composable.here(composable.MISUSES, composable.MISUSES_USE), composable.both_raise),
        ),
        (wrapper.beside_torch, (wrapper.CHECKS,)),
        (states.all_tables, ()),
    ],
    ids=["programs", "misuses", "wrapper", "states"],
)
def test_programs_do_on_four_ranks_what_they_do_with_torch(function, args):
    for differences in run_ranks(function, 4, *args, kind="gloo"):
        assert not differences, "\n".join(differences)
