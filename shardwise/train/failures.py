"""How ranks failed: recorded by each rank as it fails, and put together into one report by their parent.

    FOLDER/logs/rank-1.log    tracebacks, and the stacks that a crash in native code leaves

The report has the first failure in full, then what followed from it. Empty logs are removed when the run ends, so a run
without failures leaves none.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.checkpoint.store import Store
from shardwise.errors import ShardwiseError, follows_from_a_peer, text_of
from shardwise.train.records import counted, short_path
from shardwise.train.run_files import open_for_append
from shardwise.train.run_folder import CHECKPOINTS

__all__ = [
    "Failure",
    "RankLog",
    "describe_failures",
    "describe_stop",
    "failure_of",
    "log_length",
    "log_path",
    "remove_empty_logs",
    "signal_name",
    "unreported_failure",
    "with_crash_stack",
]


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

    def record_failure(self, error: BaseException) -> Failure:
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


# --- one report of all ranks --------------------------------------------------------------------------------------

# How late the parent may notice that a rank has ended.
_NOTICED_SECONDS = 1.0


def unreported_failure(rank: int, status: int, meanwhile: Sequence[Failure] = ()) -> Failure:
    """Returns the failure of a rank that ended without a report: killed, crashed, or by ``os._exit``.

    ``meanwhile``: what other ranks have reported since this one was last seen running.
    """
    if status >= 0:
        what = f"rank {rank} exited with status {status} before it was done, without reporting an error"
    else:
        what = f"rank {rank} was killed by {signal_name(-status)}"
    return Failure(
        rank,
        # The end is noticed late: what others reported meanwhile followed from it.
        min([time.monotonic() - _NOTICED_SECONDS, *(failure.at_seconds for failure in meanwhile)]),
        text=what,
        summary=what,
        # A library may abort when it loses a peer; all other signals come from outside, or from a crash.
        is_consequence=status == -signal.SIGABRT,
        is_silent=True,
    )


def with_crash_stack(failure: Failure, logs: Path, lengths: list[int]) -> Failure:
    """Adds to the failure of a rank without a report the crash that its log shows since it started."""
    stack = ""
    if failure.is_silent:
        stack = _stack_of_crash(_read_after(log_path(logs, failure.rank), lengths[failure.rank]))
    return replace(failure, text=f"{failure.text}\n{stack}") if stack else failure


def describe_stop(forwarded: list[int], folder: Path | None = None) -> str:
    """Describes the signals that ended ranks. During training the first signal only makes ranks save and stop.

    Args:
        forwarded: the signals, in order.
        folder: that of the run, if it is one.
    """
    first, *more = map(signal_name, forwarded)
    if more:
        what = f"stopped by {first}, then by {more[0]}: progress since the last checkpoint is lost"
        found = Store(folder / CHECKPOINTS).checkpoints() if folder else []
        if folder is None or not found:
            return what
        return f"{what}\n  fix:   continue from {found[0].name} with --resume {short_path(folder)}"
    return f"stopped by {first}; no step was running, and nothing is lost"


def describe_failures(
    failures: list[Failure], num_ranks: int, logs: Path | None = None, checkpoints: Path | None = None
) -> str:
    """Describes the first failure in full, and then in one line each what followed from it.

    Args:
        failures: the failures of all ranks.
        num_ranks: how many ranks there were.
        logs: the folder of the logs, if ranks have logged anything.
        checkpoints: the folder in which the run may have saved checkpoints.
    """
    if not failures:
        return f"error: {counted(num_ranks, 'rank')} did not finish in time and were killed"
    failures = sorted(
        failures,
        key=lambda failure: (
            failure.is_consequence,
            failure.at_seconds,
            not failure.is_silent,
            failure.rank,
        ),
    )
    own = [failure for failure in failures if failure.thread is None]
    # Threads that failed before the first rank did may be the cause.
    in_full = failures[: failures.index(own[0]) + 1] if own else failures
    lines = [_full_text(failure) for failure in in_full]
    lines += [
        f"  then:  rank {failure.rank}: {failure.summary}"
        for failure in failures[len(in_full) :]
        if failure.text not in {reported.text for reported in in_full}
    ]
    if logs is not None:
        lines.append(f"  logs:  {logs}")
    is_explained = all(failure.is_expected for failure in in_full)
    if not is_explained and checkpoints is not None and any(checkpoints.glob("step-*")):
        lines.append("  fix:   fix the cause, and continue with --resume from the last checkpoint")
    return "\n".join(lines)


def _full_text(failure: Failure) -> str:
    text = failure.text.rstrip()
    if failure.is_silent or (failure.is_expected and failure.thread is None):
        return f"error: {text}"
    who = f"thread '{failure.thread}' of rank {failure.rank}" if failure.thread else f"rank {failure.rank}"
    return f"error: {who} failed\n{text}"


def _stack_of_crash(dump: str) -> str:
    """Returns the fatal error and the stack of the crashed thread from what a crash left in the log."""
    what = re.search(r"^Fatal Python error: .*$", dump, re.MULTILINE)
    stack = re.search(r"^Current thread.*\n(?:  File .*\n?)*", dump, re.MULTILINE)
    return "" if what is None or stack is None else f"{what[0]}\n{stack[0]}"


def log_length(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _read_after(path: Path, start: int) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(start)
        return file.read(1 << 16).decode(errors="replace").strip()
    return ""
