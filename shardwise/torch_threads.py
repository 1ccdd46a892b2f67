"""Threads as ranks, with the threaded process group of torch's own tests. The only file that uses its underscore names.

It is imported only when ranks are threads. Checked on torch 2.11 and 2.13, like ``torch_internals``.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist


@contextmanager
def threaded_world() -> Iterator[None]:
    """Gives each thread its own process groups, looked up by name per thread, while the context is open."""
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    c10d = dist.distributed_c10d
    world_of_the_process = c10d._world
    # Every rank that creates a group wraps the hook for uncaught errors once more.
    hook_of_the_process = sys.excepthook
    threaded.ProcessLocalGroup.reset()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    world = threaded.ThreadLocalWorld()
    if not hasattr(type(world), "comms"):
        # torch 2.11 lacks this field, but reads it whenever a group is destroyed.
        world.comms = []  # type: ignore[misc]
    c10d._world = world  # type: ignore[assignment]
    try:
        with _random_state_read_by_one_thread():
            yield
    finally:
        sys.excepthook = hook_of_the_process
        c10d._world = world_of_the_process
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]


@contextmanager
def _random_state_read_by_one_thread() -> Iterator[None]:
    """Keeps garbage collection out of ``torch.get_rng_state()``, which activation checkpointing calls.

    It holds the generator's mutex while it makes a tensor. A collection there may hand the interpreter to another
    thread, which waits for that mutex without giving the interpreter back.
    """
    read, lock = torch.get_rng_state, threading.Lock()

    def get_rng_state() -> torch.Tensor:
        with lock:
            collects = gc.isenabled()
            gc.disable()
            try:
                return read()
            finally:
                if collects:
                    gc.enable()

    torch.get_rng_state = torch.random.get_rng_state = get_rng_state
    try:
        yield
    finally:
        torch.get_rng_state = torch.random.get_rng_state = read


def start_threaded_rank(
    rank: int,
    world_size: int,
    store: dist.Store,  # type: ignore[name-defined]
    *,
    call_number: int,
    timeout: timedelta,
) -> None:
    """Makes this thread rank ``rank`` of a default group; group names are unique for each call number."""
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

    # Left over on this thread by an earlier call that failed before it destroyed its groups.
    ThreadLocalWorld._world.__dict__.clear()
    dist.distributed_c10d._world.group_count = call_number * 1_000_000
    # A thread of autograd's engine would not know its rank.
    torch._C._set_multithreading_enabled(False)
    dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store, timeout=timeout)


def stop_threaded_ranks() -> None:
    """Makes ranks that are in a collective, or enter one, raise ``SystemExit``."""
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
