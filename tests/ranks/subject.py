"""Selects the library that the rank tests test: shardwise.

With `SHARDWISE_TEST_PEER=torch` in the environment they test torch's own `fully_shard` instead. That checks
the tests, not the library: a correct test of what both libraries promise must pass with torch, too. A test of
what only shardwise promises is marked with `beyond_torch` and skipped.
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
