"""Runs programs: `python -m tests.fuzz.run --seconds 60 --seed 0`.

Programs run in worker processes. A program that hangs or dies is recorded as a failure, its worker is killed, and the
run goes on with a new worker.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import platform
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.fuzz.programs import Program, draw
from tests.fuzz.shrink import shape, shrunk
from tests.fuzz.trial import TIMEOUT_SECONDS, Outcome, as_test, run
from tests.processor import avoid_instructions_that_do_not_run

# Classes that programs define are never freed in the process that ran them.
_PROGRAMS_A_WORKER = 400
# How long a worker and its rank processes may take to start, each importing torch on a machine that is busy.
_START_SECONDS = 600.0


class Worker:
    """A process that runs programs one at a time, and is replaced if one of them ends it."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.fuzz.trial"])
        # Failures leave traces in the folder for temporary files: every worker has its own, which ends with it.
        self._folder = tempfile.TemporaryDirectory(prefix="shardwise-fuzz-", ignore_cleanup_errors=True)
        self._process: Any = None
        self._connection: Connection | None = None
        self._count = 0

    def run(self, program: Program, side: str = "shardwise") -> Outcome:
        if self._process is None or self._count >= _PROGRAMS_A_WORKER:
            self._stop()
            self._start()
        assert self._connection is not None
        self._count += 1
        try:
            self._connection.send((program, side))
            if not self._connection.poll(TIMEOUT_SECONDS + _START_SECONDS):
                where = self._stacks()
                self._stop()
                return Outcome("hangs", f"the worker did not answer:\n{where}")
            outcome: Outcome = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(5)
            code = self._process.exitcode
            self._stop()
            return Outcome(f"dies: exit code {code}", f"the worker process ended with exit code {code}")
        if outcome.how.startswith(("hangs", "dies")):
            self._stop()  # threads may still run in it
        return outcome

    def _stacks(self) -> str:
        """Returns the stacks of the worker's threads; works even if no thread can take the GIL."""
        os.kill(self._process.pid, signal.SIGUSR2)
        time.sleep(2)
        return Path(self._folder.name, "stacks").read_text()

    def _start(self) -> None:
        self._connection, theirs = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(theirs, self._folder.name))
        self._process.start()
        theirs.close()
        self._count = 0

    def close(self) -> None:
        """Ends the process and removes what it left in its folder."""
        self._stop()
        self._folder.cleanup()

    def _stop(self) -> None:
        if self._process is None:
            return
        assert self._connection is not None
        self._connection.close()
        self._process.join(2)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process = None


def _serve(connection: Connection, folder: str) -> None:
    import torch

    from shardwise.testing import close_pools

    tempfile.tempdir = os.environ["TMPDIR"] = folder  # rank processes read the variable
    faulthandler.register(signal.SIGUSR2, open(f"{folder}/stacks", "w"))  # noqa: SIM115  stays open until the process exits
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    while True:
        try:
            program, side = connection.recv()
        except EOFError:
            break
        connection.send(run(program, side))
    close_pools()
    os._exit(0)  # rank threads never end


@dataclass
class Failure:
    seed: int
    how: str
    text: str
    test: str = ""
    shape: str = ""


@dataclass
class Report:
    programs: int = 0
    seconds: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def as_json(self, arguments: argparse.Namespace) -> dict[str, Any]:
        import torch

        return {
            "programs": self.programs,
            "first_seed": arguments.seed,
            "without": sorted(arguments.without),
            "side": "torch" if arguments.torch else "shardwise",
            "seconds": round(self.seconds, 1),
            "programs_per_second": round(self.programs / max(self.seconds, 1e-9), 1),
            "refused": dict(sorted(self.refused.items())),
            "failed": len(self.failures),
            "failures": [{"seed": each.seed, "how": each.how} for each in self.failures],
            "workers": arguments.workers,
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        }


class Session:
    """The programs of one run, distributed among workers."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._side = "torch" if arguments.torch else "shardwise"
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._next = arguments.seed
        self._kinds: Counter[str] = Counter()
        self._shapes: Counter[str] = Counter()
        self._is_stopped = False
        self.report = Report()

    def stop(self, *_: Any) -> None:
        """Ends the run when the programs that run now have ended; as a handler of signals, too."""
        self._is_stopped = True

    def run(self) -> Report:
        threads = [threading.Thread(target=self._serve) for _ in range(self._arguments.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.report.failures.sort(key=lambda failure: failure.seed)
        self.report.seconds = time.monotonic() - self._start
        return self.report

    def _serve(self) -> None:
        worker = Worker()
        try:
            while (seed := self._take()) is not None:
                program = draw(seed, self._arguments.without)
                outcome = worker.run(program, self._side)
                if outcome.how and self._is_stopped:
                    # The signal may have reached the worker, too.
                    with self._lock:
                        self.report.programs -= 1
                    break
                if outcome.refused:
                    with self._lock:
                        self.report.refused[outcome.refused] += 1
                if outcome.how:
                    self._failed(program, outcome, worker)
        finally:
            worker.close()

    def _take(self) -> int | None:
        """Returns the next seed; None if the run is over."""
        with self._lock:
            arguments, taken = self._arguments, self._next - self._arguments.seed
            elapsed = time.monotonic() - self._start
            if self._is_stopped or taken >= (1 if arguments.once else arguments.count or sys.maxsize):
                return None
            if arguments.seconds and elapsed > arguments.seconds:
                return None
            if taken and taken % 500 == 0:
                failed = len(self.report.failures)
                print(f"{taken} programs, {failed} failed, {taken / elapsed:.1f} a second", flush=True)
            self._next += 1
            self.report.programs += 1
            return self._next - 1

    def _failed(self, program: Program, outcome: Outcome, worker: Worker) -> None:
        is_steady = worker.run(program, self._side).how == outcome.how
        failure = Failure(
            program.seed, outcome.how if is_steady else f"sometimes {outcome.how}", outcome.text
        )
        with self._lock:
            self.report.failures.append(failure)
            self._kinds[failure.how] += 1
            is_shrunk = is_steady and self._kinds[failure.how] <= self._arguments.shrink
            print(f"seed {program.seed}: {failure.how}", flush=True)
        if is_shrunk:
            small = shrunk(program, lambda each: worker.run(each, self._side).how)
            failure.text = worker.run(small, self._side).text
            failure.test, failure.shape = as_test(small), shape(small)
        with self._lock:
            self._shapes[failure.shape] += 1
            if not is_shrunk or self._shapes[failure.shape] == 1:
                reported = failure.test if is_shrunk else ""
                print(
                    f"seed {program.seed}, {failure.shape}\n{reported}\n{_quoted(failure.text)}\n", flush=True
                )


def run_many(arguments: argparse.Namespace) -> Report:
    return Session(arguments).run()


def _quoted(text: str) -> str:
    return "\n".join(f"# {line}" for line in text.splitlines()[-40:])


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first program; the others follow")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--once", action="store_true", help="one program, printed")
    parser.add_argument(
        "--torch",
        action="store_true",
        help="run torch's fully_shard instead: is it a defect, or the oracle's mistake?",
    )
    parser.add_argument("--without", default="", help="features to leave out, with commas")
    parser.add_argument("--shrink", type=int, default=1, help="how many failures of a kind to shrink")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--result", type=Path, help="where to write what happened, as JSON")
    arguments = parser.parse_args(argv)
    arguments.without = frozenset(word for word in arguments.without.split(",") if word)
    if arguments.torch:
        arguments.without |= {"wrapper", "zero"}
    if not (arguments.seconds or arguments.count or arguments.once):
        arguments.seconds = 60.0
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parsed(argv)
    avoid_instructions_that_do_not_run()
    if arguments.once:
        print(as_test(draw(arguments.seed, arguments.without)))
    session = Session(arguments)
    signal.signal(signal.SIGTERM, session.stop)
    report = session.run()
    kinds = Counter(f"{failure.how}; {failure.shape}" for failure in report.failures)
    print(f"{report.programs} programs in {report.seconds:.0f} s, {len(report.failures)} failed")
    for how, count in kinds.most_common():
        print(f"  {count:5d}  {how}")
    for name, count in report.refused.most_common():
        print(f"  {count:5d}  refused: {name}")
    if arguments.result:
        arguments.result.write_text(json.dumps(report.as_json(arguments), indent=2) + "\n")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
