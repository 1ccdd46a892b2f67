"""Ranks that run out of inputs keep stepping what they own, by the gradients of those that go on."""

from tests.ranks.zero_cases.table import JOIN, Run, each_run


@each_run(JOIN, "gloo")
def test_it(run: Run) -> None:
    run.check()
