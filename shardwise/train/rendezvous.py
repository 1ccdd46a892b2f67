"""The store in which ranks that torchrun started meet: one of its own for every start.

torchrun starts ranks again after a failure, and its store keeps what the ranks before them left there, as addresses
that nobody listens on any more. So rank 0 names each start, and tells the name to the ranks that it hears of:

    rank 1    start/1 = TOKEN ──▶ rank 0        every process has a token of its own
    rank 0    start/TOKEN = NAME ──▶ rank 1     a token of a process that is gone has no reader
    rank 1    NAME/1 ──▶ rank 0                 until then, rank 0 looks for newer tokens
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

__all__ = ["meet", "store_of_torchrun"]

_PREFIX = "shardwise/start"
_POLL_SECONDS = 0.02


def store_of_torchrun(timeout: timedelta) -> dist.Store:  # type: ignore[name-defined]
    """Returns the store of this start of the ranks, where torchrun's environment says that they meet."""
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timeout)))  # type: ignore[attr-defined]
    return meet(store, rank, world_size, timeout)


def meet(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:  # type: ignore[name-defined]
    """Returns the part of a store that belongs to the ranks of this start alone.

    Raises:
        DistError: not all ranks came in time.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"{_PREFIX}/{rank}", own)
        store.wait([f"{_PREFIX}/{own}"], timeout)
        name = store.get(f"{_PREFIX}/{own}").decode()
        store.set(f"{_PREFIX}/{name}/{rank}", "")
    else:
        name = own
        deadline = time.monotonic() + timeout.total_seconds()
        for other in range(1, world_size):
            store.wait([f"{_PREFIX}/{other}"], timedelta(seconds=max(1.0, deadline - time.monotonic())))
            while not store.check([f"{_PREFIX}/{name}/{other}"]):
                token = store.get(f"{_PREFIX}/{other}").decode()
                store.set(f"{_PREFIX}/{token}", name)
                if time.monotonic() > deadline:
                    raise dist.DistStoreError(f"rank {other} did not come in {timeout}")
                time.sleep(_POLL_SECONDS)
    return dist.PrefixStore(f"{_PREFIX}/{name}", store)  # type: ignore[attr-defined]
