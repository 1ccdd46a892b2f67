"""Puts the failures of several ranks into one report: the first failure in full, then what followed from it.

Pure but for reading logs: ``launch`` collects the failures, ``rank_log`` records them.
"""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shardwise.train.failures import Failure, log_path, signal_name

__all__ = ["describe_failures", "describe_stop", "log_length", "unreported_failure", "with_crash"]

_NOTICED_SECONDS = 1.0


def unreported_failure(rank: int, status: int, meanwhile: Sequence[Failure] = ()) -> Failure:
    """Returns the failure of a rank that ended without a report: killed, crashed, or by ``os._exit``.

    ``meanwhile``: what other ranks have reported since this one was last seen running.
    """
    if status >= 0:
        what = (
            f"rank {rank} ended with exit status {status} before it was done, and without an error of its own"
        )
    else:
        what = f"rank {rank} was ended by {signal_name(-status)}"
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


def with_crash(failure: Failure, logs: Path, lengths: list[int]) -> Failure:
    """Adds to the failure of a rank without a report the crash that its log shows since it started."""
    stack = ""
    if failure.is_silent:
        stack = _crashed_thread(_text_after(log_path(logs, failure.rank), lengths[failure.rank]))
    return replace(failure, text=f"{failure.text}\n{stack}") if stack else failure


def describe_stop(passed_on: list[int]) -> str:
    """Describes the signals that ended ranks. During training the first signal only makes ranks save and stop."""
    first, *more = map(signal_name, passed_on)
    if more:
        return f"stopped by {first}, then by {more[0]}: what came after the last checkpoint is not saved"
    return f"stopped by {first} outside of training, with nothing to save"


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
        return f"error: {num_ranks} ranks were not done in time, and were ended"
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
    lines = [_in_full(failure) for failure in in_full]
    lines += [
        f"  then:  rank {failure.rank}: {failure.summary}"
        for failure in failures[len(in_full) :]
        if failure.text not in {told.text for told in in_full}
    ]
    if logs is not None:
        lines.append(f"  logs:  {logs}")
    is_explained = all(failure.is_expected for failure in in_full)
    if not is_explained and checkpoints is not None and any(checkpoints.glob("step-*")):
        lines.append("  fix:   mend that, and continue with --resume: the last checkpoint is whole")
    return "\n".join(lines)


def _in_full(failure: Failure) -> str:
    text = failure.text.rstrip()
    if failure.is_silent or (failure.is_expected and failure.thread is None):
        return f"error: {text}"
    who = f"thread '{failure.thread}' of rank {failure.rank}" if failure.thread else f"rank {failure.rank}"
    return f"error: {who} failed\n{text}"


def _crashed_thread(dump: str) -> str:
    """Returns the fatal error and the stack of the crashed thread from what a crash left in the log."""
    what = re.search(r"^Fatal Python error: .*$", dump, re.MULTILINE)
    stack = re.search(r"^Current thread.*\n(?:  File .*\n?)*", dump, re.MULTILINE)
    return "" if what is None or stack is None else f"{what[0]}\n{stack[0]}"


def log_length(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _text_after(path: Path, start: int) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(start)
        return file.read(1 << 16).decode(errors="replace").strip()
    return ""
