"""What the rank tests judge: shardwise.

With `SHARDWISE_TEST_PEER=torch` in the environment they judge torch's own `fully_shard` instead. That checks
the tests, not the library: a test that is right about what both promise must pass there too. Where shardwise
promises more, the test is marked with `beyond_torch` and is skipped.
"""

from __future__ import annotations

import os

import pytest

TORCH_IS_THE_SUBJECT = os.environ.get("SHARDWISE_TEST_PEER") == "torch"

if TORCH_IS_THE_SUBJECT:
    from tests.ranks.torch_peer import (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        UnshardHandle,
        fully_shard,
        record,
    )
else:
    from shardwise import (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        UnshardHandle,
        fully_shard,
    )
    from shardwise.trace import record

__all__ = [
    "TORCH_IS_THE_SUBJECT",
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "beyond_torch",
    "fully_shard",
    "record",
]

beyond_torch = pytest.mark.skipif(TORCH_IS_THE_SUBJECT, reason="shardwise promises this, torch does not")
