"""Lightning does on ours what it does on torch's: with `install()`, or where a program imports our `fully_shard`."""

import pytest

from tests.ecosystem.beside import Beside, cases_of, differences

PROGRAM = "train_with_lightning"
CASES = cases_of(PROGRAM)


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    return Beside(PROGRAM, tmp_path_factory.mktemp(PROGRAM))


@pytest.mark.parametrize("case", CASES)
def test_lightning_does_on_ours_what_it_does_on_torchs(beside, case):
    ours, theirs = beside.results("shardwise", case), beside.results("torch", case)
    if "fsdp-full" in case:
        # Torch's wrapper does not get there on a CPU; the program has checked that ours resumed bit for bit.
        assert theirs == [None, None]
        assert all(ours)
    else:
        assert differences(ours, theirs) == []


@pytest.mark.parametrize("case", [case for case in CASES if "parallel" in case])
def test_lightning_recognises_what_a_program_sharded_with_ours(beside, case):
    assert differences(beside.results("import", case), beside.results("torch", case)) == []
