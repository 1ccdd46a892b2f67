"""What a rank says when it fails: kept in a log of its own, and told to whoever waits for it.

    FOLDER/logs/rank-1.log    tracebacks, and the stacks that a crash in native code leaves

A log that nothing was written to is removed when the run ends, so a run without faults has none.
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
    """How one rank failed, or one thread of it.

    ``at_seconds`` is read from the monotonic clock, which all processes of a machine share.
    """

    rank: int
    at_seconds: float
    text: str
    summary: str
    """One line."""
    is_expected: bool = False
    """Whether ``text`` is a message made for users; otherwise it is a traceback."""
    is_consequence: bool = False
    """Whether the rank was well, and lost a peer."""
    thread: str | None = None
    """Its name, if the rank's main thread went on."""
    is_silent: bool = False
    """Whether the rank said nothing, and this is how it looks from outside."""


def failure_of(error: BaseException, rank: int, thread: str | None = None) -> Failure:
    is_expected = isinstance(error, ShardwiseError)
    # An error that ranks found together was raised on one of them: its traceback travelled along.
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
    """The log of this process, which is a rank; crashes and exceptions of threads go there from now on.

    Args:
        folder: of all ranks' logs. Where it cannot be written to, nothing is logged.
        rank: of this process.
        on_thread_failure: told of an exception that ended a thread.
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
        """Logs an error that ends this rank; its record."""
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
            # Where the disk is full, the rank's own word to whoever waits for it must do.
            with contextlib.suppress(OSError):
                # Names of files, which errors quote, need not be text.
                os.write(self._descriptor, entry.encode(errors="backslashreplace"))
