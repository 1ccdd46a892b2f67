"""transformers' Trainer and its own sharding do on ours what they do on torch's, bit for bit."""

import pytest

from tests.ecosystem.beside import Beside, cases_of, differences

PROGRAM = "train_with_transformers"
# Torch's wrapper adds up norms in another order than ours.
LAST_BITS = 4e-7


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    return Beside(PROGRAM, tmp_path_factory.mktemp(PROGRAM))


@pytest.mark.parametrize("case", cases_of(PROGRAM))
def test_transformers_does_on_ours_what_it_does_on_torchs(beside, case):
    for ours, theirs in zip(beside.results("shardwise", case), beside.results("torch", case), strict=True):
        assert ours.pop("resumed", True)
        theirs.pop("resumed", None)
        if "-1-" in case:
            assert ours.pop("norms") == pytest.approx(theirs.pop("norms"), rel=LAST_BITS)
        assert differences(ours, theirs) == []
