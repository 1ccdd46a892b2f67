"""Ranks that torchrun starts again meet each other, and not what is left of the ranks before them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from shardwise.train.rendezvous import meet

WORLD_SIZE = 3
LONG = timedelta(minutes=5)


def start(store, last):
    """Starts the ranks, ``last`` after the others have left their first message; returns each rank's part."""
    here = threading.Barrier(WORLD_SIZE)

    def run(rank):
        if rank == last:
            here.wait()
            return meet(store, rank, WORLD_SIZE, LONG)
        threading.Timer(0, here.wait).start()
        return meet(store, rank, WORLD_SIZE, LONG)

    with ThreadPoolExecutor(WORLD_SIZE) as ranks:
        return list(ranks.map(run, range(WORLD_SIZE)))


@pytest.mark.parametrize("last", range(WORLD_SIZE))
def test_ranks_that_are_started_again_meet_in_a_part_of_the_store_of_their_own(last):
    store = dist.HashStore()
    for number in range(3):
        parts = start(store, last)
        assert not any(part.check([f"address of {rank}"]) for part in parts for rank in range(WORLD_SIZE))
        for rank, part in enumerate(parts):
            part.set(f"address of {rank}", str(number))
        assert all(
            part.get(f"address of {rank}") == str(number).encode()
            for part in parts
            for rank in range(WORLD_SIZE)
        )


def test_a_rank_that_does_not_come_is_not_waited_for_forever():
    with pytest.raises(dist.DistError):
        meet(dist.HashStore(), 0, 2, timedelta(seconds=0.1))
