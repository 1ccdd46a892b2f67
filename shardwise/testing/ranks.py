"""Run a function on N ranks: the one entry to ranks as threads, as processes, and on GPUs.

    def check(rows):
        rank = dist.get_rank()          # the default group is there
        ...
        return loss.item()

    losses = run_ranks(check, 4, 17)                    # four threads
    losses = run_ranks(check, 4, 17, kind="gloo")       # four processes

It is for tests, demos and experiments on one machine. It launches no jobs over several machines and restarts
nothing: that is torchrun's work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from shardwise.errors import ConfigError
from shardwise.testing.processes import ProcessKind, run_processes
from shardwise.testing.threads import run_threads

__all__ = ["Kind", "run_ranks"]

Result = TypeVar("Result")
Kind = Literal["threads", "gloo", "nccl", "gloo-cuda"]

_PROCESS_KINDS = {
    "gloo": ProcessKind(backend="gloo", on_gpu=False),
    "nccl": ProcessKind(backend="nccl", on_gpu=True),
    "gloo-cuda": ProcessKind(backend="gloo", on_gpu=True),
}


def run_ranks(
    fn: Callable[..., Result],
    world_size: int,
    *args: Any,
    kind: Kind = "threads",
    timeout_seconds: float = 300.0,
    **kwargs: Any,
) -> list[Result]:
    """Call ``fn(*args, **kwargs)`` on every rank of a fresh default group; the results, in rank order.

    Args:
        fn: what each rank runs; it learns its rank from ``dist.get_rank()``. For process kinds it is a
            function at the top level of an importable module or of a test file, and its arguments and results
            pickle (return CPU tensors).
        world_size: how many ranks.
        kind: ``"threads"``: ranks are threads of this process and share the default random generator.
            ``"gloo"``: ranks are processes of a reused pool, with one compute thread each (or as many as
            ``OMP_NUM_THREADS`` says) and seed 0 at the start of each call.
            ``"nccl"``, ``"gloo-cuda"``: the same, each with its CUDA device set; ranks share GPUs where there
            are fewer than ranks.
        timeout_seconds: how long the call may take, from the moment the ranks are there.

    Raises:
        RankFailure: a rank raised or died. The message holds its number and traceback, and what became of the
            other ranks; peers that wait for it are ended after about two seconds.
        RankTimeout: ranks were still running when the time was up. The message holds the stack of each.
    """
    name = getattr(fn, "__qualname__", None) or repr(fn)
    call = f"run_ranks({name}, {world_size}, kind={kind!r})"
    if not isinstance(world_size, int) or world_size < 1:
        raise ConfigError(
            f"world_size is {world_size!r}", where=call, fix="pass a number of ranks, 1 or more"
        )
    if kind == "threads":
        return run_threads(fn, world_size, args, kwargs, call=call, timeout_seconds=timeout_seconds)
    if kind not in _PROCESS_KINDS:
        known = ", ".join(repr(known) for known in ("threads", *_PROCESS_KINDS))
        raise ConfigError(f"kind is {kind!r}", where=call, fix=f"use one of {known}")
    return run_processes(
        _PROCESS_KINDS[kind], fn, world_size, args, kwargs, call=call, timeout_seconds=timeout_seconds
    )
