"""A rank process, on both sides: the process takes jobs and runs each as its rank; its caller starts and ends it.

    caller                              worker
      | -- job: group, function, args --> |   start a fresh default group, call the function
      | <------- result or failure ------ |   after a failure: wait for the caller's reply, then exit
      | ---------- clean up ------------> |   only when every rank has finished, so that none loses a peer
      | <------------ done -------------- |

A worker exits when its caller's process has ended. It is never reused after a failure, because the failure may
have left it in an unknown state.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from shardwise import torch_internals
from shardwise.comm.mesh import forget_meshes
from shardwise.comm.watchdog.thread import WATCHDOG
from shardwise.errors import ConfigError, StateError, lost_its_peers

__all__ = [
    "CLEAN_UP",
    "DONE",
    "READY",
    "START_SECONDS",
    "Answer",
    "Job",
    "ThreadError",
    "Worker",
    "serve",
    "threads_path",
]

READY = b"ready"
CLEAN_UP = b"clean up"
DONE = b"done"


@dataclass(frozen=True)
class Job:
    """One rank's part of a call. ``function`` is pickled separately: unpickling it may import a test file."""

    rank: int
    world_size: int
    backend: str
    device_index: int | None
    store_path: str
    group_timeout_seconds: float
    import_path: tuple[str, ...]
    warning_filters: bytes
    function: bytes


@dataclass(frozen=True)
class Answer:
    """What a rank sends back. Result and exception are pickled separately: the caller may fail to unpickle them."""

    ok: bool
    result: bytes = b""
    summary: str = ""
    details: str = ""
    exception: bytes = b""
    lost_its_peers: bool = False
    at_seconds: float = 0.0


@dataclass(frozen=True)
class ThreadError:
    """An exception that ended a thread of a rank, which the rank itself may not have noticed."""

    summary: str
    details: str
    at_seconds: float


# --- the process's side -----------------------------------------------------------------------------------------------


def serve(connection: Connection, stack_path: str, environment: dict[str, str]) -> None:
    """Run jobs until the caller closes the pipe."""
    os.environ.update(environment)
    # Ctrl-C is handled by the caller, which then ends its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stack_file = open(stack_path, "w")  # noqa: SIM115  stays open: signal handlers write to it
    faulthandler.enable(stack_file)
    faulthandler.register(signal.SIGUSR1, stack_file)
    threads_file = open(threads_path(stack_path), "w")  # noqa: SIM115  stays open, too
    threading.excepthook = partial(_record_thread_error, threads_file, threading.excepthook)
    threading.Thread(target=_exit_with_caller, daemon=True).start()
    # One compute thread per rank unless the user asks for more, as in torchrun.
    num_threads = torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else 1
    # Imported modules are never freed; garbage collections after each call need not look at them.
    gc.freeze()
    connection.send_bytes(READY)
    while True:
        try:
            job = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        threads_file.truncate(0)  # drops the errors of the previous call
        torch.set_num_threads(num_threads)
        answer = _run_job(job)
        connection.send_bytes(pickle.dumps(answer))
        try:
            connection.recv_bytes()
        except EOFError:
            answer = Answer(ok=False)
        if not answer.ok:
            _exit_now()
        dist.destroy_process_group()
        forget_meshes()
        torch_internals.forget_meshes()
        gc.collect()
        connection.send_bytes(DONE)


def _run_job(job: Job) -> Answer:
    try:
        function, args, kwargs = _load_job(job)
        # Every call starts with the same seed, whatever this worker ran before.
        torch.manual_seed(0)
        if job.device_index is not None:
            torch.cuda.set_device(job.device_index)
            torch.cuda.init()
        dist.init_process_group(
            job.backend,
            store=dist.FileStore(job.store_path, job.world_size),  # type: ignore[attr-defined]
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.group_timeout_seconds),
        )
        result = function(*args, **kwargs)
        WATCHDOG.end_rank(threading.get_ident())
        return Answer(ok=True, result=_dump_result(result))
    except BaseException as error:  # noqa: BLE001  a rank reports whatever ended it, SystemExit included
        return Answer(
            ok=False,
            summary="raised " + "".join(traceback.format_exception_only(type(error), error)).strip(),
            details="".join(traceback.format_exception(type(error), error, error.__traceback__)),
            exception=_dump_exception(error),
            lost_its_peers=lost_its_peers(error),
            at_seconds=time.monotonic(),
        )


def threads_path(stack_path: str | Path) -> Path:
    """Returns the path to which a worker writes the exceptions that ended its threads, one line of JSON each."""
    return Path(f"{stack_path}.threads")


def _record_thread_error(
    file: TextIO, hook_before: Callable[[threading.ExceptHookArgs], Any], args: threading.ExceptHookArgs
) -> None:
    hook_before(args)
    error = args.exc_value
    if error is not None and not isinstance(error, SystemExit):
        name = "" if args.thread is None else args.thread.name
        summary = "".join(traceback.format_exception_only(type(error), error)).strip()
        details = "".join(traceback.format_exception(error))
        thread_error = ThreadError(f"lost thread {name!r}, which raised {summary}", details, time.monotonic())
        file.seek(0, os.SEEK_END)
        file.write(json.dumps(asdict(thread_error)) + "\n")
        file.flush()


def _load_job(job: Job) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    known = set(sys.path)
    sys.path.extend(entry for entry in job.import_path if entry not in known)
    if job.warning_filters:
        # Also resets which warnings have been shown: one shown in an earlier call must be shown again in this one.
        warnings.resetwarnings()
        warnings.filters[:] = pickle.loads(job.warning_filters)  # type: ignore[index]
    function, args, kwargs = pickle.loads(job.function)
    return function, args, kwargs


def _dump_result(result: Any) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise ConfigError(
            f"the result of a process rank cannot be pickled: {type(result).__name__}",
            fix="return plain values and CPU tensors, or use kind='threads'",
        ) from error


def _dump_exception(error: BaseException) -> bytes:
    try:
        dumped = pickle.dumps(error)
        # Some exceptions pickle but do not unpickle: find out here rather than fail in the caller.
        pickle.loads(dumped)
        return dumped
    except Exception:  # noqa: BLE001  the traceback text is always there; the object is a convenience
        return b""


def _exit_with_caller() -> None:
    caller = parent_process()
    if caller is not None:
        caller.join()
    os._exit(1)


def _exit_now() -> None:
    """Exits without clean-up, which a broken process group could block; the closed sockets release the peers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


# --- the caller's side ------------------------------------------------------------------------------------------------

START_SECONDS = 300.0
_EXIT_SECONDS = 20.0

_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.distributed.tensor.debug",
    "shardwise.testing.worker",
]


class Worker:
    """One rank process, on the caller's side. It takes jobs once ``wait_until_ready`` has returned."""

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
                f"a rank process did not start within {START_SECONDS:g} seconds",
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
        """Returns the number of threads of the process; 0 on systems without ``/proc``."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        return len(list(tasks.iterdir())) if tasks.exists() else 0

    def ask_for_stack(self) -> None:
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)

    def stack(self) -> str:
        """Returns the stack that the process dumped on request or when it crashed; empty if there is none."""
        try:
            return _without_own_frames(self._stack_path.read_text())
        except OSError:
            return ""

    def thread_errors(self) -> list[ThreadError]:
        """Returns the exceptions that ended threads of the process during the current call."""
        try:
            lines = threads_path(self._stack_path).read_text().splitlines()
            return [ThreadError(**json.loads(line)) for line in lines]
        except (OSError, ValueError):
            return []

    def ending(self) -> str:
        # The pipe is closed, but on a busy machine the process may take a while longer to end.
        self.process.join(_EXIT_SECONDS)
        code = self.process.exitcode
        if code is None:
            return "closed its pipe"
        if code >= 0:
            return f"exited with code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"

    def kill(self) -> None:
        """Kills the process, whatever it is doing, and removes its files."""
        self.connection.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join(5.0)
        self._stack_path.unlink(missing_ok=True)
        threads_path(self._stack_path).unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the pipe, upon which an idle worker exits; kills the process if it does not."""
        self.connection.close()
        self.process.join(1.0)
        self.kill()


def _without_own_frames(dump: str) -> str:
    """Drops the frames that every worker has: the thread that watches the caller, and the loop that takes jobs."""
    blocks = [block for block in dump.split("\n\n") if "_exit_with_caller" not in block]
    lines = "\n\n".join(blocks).splitlines()
    ends = [index for index, line in enumerate(lines) if line.endswith(" in _run_job")]
    return "\n".join(lines[: ends[0]] if ends else lines).strip()
