"""Lightning does on ours what it does on torch's: with `install()`, or where a program imports our `fully_shard`."""

import pytest

from tests.ecosystem.beside import differences, parameters_of

CASES = parameters_of("train_with_lightning", short=("fabric-parallel-sharded", "trainer-fsdp-sharded"))


@pytest.mark.parametrize(("program", "case"), CASES)
def test_lightning_does_on_ours_what_it_does_on_torchs(beside, program, case):
    sides = beside(program)
    ours, theirs = sides.results("shardwise", case), sides.results("torch", case)
    if "fsdp-full" in case:
        # Torch's wrapper does not get there on a CPU; the program has checked that ours resumed bit for bit.
        assert theirs == [None, None]
        assert all(ours)
    else:
        assert differences(ours, theirs) == []


@pytest.mark.parametrize(("program", "case"), [case for case in CASES if "parallel" in case.id])
def test_lightning_recognises_what_a_program_sharded_with_ours(beside, program, case):
    sides = beside(program)
    assert differences(sides.results("import", case), sides.results("torch", case)) == []
