"""torchao's weights and optimizers train on ours as on torch's, bit for bit."""

import pytest

from tests.ecosystem.beside import Beside, cases_of, differences

PROGRAM = "train_with_torchao"


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    return Beside(PROGRAM, tmp_path_factory.mktemp(PROGRAM))


@pytest.mark.parametrize("case", [case for case in cases_of(PROGRAM) if case != "float8-True"])
def test_torchao_does_on_ours_what_it_does_on_torchs(beside, case):
    assert differences(beside.results("shardwise", case), beside.results("torch", case)) == []


def test_weights_gathered_in_float8_train_as_weights_cast_after_the_gather(beside):
    """Torch's side cannot tell: gloo has no float8."""
    gathered_in_float8 = beside.results("shardwise", "float8-True")
    assert differences(gathered_in_float8, beside.results("shardwise", "float8-False")) == []
