"""torchao's weights and optimizers train on ours as on torch's, bit for bit."""

import pytest

from tests.ecosystem.beside import differences, parameters_of

CASES = parameters_of("train_with_torchao")


@pytest.mark.parametrize(("program", "case"), CASES)
def test_torchao_does_on_ours_what_it_does_on_torchs(beside, program, case):
    sides = beside(program)
    ours = sides.results("shardwise", case)
    # Torch's side cannot gather in float8, as gloo has none: the weights must be those that were cast after a gather.
    expected = sides.results("torch", case if case != "float8-True" else "float8-False")
    assert differences(ours, expected) == []
