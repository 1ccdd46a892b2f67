"""Runs programs: `python -m tests.fuzz.run --seconds 60 --seed 0`.

Programs run in a worker process. One that hangs or dies takes its worker along, is recorded as a failure, and the run
goes on with another worker.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
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

# Classes that programs define stay in the process that ran them.
_PROGRAMS_A_WORKER = 400


class Worker:
    """A process that runs programs one at a time, replaced when one of them ends it."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.fuzz.trial"])
        self._process: Any = None
        self._connection: Connection | None = None
        self._count = 0

    def run(self, program: Program, side: str = "shardwise") -> Outcome:
        if self._process is None or self._count >= _PROGRAMS_A_WORKER:
            self.close()
            self._start()
        assert self._connection is not None
        self._count += 1
        try:
            self._connection.send((program, side))
            if not self._connection.poll(TIMEOUT_SECONDS + 120):
                self.close()
                return Outcome("hangs", "the worker did not answer")
            outcome: Outcome = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(5)
            code = self._process.exitcode
            self.close()
            return Outcome(f"dies: exit code {code}", f"the worker process ended with exit code {code}")
        if outcome.how.startswith(("hangs", "dies")):
            self.close()  # threads may be left behind in it
        return outcome

    def _start(self) -> None:
        self._connection, theirs = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()
        self._count = 0

    def close(self) -> None:
        if self._process is None:
            return
        assert self._connection is not None
        self._connection.close()
        self._process.join(2)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process = None


def _serve(connection: Connection) -> None:
    import os

    import torch

    from shardwise.testing import close_pools

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
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        }


def run_many(arguments: argparse.Namespace) -> Report:
    report, worker, start = Report(), Worker(), time.monotonic()
    side = "torch" if arguments.torch else "shardwise"
    seen: Counter[str] = Counter()
    shapes: Counter[str] = Counter()
    seed = arguments.seed
    try:
        while not _is_over(arguments, report, start):
            program = draw(seed, arguments.without)
            outcome = worker.run(program, side)
            report.programs += 1
            if outcome.refused:
                report.refused[outcome.refused] += 1
            if outcome.how:
                is_steady = worker.run(program, side).how == outcome.how
                failure = Failure(
                    seed, outcome.how if is_steady else f"sometimes {outcome.how}", outcome.text
                )
                report.failures.append(failure)
                seen[failure.how] += 1
                print(f"seed {seed}: {failure.how}", flush=True)
                if not is_steady:
                    print(_quoted(failure.text), flush=True)
                elif seen[failure.how] <= arguments.shrink:
                    small = shrunk(program, lambda each: worker.run(each, side).how)
                    failure.text = worker.run(small, side).text
                    failure.test = as_test(small)
                    failure.shape = shape(small)
                    shapes[failure.shape] += 1
                    print(f"  {failure.shape}", flush=True)
                    if shapes[failure.shape] == 1:
                        print(f"{failure.test}\n{_quoted(failure.text)}\n", flush=True)
            seed += 1
            if report.programs % 500 == 0:
                rate = report.programs / (time.monotonic() - start)
                print(
                    f"{report.programs} programs, {len(report.failures)} failed, {rate:.1f} a second",
                    flush=True,
                )
    finally:
        worker.close()
    report.seconds = time.monotonic() - start
    return report


def _is_over(arguments: argparse.Namespace, report: Report, start: float) -> bool:
    if arguments.once:
        return report.programs >= 1
    if arguments.count and report.programs >= arguments.count:
        return True
    return bool(arguments.seconds) and time.monotonic() - start > arguments.seconds


def _quoted(text: str) -> str:
    return "\n".join(f"# {line}" for line in text.splitlines()[-40:])


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first program; the others follow")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--once", action="store_true", help="one program, printed")
    parser.add_argument("--torch", action="store_true", help="run torch's fully_shard instead of shardwise's")
    parser.add_argument("--without", default="", help="features to leave out, with commas")
    parser.add_argument("--shrink", type=int, default=1, help="how many failures of a kind to shrink")
    parser.add_argument("--result", type=Path, help="where to write what happened, as JSON")
    arguments = parser.parse_args(argv)
    arguments.without = frozenset(word for word in arguments.without.split(",") if word)
    if not (arguments.seconds or arguments.count or arguments.once):
        arguments.seconds = 60.0
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parsed(argv)
    if arguments.once:
        print(as_test(draw(arguments.seed, arguments.without)))
    report = run_many(arguments)
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
