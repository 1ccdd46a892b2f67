"""Ranks as processes: a pool that is started once and used by every call.

    run(2 ranks)   worker 0, worker 1
    run(4 ranks)   worker 0, worker 1, worker 2 (new), worker 3 (new)
    run(2 ranks)   worker 0, worker 1
    a rank fails   its call's workers are retired; the next call starts fresh ones in their places

Worker i is always rank i, because NCCL reads some of its environment once in the life of a process. Workers
are forked from a server that has imported torch and never touches CUDA, so a new one is there in a moment.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import ConfigError, StateError
from shardwise.testing.failures import Outcome, RankReport, failure_of
from shardwise.testing.worker import CLEAN_UP, Answer, Job, serve

__all__ = ["ProcessKind", "close_pools", "run_processes"]

_START_SECONDS = 120.0
# After the first failure the others may still tell their own story; then the failed ranks end, which wakes
# those that wait for them; then whoever is left is ended.
_OWN_STORY_SECONDS = 0.3
_GRACE_SECONDS = 2.0
_STACK_SECONDS = 1.0

_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.distributed.tensor.debug",
    "shardwise.testing.worker",
]

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
    """A backend, and whether its ranks own a GPU."""

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
    """Call ``fn`` on ``world_size`` processes of the pool; results in rank order."""
    if multiprocessing.parent_process() is not None and multiprocessing.current_process().daemon:
        raise StateError(
            "run_ranks was called on a rank", where=call, fix="start all ranks from outside, in one call"
        )
    num_devices = torch.cuda.device_count() if kind.on_gpu else 0
    if kind.on_gpu and num_devices == 0:
        raise ConfigError(
            "there is no CUDA device here", where=call, fix="use kind='gloo' or 'threads', or skip this test"
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
    """End every rank process. Later calls start new ones."""
    with _pools_lock:
        for pool in _pools.values():
            pool.close()
        _pools.clear()


# A fresh worker has a handful; a group adds three.
_MOST_THREADS = 32


class _Worker:
    """One rank process, as its caller sees it. Born ready for jobs after ``wait_until_ready``."""

    def __init__(self, index: int, stack_path: Path, environment: dict[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._stack_path = stack_path
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=serve,
            args=(theirs, str(stack_path), environment),
            name=f"shardwise rank {index}",
            daemon=True,
        )
        self.process.start()
        theirs.close()

    def wait_until_ready(self, deadline: float) -> None:
        if not self.connection.poll(max(0.0, deadline - time.monotonic())):
            raise StateError(
                f"a rank process did not start within {_START_SECONDS:g} seconds",
                where=f"process {self.process.pid}",
            )
        try:
            self.connection.recv_bytes()
        except EOFError:
            raise StateError(
                f"a rank process ended while it started ({self.ending()})",
                fix="guard the main program with if __name__ == '__main__', and see its error output above",
            ) from None

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def num_threads(self) -> int:
        """Threads of the process, where the system tells; 0 where it does not."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        return len(list(tasks.iterdir())) if tasks.exists() else 0

    def ask_for_stack(self) -> None:
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)

    def stack(self) -> str:
        """What the process wrote when it was asked, or when it crashed."""
        try:
            return _without_own_frames(self._stack_path.read_text())
        except OSError:
            return ""

    def ending(self) -> str:
        self.process.join(1.0)
        code = self.process.exitcode
        if code is None:
            return "closed its pipe"
        if code >= 0:
            return f"exited with code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"

    def end(self) -> None:
        """By its own process id, whatever it is doing."""
        self.connection.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join(5.0)
        self._stack_path.unlink(missing_ok=True)

    def leave(self) -> None:
        """An idle worker ends by itself when its pipe closes."""
        self.connection.close()
        self.process.join(1.0)
        self.end()


class _Pool:
    """Worker processes by rank, and the one call that uses them at a time."""

    def __init__(self, *, crowded: bool) -> None:
        self._crowded = crowded
        self._folder = Path(tempfile.mkdtemp(prefix="shardwise-ranks-"))
        self._workers: list[_Worker | None] = []
        self._lock = threading.Lock()
        self._num_started = 0
        self._num_calls = 0

    def close(self) -> None:
        with self._lock:
            for worker in self._workers:
                if worker is not None:
                    worker.leave()
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
                    # Longer than the call's: a hang is told here, where every rank's stack can be shown.
                    group_timeout_seconds=timeout_seconds + 60.0,
                    import_path=tuple(sys.path),
                    warning_filters=_dump_warning_filters(),
                    function=function,
                )
                for rank in range(world_size)
            ]
            healthy = False
            try:
                exchange = _Exchange(workers, timeout_seconds)
                answers = exchange.run(jobs)
                healthy = exchange.all_well
            finally:
                # After a failure, a hang, or an interrupt: nobody can say what state these are in. And a call may
                # leave groups behind whose threads slow all that follow (a hook that holds its model, say).
                if not healthy or any(worker.num_threads() > _MOST_THREADS for worker in workers):
                    self._retire(world_size)
                store_path.unlink(missing_ok=True)
        if not healthy:
            raise failure_of(exchange.reports(), call=call, timeout_seconds=timeout_seconds)
        return [pickle.loads(answer.result) for answer in answers]

    def _ready_workers(self, world_size: int) -> list[_Worker]:
        self._workers.extend([None] * (world_size - len(self._workers)))
        new: list[_Worker] = []
        ready: list[_Worker] = []
        try:
            for index in range(world_size):
                worker = self._workers[index]
                if worker is None or not worker.is_alive():
                    if worker is not None:
                        worker.end()
                    worker = self._start(index)
                    self._workers[index] = worker
                    new.append(worker)
                ready.append(worker)
            deadline = time.monotonic() + _START_SECONDS
            for worker in new:
                worker.wait_until_ready(deadline)
        except BaseException:
            self._retire(world_size)
            raise
        return ready

    def _start(self, index: int) -> _Worker:
        environment = dict(_LOOPBACK)
        if self._crowded:
            environment.update(_CROWDED, NCCL_HOSTID=f"node{index}")
        self._num_started += 1
        return _Worker(index, self._folder / f"stack-{self._num_started}", environment)

    def _retire(self, world_size: int) -> None:
        for index in range(world_size):
            worker = self._workers[index]
            self._workers[index] = None
            if worker is not None:
                worker.end()


class _Exchange:
    """One call's talk with its workers: jobs out, answers in, until all are through or something fails."""

    def __init__(self, workers: list[_Worker], timeout_seconds: float) -> None:
        self._workers = workers
        self._timeout_seconds = timeout_seconds
        self._answers: dict[int, Answer] = {}
        self._failed: dict[int, RankReport] = {}
        self._stacks: dict[int, str] = {}
        self.all_well = False

    def run(self, jobs: list[Job]) -> list[Answer]:
        deadline = time.monotonic() + self._timeout_seconds
        for rank, (worker, job) in enumerate(zip(self._workers, jobs, strict=True)):
            self._send(rank, worker, pickle.dumps(job))
        waiting = self._receive(set(range(len(jobs))) - set(self._failed), deadline, self._take_answer)
        if self._failed:
            self._let_the_others_end(waiting)
            return []
        if waiting:
            self._collect_stacks(waiting)
            return []
        for rank, worker in enumerate(self._workers):
            self._send(rank, worker, CLEAN_UP)
        waiting = self._receive(set(range(len(jobs))) - set(self._failed), deadline, self._take_done)
        if waiting and not self._failed:
            self._collect_stacks(waiting)
        self.all_well = not waiting and not self._failed
        return [self._answers[rank] for rank in range(len(jobs))]

    def reports(self) -> list[RankReport]:
        reports = []
        for rank in range(len(self._workers)):
            if rank in self._failed:
                reports.append(self._failed[rank])
            elif rank in self._stacks:
                details = self._stacks[rank] or "(its process did not answer the request for its stack)"
                reports.append(RankReport(rank, Outcome.HUNG, "was still running, here:", details))
            elif rank in self._answers:
                reports.append(RankReport(rank, Outcome.FINISHED))
            else:
                reports.append(RankReport(rank, Outcome.TORN_DOWN))
        return reports

    def _send(self, rank: int, worker: _Worker, message: bytes) -> None:
        try:
            worker.connection.send_bytes(message)
        except OSError:
            self._note_death(rank)

    def _receive(
        self, waiting: set[int], deadline: float, take: Callable[[int, bytes], None], *, through: bool = False
    ) -> set[int]:
        """Take messages until nobody is waited for, the time is up or, unless ``through``, a rank failed."""
        rank_of = {self._workers[rank].connection: rank for rank in waiting}
        while rank_of and (through or not self._failed):
            remaining = deadline - time.monotonic()
            ready = wait(list(rank_of), timeout=max(0.0, remaining))
            if not ready and remaining <= 0:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = rank_of.pop(connection)
                try:
                    message = connection.recv_bytes()
                except (EOFError, OSError):
                    self._note_death(rank)
                else:
                    take(rank, message)
        return set(rank_of.values())

    def _take_answer(self, rank: int, message: bytes) -> None:
        answer: Answer = pickle.loads(message)
        if answer.ok:
            self._answers[rank] = answer
            return
        torn_down = answer.lost_its_peers
        self._failed[rank] = RankReport(
            rank,
            Outcome.TORN_DOWN if torn_down else Outcome.RAISED,
            summary=answer.summary,
            details=answer.details,
            at_seconds=answer.at_seconds,
            exception=_load_exception(answer.exception),
        )

    def _take_done(self, rank: int, message: bytes) -> None:
        """The rank has cleaned up after itself; there is nothing more to know."""

    def _note_death(self, rank: int) -> None:
        worker = self._workers[rank]
        self._failed[rank] = RankReport(
            rank, Outcome.DIED, summary=worker.ending(), details=worker.stack(), at_seconds=time.monotonic()
        )

    def _let_the_others_end(self, waiting: set[int]) -> None:
        waiting = self._receive(
            waiting, time.monotonic() + _OWN_STORY_SECONDS, self._take_answer, through=True
        )
        deaths_before = set(self._failed)
        for rank in deaths_before:
            self._workers[rank].connection.close()
        self._receive(waiting, time.monotonic() + _GRACE_SECONDS, self._take_answer, through=True)
        # Whoever died only now was killed by the loss of its peers, not by a fault of its own.
        for rank in set(self._failed) - deaths_before:
            report = self._failed[rank]
            if report.outcome is Outcome.DIED:
                self._failed[rank] = RankReport(
                    rank, Outcome.TORN_DOWN, report.summary, report.details, report.at_seconds
                )
        if all(report.outcome is Outcome.TORN_DOWN for report in self._failed.values()):
            # Nobody admits to a fault: then the loss of a peer is the fault, and must be shown in full.
            for rank, report in list(self._failed.items()):
                self._failed[rank] = RankReport(
                    rank, Outcome.RAISED, report.summary, report.details, report.at_seconds, report.exception
                )

    def _collect_stacks(self, waiting: set[int]) -> None:
        for rank in waiting:
            self._workers[rank].ask_for_stack()
        deadline = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < deadline:
            self._stacks = {rank: self._workers[rank].stack() for rank in waiting}
            if all(self._stacks.values()):
                # A dump is written in several parts: give the last of them its time.
                time.sleep(0.1)
                break
            time.sleep(0.02)
        self._stacks = {rank: self._workers[rank].stack() for rank in waiting}


def _dump_warning_filters() -> bytes:
    try:
        return pickle.dumps(list(warnings.filters))
    except Exception:  # noqa: BLE001  a filter on a local class cannot travel; the worker keeps its own filters
        return b""


def _load_exception(dumped: bytes) -> BaseException | None:
    if not dumped:
        return None
    try:
        error = pickle.loads(dumped)
    except Exception:  # noqa: BLE001  the traceback text is always there; the object is a convenience
        return None
    return error if isinstance(error, BaseException) else None


def _without_own_frames(dump: str) -> str:
    """Leave out what every worker has: the thread that follows the caller, and the loop that takes jobs."""
    blocks = [block for block in dump.split("\n\n") if "_follow_the_caller" not in block]
    lines = "\n\n".join(blocks).splitlines()
    ends = [index for index, line in enumerate(lines) if line.endswith(" in _do")]
    return "\n".join(lines[: ends[0]] if ends else lines).strip()
