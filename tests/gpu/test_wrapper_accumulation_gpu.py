"""`FullyShardedDataParallel` on GPUs: micro-batches in and out of `no_sync()`, on NCCL, with shards on the host too.

Ranks share GPUs where there are fewer than ranks.
"""

from __future__ import annotations

import pytest

from shardwise.testing import run_ranks
from tests.ranks import test_wrapper_accumulation as accumulation

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("offload", [False, True])
def test_micro_batches_in_and_out_of_no_sync_equal_one_batch(world_size, offload):
    differences = run_ranks(accumulation.accumulates, world_size, offload, kind="nccl", timeout_seconds=180)
    assert differences == [[]] * world_size
