"""Torch's own modules train sharded as they do unsharded on GPUs, too.

Within rounding: for weights that lie elsewhere in memory, cuDNN may take another of its algorithms.
"""

from __future__ import annotations

import pytest

from shardwise.testing import run_ranks
from tests.ranks.test_torch_modules import APIS, different_losses

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]


@pytest.mark.parametrize("api", APIS)
def test_torchs_modules_train_as_unsharded(api):
    found = run_ranks(different_losses, 2, api, "cuda", tolerance=1e-4, kind="nccl", timeout_seconds=140)
    assert found == [{}] * 2
