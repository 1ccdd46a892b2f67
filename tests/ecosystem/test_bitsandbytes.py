"""Weights of four bits by bitsandbytes, with adapters of peft, train on ours as on torch's FSDP, bit for bit."""

import pytest

from tests.ecosystem.beside import differences, parameters_of


@pytest.mark.parametrize(("program", "case"), parameters_of("train_with_bitsandbytes"))
def test_bitsandbytes_does_on_ours_what_it_does_on_torchs(beside, program, case):
    sides = beside(program)
    assert differences(sides.results("shardwise", case), sides.results("torch", case)) == []
