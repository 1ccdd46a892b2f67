"""What programs of Hugging Face's libraries must give on both sides."""

import pytest

from tests.ecosystem.beside import Beside, differences

LAST_BITS = 4e-7


def check_same(beside: Beside, case: str) -> None:
    """Compares bit for bit, but for norms of torch's wrapper (FSDP 1), which adds them up in another order."""
    results = (beside.results(side, case) for side in ("shardwise", "torch"))
    for ours, theirs in zip(*results, strict=True):
        # On torch's wrapper and a CPU, some optimizer state is lost; ours resumes wherever torch's does, and there too.
        assert ours.pop("resumed", True) or not theirs["resumed"]
        theirs.pop("resumed", None)
        if "-1-" in case:
            assert ours.pop("norms") == pytest.approx(theirs.pop("norms"), rel=LAST_BITS)
        assert differences(ours, theirs) == []
