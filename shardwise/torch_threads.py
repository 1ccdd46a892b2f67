"""Threads as ranks, by the threaded group that torch keeps among its own tests: the door to its underscore names.

Nothing of it is imported before ranks are threads. Checked on torch 2.11 and 2.13, like ``torch_internals.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist


@contextmanager
def threaded_world() -> Iterator[None]:
    """While it is open, each thread has process groups of its own, and groups are found by name per thread."""
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    c10d = dist.distributed_c10d
    world_of_the_process = c10d._world
    # Every rank that starts a group puts its name before what an uncaught error prints, on top of all earlier ones.
    hook_of_the_process = sys.excepthook
    threaded.ProcessLocalGroup.reset()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    world = threaded.ThreadLocalWorld()
    if not hasattr(type(world), "comms"):
        # torch 2.11 forgot this field, and ends every group by looking into it.
        world.comms = []  # type: ignore[misc]
    c10d._world = world  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.excepthook = hook_of_the_process
        c10d._world = world_of_the_process
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]


def start_threaded_rank(
    rank: int,
    world_size: int,
    store: dist.Store,  # type: ignore[name-defined]
    *,
    call_number: int,
    timeout: timedelta,
) -> None:
    """Makes this thread rank ``rank`` of a default group whose group names no other call number has."""
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

    # What an earlier call left on this thread, if it failed before it could end its groups.
    ThreadLocalWorld._world.__dict__.clear()
    dist.distributed_c10d._world.group_count = call_number * 1_000_000
    # An engine thread of autograd would not know which rank it works for.
    torch._C._set_multithreading_enabled(False)
    dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store, timeout=timeout)


def stop_threaded_ranks() -> None:
    """Ranks that wait in a collective, or enter one, leave by ``SystemExit``."""
    from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

    ProcessLocalGroup._terminate.set()
    with ProcessLocalGroup._coll_lock:
        collectives = list(ProcessLocalGroup._cur_coll_on_pgs.values())
    for collective in collectives:
        for condition in (collective._start_cond, collective._done_cond):
            with condition:
                condition.notify_all()


def threaded_ranks_are_stopping() -> bool:
    from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

    return ProcessLocalGroup._terminate.is_set()
