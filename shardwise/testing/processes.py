"""Runs ranks as processes of a pool that is started once and reused by every call.

    run(2 ranks)   worker 0, worker 1
    run(4 ranks)   worker 0, worker 1, worker 2 (new), worker 3 (new)
    run(2 ranks)   worker 0, worker 1
    a rank fails   the workers of its call are killed; the next call starts new ones

Worker i is always rank i, because NCCL reads some environment variables only once in the life of a process.
Workers are forked from a server that has imported torch and never touches CUDA, so a new one starts quickly.
"""

from __future__ import annotations

import atexit
import multiprocessing
import pickle
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import ConfigError, StateError
from shardwise.testing.failures import failure_of
from shardwise.testing.pool_call import PoolCall
from shardwise.testing.worker import START_SECONDS, Job, Worker

__all__ = ["ProcessKind", "close_pools", "run_processes"]

_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
# NCCL refuses two ranks on one GPU of one host, so each rank claims a host of its own.
_CROWDED = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_MAX_CTAS": "4",
}


@dataclass(frozen=True)
class ProcessKind:
    """A backend, and whether its ranks use GPUs."""

    backend: str
    on_gpu: bool


def run_processes(
    kind: ProcessKind,
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    call: str,
    timeout_seconds: float,
) -> list[Any]:
    """Call ``fn`` on ``world_size`` processes of the pool and return the results in rank order."""
    if multiprocessing.parent_process() is not None and multiprocessing.current_process().daemon:
        raise StateError(
            "run_ranks was called on a rank", where=call, fix="start all ranks from outside, in one call"
        )
    num_devices = torch.cuda.device_count() if kind.on_gpu else 0
    if kind.on_gpu and num_devices == 0:
        raise ConfigError(
            "this machine has no CUDA device",
            where=call,
            fix="use kind='gloo' or 'threads', or skip this test",
        )
    try:
        function = pickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise ConfigError(
            f"{getattr(fn, '__qualname__', fn)} and its arguments cannot be sent to another process: {error}",
            where=call,
            fix="use a function at the top level of a module and arguments that pickle, or kind='threads'",
        ) from error
    pool = _pool(on_gpu=kind.on_gpu, crowded=kind.on_gpu and num_devices < world_size)
    return pool.run(
        kind.backend, function, world_size, num_devices, call=call, timeout_seconds=timeout_seconds
    )


# A new worker has a handful of threads; each process group adds three.
_MOST_THREADS = 32

_pools: dict[tuple[bool, bool], _Pool] = {}
_pools_lock = threading.Lock()


def _pool(*, on_gpu: bool, crowded: bool) -> _Pool:
    with _pools_lock:
        key = (on_gpu, crowded)
        if key not in _pools:
            _pools[key] = _Pool(crowded=crowded)
        return _pools[key]


@atexit.register
def close_pools() -> None:
    """End all rank processes. Later calls start new ones."""
    with _pools_lock:
        for pool in _pools.values():
            pool.close()
        _pools.clear()


class _Pool:
    """Worker processes by rank, used by one call at a time."""

    def __init__(self, *, crowded: bool) -> None:
        self._crowded = crowded
        self._folder = Path(tempfile.mkdtemp(prefix="shardwise-ranks-"))
        self._workers: list[Worker | None] = []
        self._lock = threading.Lock()
        self._num_started = 0
        self._num_calls = 0

    def close(self) -> None:
        with self._lock:
            for worker in self._workers:
                if worker is not None:
                    worker.close()
            self._workers = []
            shutil.rmtree(self._folder, ignore_errors=True)

    def run(
        self,
        backend: str,
        function: bytes,
        world_size: int,
        num_devices: int,
        *,
        call: str,
        timeout_seconds: float,
    ) -> list[Any]:
        with self._lock:
            workers = self._ready_workers(world_size)
            self._num_calls += 1
            store_path = self._folder / f"store-{self._num_calls}"
            jobs = [
                Job(
                    rank=rank,
                    world_size=world_size,
                    backend=backend,
                    device_index=rank % num_devices if num_devices else None,
                    store_path=str(store_path),
                    # Longer than the call's, so that the caller reports a hang: it can show every rank's stack.
                    group_timeout_seconds=timeout_seconds + 60.0,
                    import_path=tuple(sys.path),
                    warning_filters=_dump_warning_filters(),
                    function=function,
                )
                for rank in range(world_size)
            ]
            healthy = False
            try:
                pool_call = PoolCall(workers, timeout_seconds)
                answers = pool_call.run(jobs)
                healthy = pool_call.succeeded
            finally:
                # After a failure, a hang or an interrupt, workers are in an unknown state. Also, a call may leak
                # process groups (through a hook that holds its model, say), whose threads slow down later calls.
                if not healthy or any(worker.num_threads() > _MOST_THREADS for worker in workers):
                    self._retire(world_size)
                store_path.unlink(missing_ok=True)
        if not healthy:
            raise failure_of(pool_call.reports(), call=call, timeout_seconds=timeout_seconds)
        return [pickle.loads(answer.result) for answer in answers]

    def _ready_workers(self, world_size: int) -> list[Worker]:
        self._workers.extend([None] * (world_size - len(self._workers)))
        new: list[Worker] = []
        ready: list[Worker] = []
        try:
            for index in range(world_size):
                worker = self._workers[index]
                if worker is None or not worker.is_alive():
                    if worker is not None:
                        worker.kill()
                    worker = self._start(index)
                    self._workers[index] = worker
                    new.append(worker)
                ready.append(worker)
            deadline = time.monotonic() + START_SECONDS
            for worker in new:
                worker.wait_until_ready(deadline)
        except BaseException:
            self._retire(world_size)
            raise
        return ready

    def _start(self, index: int) -> Worker:
        environment = dict(_LOOPBACK)
        if self._crowded:
            environment.update(_CROWDED, NCCL_HOSTID=f"node{index}")
        self._num_started += 1
        return Worker(index, self._folder / f"stack-{self._num_started}", environment)

    def _retire(self, world_size: int) -> None:
        for index in range(world_size):
            worker = self._workers[index]
            self._workers[index] = None
            if worker is not None:
                worker.kill()


def _dump_warning_filters() -> bytes:
    try:
        return pickle.dumps(list(warnings.filters))
    except Exception:  # noqa: BLE001  a filter on a local class does not pickle; the worker keeps its own filters
        return b""
