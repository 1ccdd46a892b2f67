"""Starts a rank process, asks for its stack and ends it, on the caller's side. `worker` is the process's side."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

from shardwise.errors import StateError
from shardwise.testing.worker import ThreadError, serve, threads_path

__all__ = ["START_SECONDS", "Worker"]

START_SECONDS = 300.0
_ENDS_SECONDS = 20.0

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
        self.process.join(_ENDS_SECONDS)
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
        """Kills the process, whatever it is doing, and removes its files."""
        self.connection.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join(5.0)
        self._stack_path.unlink(missing_ok=True)
        threads_path(self._stack_path).unlink(missing_ok=True)

    def leave(self) -> None:
        """Closes the pipe, upon which an idle worker exits; kills the process if it does not."""
        self.connection.close()
        self.process.join(1.0)
        self.end()


def _without_own_frames(dump: str) -> str:
    """Drops the frames that every worker has: the thread that watches the caller, and the loop that takes jobs."""
    blocks = [block for block in dump.split("\n\n") if "_follow_the_caller" not in block]
    lines = "\n\n".join(blocks).splitlines()
    ends = [index for index, line in enumerate(lines) if line.endswith(" in _do")]
    return "\n".join(lines[: ends[0]] if ends else lines).strip()
