"""Starts the ranks of a run on this machine, or joins the ranks that torchrun or Slurm started.

    shardwise train ──▶ N processes that rendezvous through a private file and communicate over loopback
    torchrun, srun  ──▶ this process is one of their ranks and joins their process group

The parent of ranks started here does not train. It forwards signals, ends the other ranks once one is gone, and
reports once what happened (``failures``).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from shardwise.errors import ConfigError, lost_its_peers
from shardwise.train.failures import (
    Failure,
    RankLog,
    describe_failures,
    describe_stop,
    log_length,
    log_path,
    remove_empty_logs,
    unreported_failure,
    with_crash_stack,
)
from shardwise.train.records import LOG, counted
from shardwise.train.rendezvous import store_of_torchrun
from shardwise.train.run_files import open_for_append, write_with_time
from shardwise.train.run_folder import CHECKPOINTS, LOGS

__all__ = [
    "AssignedRank",
    "exit_now",
    "given_ranks",
    "joined_process_group",
    "plan_ranks",
    "run_local_ranks",
]

_GRACE_SECONDS = 3.0
_STOPS = (signal.SIGTERM, signal.SIGINT)
_GROUP_TIMEOUT = timedelta(minutes=30)
Work = Callable[[torch.device], None]


# --- planning -----------------------------------------------------------------------------------------------------


def plan_ranks(ranks: int | None, device: str, num_gpus: int) -> tuple[int, str]:
    """Returns how many ranks to start, and on what kind of device.

    Raises:
        ConfigError: fewer than one rank, more ranks than GPUs, or CUDA on a machine without GPUs.
    """
    where = f"--ranks {ranks} --device {device}"
    if ranks is not None and ranks < 1:
        raise ConfigError(
            f"a run on {counted(ranks, 'rank')} was requested", where=where, fix="use --ranks 1 or more"
        )
    kind = device
    if kind == "auto":
        kind = "cuda" if num_gpus else "cpu"
    if kind == "cpu":
        return (2 if ranks is None else ranks), kind
    if not num_gpus:
        raise ConfigError(
            "this machine has no GPU", where=where, fix="use --device cpu; shardwise doctor says more"
        )
    if ranks is not None and ranks > num_gpus:
        raise ConfigError(
            f"{counted(ranks, 'rank')} were requested, but this machine has {counted(num_gpus, 'GPU')}",
            where=where,
            fix=f"use --ranks {num_gpus}, or --device cpu",
        )
    return (num_gpus if ranks is None else ranks), kind


@dataclass(frozen=True)
class AssignedRank:
    """The rank that torchrun or Slurm assigned to this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int


def given_ranks(environment: Mapping[str, str]) -> AssignedRank | None:
    """Returns the rank from torchrun's environment variables, or from Slurm's if it runs several tasks; else None."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return AssignedRank(
            int(environment["RANK"]),
            int(environment["WORLD_SIZE"]),
            int(environment.get("LOCAL_RANK", 0)),
            int(environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"])),
            environment.get("MASTER_ADDR", "127.0.0.1"),
            int(environment.get("MASTER_PORT", 29500)),
        )
    if "SLURM_PROCID" in environment and int(environment.get("SLURM_NTASKS", "1")) > 1:
        tasks = int(environment["SLURM_NTASKS"])
        hosts = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_NODELIST", "127.0.0.1"))
        port = 20000 + int(environment.get("SLURM_JOB_ID", "0")) % 20000
        num_hosts = int(environment.get("SLURM_NNODES", "1"))
        return AssignedRank(
            int(environment["SLURM_PROCID"]),
            tasks,
            int(environment.get("SLURM_LOCALID", "0")),
            max(1, tasks // num_hosts),
            environment.get("MASTER_ADDR", _first_host(hosts)),
            int(environment.get("MASTER_PORT", port)),
        )
    return None


def _first_host(hosts: str) -> str:
    """Returns the first host of a Slurm node list: gpu03 for ``gpu[03-05,9],login``."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", hosts)
    return hosts if match is None else match[1] + (match[2] or "")


# --- one rank -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def joined_process_group(
    assigned: AssignedRank, kind: str, rendezvous: str | None = None
) -> Iterator[torch.device]:
    """Makes this process a rank of the default process group, and yields its device.

    Raises:
        ConfigError: the host has fewer GPUs than ranks, or the address cannot be bound or reached.
    """
    device = torch.device("cpu")
    if kind == "cuda":
        num_gpus = torch.cuda.device_count()
        if assigned.local_rank >= num_gpus:
            raise ConfigError(
                f"the host is to run {counted(assigned.local_world_size, 'rank')}, but it has "
                f"{counted(num_gpus, 'GPU')}",
                where=f"rank {assigned.rank}",
                fix=f"start {counted(num_gpus, 'rank')} per host, or use --device cpu",
            )
        device = torch.device("cuda", assigned.local_rank)
        torch.cuda.set_device(device)
    try:
        if rendezvous is None and "TORCHELASTIC_RUN_ID" in os.environ:
            where_to_meet: dict[str, Any] = {"store": store_of_torchrun(_GROUP_TIMEOUT)}
        else:
            where_to_meet = {"init_method": rendezvous or f"tcp://{assigned.address}:{assigned.port}"}
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
            **where_to_meet,
            rank=assigned.rank,
            world_size=assigned.world_size,
            timeout=_GROUP_TIMEOUT,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise ConfigError(
            _why_no_rendezvous(error, assigned),
            where=f"rank {assigned.rank} of {assigned.world_size}",
            fix=_how_to_fix_rendezvous(error),
        ) from (error if lost_its_peers(error) else None)
    try:
        yield device
    finally:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _why_no_rendezvous(error: Exception, assigned: AssignedRank) -> str:
    first = str(error).splitlines()[0][:200]
    if "EADDRINUSE" in str(error) or "address already in use" in str(error):
        return f"port {assigned.port} of {assigned.address} is in use by another program"
    return f"the ranks could not rendezvous at {assigned.address}:{assigned.port}: {first}"


def _how_to_fix_rendezvous(error: Exception) -> str:
    if "EADDRINUSE" in str(error) or "address already in use" in str(error):
        return (
            "set MASTER_PORT to a free one (torchrun: --master-port or --rdzv-endpoint), or end that program"
        )
    return "check MASTER_ADDR, MASTER_PORT and that the hosts can reach each other; shardwise doctor checks this host"


# --- our own ranks ------------------------------------------------------------------------------------------------


def run_local_ranks(
    work: Work, num_ranks: int, kind: str, *, logs: Path | None = None, timeout_seconds: float | None = None
) -> int:
    """Runs ``work`` on ranks of this machine, and returns the exit status of them all.

    Args:
        work: what each rank runs.
        num_ranks: how many ranks to start.
        kind: the kind of device, ``cpu`` or ``cuda``.
        logs: the folder for the logs of failing ranks; None keeps no logs.
        timeout_seconds: when to end ranks that are still running; None lets them run.
    """
    # Forked ranks inherit all imports. CUDA does not survive a fork, so CUDA ranks are spawned.
    context: Any = multiprocessing.get_context("fork" if kind == "cpu" else "spawn")
    with tempfile.TemporaryDirectory(prefix="shardwise-") as private:
        folder = Path(private)
        are_logs_kept = logs is not None
        logs = folder / LOGS if logs is None else logs
        lengths = [log_length(log_path(logs, rank)) for rank in range(num_ranks)]
        # Ranks report through pipes, which work even if the disk is full or no file can be opened.
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        ranks: list[BaseProcess] = [
            context.Process(
                target=_run_as_rank,
                args=(work, rank, num_ranks, kind, folder, logs, pipes),
                name=f"rank {rank}",
            )
            for rank in range(num_ranks)
        ]
        try:
            with _forward_signals(ranks) as forwarded:
                failures = _start_and_wait(ranks, pipes, timeout_seconds)
        finally:
            with contextlib.suppress(OSError):
                remove_empty_logs(logs)
        own = [failure for failure in failures if failure.thread is None]
        if not own and all(process.exitcode == 0 for process in ranks):
            return 130 if signal.SIGINT in forwarded else 0
        stop_statuses = [-number for number in _STOPS]
        if forwarded and all(
            failure.is_consequence or ranks[failure.rank].exitcode in stop_statuses for failure in own
        ):
            _leave_live_display()
            stop = describe_stop(forwarded, logs.parent if are_logs_kept else None)
            print(f"error: {stop}", file=sys.stderr, flush=True)
            if are_logs_kept:
                _log_end(logs.parent, stop)
            return 128 + forwarded[0]
        failures = [with_crash_stack(failure, logs, lengths) for failure in failures]
        has_new_logs = any(log_length(log_path(logs, rank)) > lengths[rank] for rank in range(num_ranks))
        report = describe_failures(
            failures,
            num_ranks,
            logs if are_logs_kept and has_new_logs else None,
            logs.parent / CHECKPOINTS if are_logs_kept else None,
        )
        _leave_live_display()
        print(report, file=sys.stderr, flush=True)
        if are_logs_kept:
            _log_end(logs.parent, report)
        return 1


def _log_end(folder: Path, text: str) -> None:
    """Writes how a run ended into its log, if it has begun."""
    with contextlib.suppress(OSError):
        if (folder / LOG).exists():
            descriptor = open_for_append(folder / LOG)
            write_with_time(descriptor, text)
            os.close(descriptor)


def _leave_live_display() -> None:
    """Ends the last line of a terminal, and shows its cursor, which a rank that was killed has left hidden."""
    if sys.stdout.isatty():
        with contextlib.suppress(OSError):
            sys.stdout.write("\x1b[?25h\n")
            sys.stdout.flush()


@contextlib.contextmanager
def _forward_signals(ranks: list[BaseProcess]) -> Iterator[list[int]]:
    """Ends the ranks on SIGTERM or Ctrl-C; yields the signals that have arrived so far."""
    forwarded: list[int] = []

    def forward(number: int, _frame: Any) -> None:
        forwarded.append(number)
        for process in ranks:
            if process.pid is not None and process.is_alive():
                process.terminate()

    before = {number: signal.signal(number, forward) for number in _STOPS}
    try:
        yield forwarded
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        for number, handler in before.items():
            signal.signal(number, handler)


def _start_and_wait(
    ranks: list[BaseProcess], pipes: list[tuple[Connection, Connection]], timeout_seconds: float | None
) -> list[Failure]:
    """Starts the ranks, waits for them, kills those that remain, and returns the failures."""
    read_ends = [read_end for read_end, _ in pipes]
    try:
        # A forked rank inherits the signal handlers: signals stay blocked until the rank has reset them.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        for process in ranks:
            process.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        for _, write_end in pipes:
            write_end.close()
        return _wait_for_all(ranks, read_ends, timeout_seconds)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()
        for read_end in read_ends:
            read_end.close()


def _wait_for_all(
    ranks: list[BaseProcess], read_ends: list[Connection], timeout_seconds: float | None
) -> list[Failure]:
    """Waits until all ranks have ended, the time is up, or a grace period after the first failure is over.

    Returns:
        The failures before the caller ends the remaining ranks: as ranks reported them, or as seen from outside.
    """
    running = {process.sentinel: rank for rank, process in enumerate(ranks)}
    open_ends = {connection: rank for rank, connection in enumerate(read_ends)}
    failures: list[Failure] = []
    done: set[int] = set()
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    while running:
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait([*open_ends, *running], timeout=remaining)
        if not ready and deadline is not None:
            break
        num_before = len(failures)
        # Read reports before exits: a rank that ended meanwhile may be the cause of what others report.
        for each in sorted(ready, key=lambda each: not isinstance(each, Connection)):
            if isinstance(each, Connection):
                _receive_report(each, open_ends, failures, done)
                continue
            rank = running.pop(each)  # type: ignore[arg-type]
            ranks[rank].join()
            status = ranks[rank].exitcode or 0
            while read_ends[rank] in open_ends and rank not in done:
                _receive_report(read_ends[rank], open_ends, failures, done)
            if status or rank not in done:
                if all(failure.rank != rank or failure.thread for failure in failures):
                    failures.append(unreported_failure(rank, status, failures[num_before:]))
                # Peers that do not notice in this time that it is gone would wait for it forever.
                grace = time.monotonic() + _GRACE_SECONDS
                deadline = grace if deadline is None else min(deadline, grace)
    return failures


def _receive_report(
    connection: Connection, open_ends: dict[Connection, int], failures: list[Failure], done: set[int]
) -> None:
    """Receives one message of a rank, a failure or that it is done; drops the connection if no more will come."""
    try:
        if connection.poll(_GRACE_SECONDS):
            if message := connection.recv_bytes():
                failures.append(Failure(**json.loads(message)))
            else:
                done.add(open_ends[connection])
            return
    except (EOFError, OSError, ValueError):
        pass
    open_ends.pop(connection, None)


def _run_as_rank(
    work: Work,
    rank: int,
    num_ranks: int,
    kind: str,
    folder: Path,
    logs: Path,
    pipes: list[tuple[Connection, Connection]],
) -> None:
    """Runs ``work`` as one rank, in a process of its own."""
    # Only the rank itself keeps the write end of its pipe open, so the parent notices when the rank is gone.
    for number, (read_end, write_end) in enumerate(pipes):
        read_end.close()
        if number != rank:
            write_end.close()
    _die_with_parent()
    for stop in _STOPS:
        signal.signal(stop, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    os.environ.update(LOCAL_WORLD_SIZE=str(num_ranks), GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    report = partial(_send_report, pipes[rank][1], threading.Lock())
    log = RankLog(logs, rank, report)
    assigned = AssignedRank(rank, num_ranks, rank, num_ranks, "127.0.0.1", 0)

    def fail(error: BaseException) -> NoReturn:
        report(log.record_failure(error))
        exit_now(1)

    try:
        with joined_process_group(assigned, kind, f"file://{folder}/rendezvous") as device:
            try:
                work(device)
            except BaseException as error:  # noqa: BLE001  reported by the parent
                # Report before leaving the process group, which may take long: peers must not report first.
                fail(error)
    except BaseException as error:  # noqa: BLE001  reported by the parent
        fail(error)
    report(None)
    exit_now(0)


def exit_now(status: int) -> NoReturn:
    """Ends this rank's process at once: after a failure, its threads may be waiting for peers that are gone."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _die_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends, however it ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _send_report(write_end: Connection, one_at_a_time: threading.Lock, failure: Failure | None) -> None:
    """Reports to the parent how the rank failed, or that it is done, which exit status 0 alone does not prove."""
    # The parent may be gone.
    with one_at_a_time, contextlib.suppress(OSError):
        write_end.send_bytes(b"" if failure is None else json.dumps(asdict(failure)).encode())
