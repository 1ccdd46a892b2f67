"""torchtitan's trainer does on ours what it does on torch's, bit for bit: losses, norms, weights, resumed steps."""

import pytest

from tests.ecosystem.beside import differences, parameters_of

SHORT = ("trainer-llama", "trainer-expert-parallel")


@pytest.mark.parametrize(("program", "case"), parameters_of("train_with_torchtitan", SHORT))
def test_torchtitan_does_on_ours_what_it_does_on_torchs(beside, program, case):
    sides = beside(program)
    assert differences(sides.results("shardwise", case), sides.results("torch", case)) == []
