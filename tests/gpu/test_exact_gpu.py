"""Exact sums on GPUs: NCCL ranks come to the same bits whatever their number, with shards on the device or the host."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise import CPUOffloadPolicy
from shardwise.testing import run_ranks
from tests.ranks.test_exact import differing, trained

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

PLACES = {
    1: [("fully_shard", "full"), ("wrapper", "kept")],
    2: [("fully_shard", "kept"), ("wrapper", "replicas")],
    4: [("fully_shard", "hybrid"), ("wrapper", "full")],
}
MLP, TRANSFORMER = ("odd MLP", "fp32"), ("tied transformer", "bf16")


def train_all(places):
    # Kernels that add in no fixed order would make a difference that sums cannot take away.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            results = [
                (what, trained(what[0], api, mode, what[1], device="cuda"))
                for api, mode in places
                for what in (MLP, TRANSFORMER)
            ]
            # The host's kernels step an optimizer in their own way: such runs are compared among themselves.
            on_host = trained(
                MLP[0], "fully_shard", "full", "fp32", device="cuda", offload_policy=CPUOffloadPolicy()
            )
            return [*results, ("on the host", on_host)]
    finally:
        torch.use_deterministic_algorithms(False)


def test_training_comes_to_the_same_bits_on_any_number_of_nccl_ranks():
    first = {}
    for world_size, places in PLACES.items():
        for number, (what, result) in enumerate(
            run_ranks(train_all, world_size, places, kind="nccl", timeout_seconds=140)[0]
        ):
            assert not differing(first.setdefault(what, result), result), (world_size, what, number)
