"""Records how a rank failed: in a log file of its own, and as a `Failure` that `launch` and `command` report.

    FOLDER/logs/rank-1.log    tracebacks, and the stacks that a crash in native code leaves

Empty logs are removed when the run ends, so a run without failures leaves none.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ShardwiseError, follows_from_a_peer, text_of
from shardwise.train.run_files import open_for_append

__all__ = ["Failure", "RankLog", "failure_of", "log_path", "remove_empty_logs", "signal_name"]


@dataclass(frozen=True)
class Failure:
    """How a rank, or one of its threads, failed.

    ``at_seconds`` is a time of the monotonic clock, which all processes of a machine share.
    """

    rank: int
    at_seconds: float
    text: str
    summary: str
    """One line."""
    is_expected: bool = False
    """Whether ``text`` is a message for users; otherwise it is a traceback."""
    is_consequence: bool = False
    """Whether the rank failed only because it lost a peer."""
    thread: str | None = None
    """The name of the thread that failed, if the rank's main thread went on."""
    is_silent: bool = False
    """Whether the rank reported nothing, and this is how its end looks from outside."""


def failure_of(error: BaseException, rank: int, thread: str | None = None) -> Failure:
    is_expected = isinstance(error, ShardwiseError)
    # An error that ranks agreed on was raised on one of them, and carries that rank's traceback.
    details = getattr(error, "raised_at", None) or "".join(traceback.format_exception(error))
    return Failure(
        rank,
        time.monotonic(),
        text=str(error) if is_expected else details,
        summary=f"{type(error).__name__}: {text_of(error).partition(chr(10))[0]}",
        is_expected=is_expected,
        is_consequence=follows_from_a_peer(error),
        thread=thread,
    )


def log_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def remove_empty_logs(folder: Path) -> None:
    for path in folder.glob("rank-*.log") if folder.is_dir() else []:
        if not path.stat().st_size:
            path.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class RankLog:
    """The log of this rank's process; until it is closed, it gets crashes and the exceptions of threads.

    Args:
        folder: holds the logs of all ranks. If it cannot be written to, nothing is logged.
        rank: the rank of this process.
        on_thread_failure: called with the failure when an exception ends a thread.
    """

    def __init__(
        self, folder: Path, rank: int, on_thread_failure: Callable[[Failure], None] = lambda _: None
    ) -> None:
        self._rank, self._on_thread_failure = rank, on_thread_failure
        self._descriptor: int | None = None
        self._was_enabled = faulthandler.is_enabled()
        try:
            folder.mkdir(exist_ok=True)
            self._descriptor = open_for_append(log_path(folder, rank))
            faulthandler.enable(self._descriptor)
        except OSError:
            pass
        self._hook_before = threading.excepthook
        threading.excepthook = self._thread_failed

    def failed(self, error: BaseException) -> Failure:
        """Logs an error that ends this rank, unless all ranks agreed on it, and returns the failure."""
        failure = failure_of(error, self._rank)
        if not getattr(error, "agreed", False):
            self._write("failed", "".join(traceback.format_exception(error)))
        return failure

    def close(self) -> None:
        threading.excepthook = self._hook_before
        if self._descriptor is not None:
            faulthandler.disable()
            if self._was_enabled and sys.__stderr__ is not None:
                faulthandler.enable(sys.__stderr__)
            os.close(self._descriptor)
            self._descriptor = None

    def _thread_failed(self, args: threading.ExceptHookArgs) -> None:
        self._hook_before(args)
        if args.exc_value is None or isinstance(args.exc_value, SystemExit):
            return
        name = "a thread" if args.thread is None else args.thread.name
        failure = failure_of(args.exc_value, self._rank, thread=name)
        self._write(f"thread '{name}' failed", failure.text)
        self._on_thread_failure(failure)

    def _write(self, what: str, text: str) -> None:
        if self._descriptor is not None:
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            entry = f"{now} rank {self._rank}, process {os.getpid()}: {what}\n{text}\n"
            # The disk may be full: the failure is also sent to the parent, or printed.
            with contextlib.suppress(OSError):
                # Errors may quote file names that are not valid text.
                os.write(self._descriptor, entry.encode(errors="backslashreplace"))
