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
    with_crash,
)
from shardwise.train.run_folder import CHECKPOINTS, LOGS

__all__ = ["Given", "given_ranks", "joined", "leave", "plan_ranks", "run_own_ranks"]

_GRACE_SECONDS = 3.0
_STOPS = (signal.SIGTERM, signal.SIGINT)
_TALK_TIMEOUT = timedelta(minutes=30)
Work = Callable[[torch.device], None]


# --- planning -----------------------------------------------------------------------------------------------------


def plan_ranks(ranks: int | None, device: str, num_gpus: int) -> tuple[int, str]:
    """Returns how many ranks to start, and on what kind of device.

    Raises:
        ConfigError: fewer than one rank, more ranks than GPUs, or CUDA on a machine without GPUs.
    """
    where = f"--ranks {ranks} --device {device}"
    if ranks is not None and ranks < 1:
        raise ConfigError(f"{ranks} ranks are asked for", where=where, fix="use --ranks 1 or more")
    kind = device
    if kind == "auto":
        kind = "cuda" if num_gpus else "cpu"
    if kind == "cpu":
        return (2 if ranks is None else ranks), kind
    if not num_gpus:
        raise ConfigError(
            "there is no GPU here", where=where, fix="use --device cpu; shardwise doctor says more"
        )
    if ranks is not None and ranks > num_gpus:
        raise ConfigError(
            f"{ranks} ranks are asked for, and there {'is 1 GPU' if num_gpus == 1 else f'are {num_gpus} GPUs'}",
            where=where,
            fix=f"use --ranks {num_gpus}, or --device cpu",
        )
    return (num_gpus if ranks is None else ranks), kind


@dataclass(frozen=True)
class Given:
    """The rank that torchrun or Slurm assigned to this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int


def given_ranks(environment: Mapping[str, str]) -> Given | None:
    """Returns the rank from torchrun's environment variables, or from Slurm's if it runs several tasks; else None."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return Given(
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
        return Given(
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
def joined(given: Given, kind: str, rendezvous: str | None = None) -> Iterator[torch.device]:
    """Makes this process a rank of the default process group, and yields its device.

    Raises:
        ConfigError: the host has fewer GPUs than ranks, or the address cannot be bound or reached.
    """
    device = torch.device("cpu")
    if kind == "cuda":
        num_gpus = torch.cuda.device_count()
        if given.local_rank >= num_gpus:
            raise ConfigError(
                f"{given.local_world_size} ranks run on this host, and there are {num_gpus} GPUs",
                where=f"rank {given.rank}",
                fix=f"start {num_gpus} ranks a host, or use --device cpu",
            )
        device = torch.device("cuda", given.local_rank)
        torch.cuda.set_device(device)
    init = rendezvous or f"tcp://{given.address}:{given.port}"
    if rendezvous is None and "TORCHELASTIC_RUN_ID" in os.environ:
        init = "env://"  # torchrun already runs a store there
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
            init_method=init,
            rank=given.rank,
            world_size=given.world_size,
            timeout=_TALK_TIMEOUT,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise ConfigError(
            _why_not(error, given), where=f"rank {given.rank} of {given.world_size}", fix=_how_then(error)
        ) from (error if lost_its_peers(error) else None)
    try:
        yield device
    finally:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _why_not(error: Exception, given: Given) -> str:
    first = str(error).splitlines()[0][:200]
    if "EADDRINUSE" in str(error) or "address already in use" in str(error):
        return f"port {given.port} of {given.address} is in use by another program"
    return f"the ranks could not meet at {given.address}:{given.port}: {first}"


def _how_then(error: Exception) -> str:
    if "EADDRINUSE" in str(error) or "address already in use" in str(error):
        return (
            "set MASTER_PORT to a free one (torchrun: --master-port or --rdzv-endpoint), or end that program"
        )
    return "check MASTER_ADDR, MASTER_PORT and that the hosts reach each other; shardwise doctor checks this host"


# --- our own ranks ------------------------------------------------------------------------------------------------


def run_own_ranks(
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
        logs = folder / LOGS if logs is None else logs
        lengths = [log_length(log_path(logs, rank)) for rank in range(num_ranks)]
        # Ranks report through pipes, which work even if the disk is full or no file can be opened.
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        ranks: list[BaseProcess] = [
            context.Process(
                target=_own_rank, args=(work, rank, num_ranks, kind, folder, logs, pipes), name=f"rank {rank}"
            )
            for rank in range(num_ranks)
        ]
        passed_on: list[int] = []

        def pass_on(number: int, _frame: Any) -> None:
            passed_on.append(number)
            for process in ranks:
                if process.pid is not None and process.is_alive():
                    process.terminate()

        before = {number: signal.signal(number, pass_on) for number in _STOPS}
        try:
            # A forked rank inherits this handler: signals stay blocked until the rank has reset it.
            signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
            for process in ranks:
                process.start()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
            for _, telling in pipes:
                telling.close()
            failures = _wait_for_all(ranks, [heard for heard, _ in pipes], timeout_seconds)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
            for number, handler in before.items():
                signal.signal(number, handler)
            for heard, _ in pipes:
                heard.close()
            with contextlib.suppress(OSError):
                remove_empty_logs(logs)
        own = [failure for failure in failures if failure.thread is None]
        if not own and all(process.exitcode == 0 for process in ranks):
            return 130 if signal.SIGINT in passed_on else 0
        asked = [-number for number in _STOPS]
        if passed_on and all(
            failure.is_consequence or ranks[failure.rank].exitcode in asked for failure in own
        ):
            print(f"error: {describe_stop(passed_on)}", file=sys.stderr, flush=True)
            return 128 + passed_on[0]
        failures = [with_crash(failure, logs, lengths) for failure in failures]
        has_news = any(log_length(log_path(logs, rank)) > lengths[rank] for rank in range(num_ranks))
        is_kept = logs.parent != folder
        print(
            describe_failures(
                failures,
                num_ranks,
                logs if is_kept and has_news else None,
                logs.parent / CHECKPOINTS if is_kept else None,
            ),
            file=sys.stderr,
            flush=True,
        )
        return 1


def _wait_for_all(
    ranks: list[BaseProcess], heard: list[Connection], timeout_seconds: float | None
) -> list[Failure]:
    """Waits until all ranks have ended, the time is up, or a grace period after the first failure is over.

    Returns:
        The failures before the caller ends the remaining ranks: as ranks reported them, or as seen from outside.
    """
    running = {process.sentinel: rank for rank, process in enumerate(ranks)}
    telling = {connection: rank for rank, connection in enumerate(heard)}
    failures: list[Failure] = []
    done: set[int] = set()
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    while running:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait([*telling, *running], timeout=left)
        if not ready and deadline is not None:
            break
        num_before = len(failures)
        # Read reports before exits: a rank that ended meanwhile may be the cause of what others report.
        for each in sorted(ready, key=lambda each: not isinstance(each, Connection)):
            if isinstance(each, Connection):
                _hear(each, telling, failures, done)
                continue
            rank = running.pop(each)  # type: ignore[arg-type]
            ranks[rank].join()
            status = ranks[rank].exitcode or 0
            while heard[rank] in telling and rank not in done:
                _hear(heard[rank], telling, failures, done)
            if status or rank not in done:
                if all(failure.rank != rank or failure.thread for failure in failures):
                    failures.append(unreported_failure(rank, status, failures[num_before:]))
                # Peers that do not notice in this time that it is gone would wait for it forever.
                grace = time.monotonic() + _GRACE_SECONDS
                deadline = grace if deadline is None else min(deadline, grace)
    return failures


def _hear(
    connection: Connection, telling: dict[Connection, int], failures: list[Failure], done: set[int]
) -> None:
    """Receives one message of a rank, a failure or that it is done; drops the connection if no more will come."""
    try:
        if connection.poll(_GRACE_SECONDS):
            if message := connection.recv_bytes():
                failures.append(Failure(**json.loads(message)))
            else:
                done.add(telling[connection])
            return
    except (EOFError, OSError, ValueError):
        pass
    telling.pop(connection, None)


def _own_rank(
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
    for number, (heard, telling) in enumerate(pipes):
        heard.close()
        if number != rank:
            telling.close()
    _end_with_parent()
    for stop in _STOPS:
        signal.signal(stop, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    os.environ.update(LOCAL_WORLD_SIZE=str(num_ranks), GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    tell = partial(_tell, pipes[rank][1], threading.Lock())
    log = RankLog(logs, rank, tell)
    given = Given(rank, num_ranks, rank, num_ranks, "127.0.0.1", 0)

    def fail(error: BaseException) -> NoReturn:
        tell(log.failed(error))
        leave(1)

    try:
        with joined(given, kind, f"file://{folder}/rendezvous") as device:
            try:
                work(device)
            except BaseException as error:  # noqa: BLE001  reported by the parent
                # Report before leaving the process group, which may take long: peers must not report first.
                fail(error)
    except BaseException as error:  # noqa: BLE001  reported by the parent
        fail(error)
    tell(None)
    leave(0)


def leave(status: int) -> NoReturn:
    """Ends this rank's process at once: after a failure, its threads may be waiting for peers that are gone."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _end_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends, however it ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _tell(telling: Connection, one_at_a_time: threading.Lock, failure: Failure | None) -> None:
    """Reports to the parent how the rank failed, or that it is done, which exit status 0 alone does not prove."""
    # The parent may be gone.
    with one_at_a_time, contextlib.suppress(OSError):
        telling.send_bytes(b"" if failure is None else json.dumps(asdict(failure)).encode())
