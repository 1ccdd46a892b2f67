"""On NCCL ranks, too, a unit that is reduced slice by slice trains bit by bit as one that is reduced at once."""

from __future__ import annotations

import pytest
import torch

from shardwise import CPUOffloadPolicy
from shardwise.testing import run_ranks
from tests.ranks.test_slices import POLICIES, compare

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]


def compare_on_the_gpu():
    # Kernels that add in no fixed order would make a difference of their own.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        compare(
            ("odd MLP", "branches"),
            {**POLICIES, "pinned host": {"offload_policy": CPUOffloadPolicy()}},
            "cuda",
        )
    finally:
        torch.use_deterministic_algorithms(False)


def test_slices_come_to_the_same_bits_on_nccl_ranks():
    # Two ranks: a sum of two is the same in either order, whichever way NCCL chooses for a size.
    run_ranks(compare_on_the_gpu, 2, kind="nccl", timeout_seconds=140)
