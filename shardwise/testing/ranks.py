"""Runs a function on N ranks: the one entry point for ranks as threads, as processes, and on GPUs.

    def check(rows):
        rank = dist.get_rank()          # the default group is initialized
        ...
        return loss.item()

    losses = run_ranks(check, 4, 17)                    # four threads
    losses = run_ranks(check, 4, 17, kind="gloo")       # four processes

It is for tests, demos and experiments on one machine. It does not launch jobs across machines or restart
failed ranks: use torchrun for that.
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
    """Call ``fn(*args, **kwargs)`` on every rank of a new default group and return the results in rank order.

    Args:
        fn: the function each rank runs; it gets its rank from ``dist.get_rank()``. For process kinds it must be
            at the top level of an importable module or of a test file, and its arguments and results must
            pickle (return CPU tensors).
        world_size: the number of ranks.
        kind: ``"threads"``: ranks are threads of this process and share the default random generator.
            ``"gloo"``: ranks are processes of a reused pool, with one compute thread each (or as many as
            ``OMP_NUM_THREADS`` says) and seed 0 at the start of each call.
            ``"nccl"``, ``"gloo-cuda"``: the same, each with its CUDA device set; ranks share GPUs if there are
            fewer GPUs than ranks.
        timeout_seconds: how long the call may take once the ranks have started.

    Raises:
        RankFailure: a rank raised or died. The message contains its rank and traceback, and how the other
            ranks ended; peers that wait for it are stopped after about two seconds.
        RankTimeout: ranks were still running at the timeout. The message contains the stack of each.
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
