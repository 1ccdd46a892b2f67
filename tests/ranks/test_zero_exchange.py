"""An exchange brings every rank's tensors to every other rank, whichever way it goes."""

from tests.ranks.zero_cases.table import EXCHANGE, Run, each_run


@each_run(EXCHANGE, "gloo", "threads")
def test_it(run: Run) -> None:
    run.check()
