"""Runs ``tests/gpu`` and writes which tests passed, and on which hardware, to a results file.

    PYTHONPATH=. python benchmarks/gpu_tests.py                 # on a machine with a GPU, straight from the source tree
    PYTHONPATH=. python benchmarks/gpu_tests.py wrapper_gpu     # only some files; the results of others are kept

Tests run in parallel, each with ranks of its own. Ranks share the GPU, so that several ranks need only one. Without
CUDA's multi-process service they take turns of milliseconds, and a collective has to wait for the turns of all its
ranks. So tests run under that service where it can be started, except those that it would change: a rank that ends in
the middle of its work disturbs every other, and streams of one process share queues, so that one waits for another
where nothing makes it wait.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
# Names the service's folder to its clients.
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
# Their ranks end while others wait for them in a kernel, or show what goes wrong without a wait between streams.
WITHOUT_SERVICE = ("gpu_ranks", "stream_order_gpu", "trust_gpu")
# The service takes 48 processes; a worker has up to four ranks of NCCL and of gloo each.
MOST_WORKERS_OF_SERVICE = 8
# A line of pytest-xdist for a test that has ended.
_ENDED = re.compile(r"^\[gw\d+\] \[ *\d+%\] (\w+) tests/gpu/(\w+)\.py::(.+?) *$", re.MULTILINE)
_COLLECTED = re.compile(r"\d+ workers \[(\d+) items\]")


@contextmanager
def service() -> Iterator[dict[str, str] | None]:
    """Gives the environment of clients of CUDA's multi-process service; None if it cannot be started.

    A service that the environment names is used, and left running.
    """
    if PIPES in os.environ:
        yield dict(os.environ)
        return
    with tempfile.TemporaryDirectory() as folder:
        environment: dict[str, str] | None = {**os.environ, PIPES: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        control = partial(subprocess.run, env=environment)
        try:
            control(["nvidia-cuda-mps-control", "-d"], check=True, timeout=20)
            probe = "import torch; torch.ones(1, device='cuda').item()"
            control([sys.executable, "-c", probe], check=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"without CUDA's multi-process service: {error}", file=sys.stderr)
            environment = None
        try:
            yield environment
        finally:
            with suppress(OSError):
                # It waits for its clients, ten seconds at most.
                control(["nvidia-cuda-mps-control"], input=b"quit -t 10\n", check=False)


def run(
    paths: list[Path], workers: int, log: Path, timeout: float, environment: dict[str, str]
) -> int | None:
    """Runs the tests; returns pytest's exit status, None if the time ran out."""
    command = [sys.executable, "-m", "pytest", "-v", "--durations=40", "-p", "no:cacheprovider"]
    command += ["-n", str(workers), "--dist", "load", "--maxschedchunk", "1", *map(str, paths)]
    with log.open("ab") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            # It says what failed so far, if it is interrupted and not killed.
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
            return None


def run_all(paths: list[Path], workers: int, log: Path, timeout: float) -> bool:
    """Runs the tests under the service, then those that do without it; returns whether all passed in time."""
    alone = [path for path in paths if path.stem.removeprefix("test_") in WITHOUT_SERVICE]
    shared = [path for path in paths if path not in alone]
    begun = time.monotonic()
    log.unlink(missing_ok=True)
    statuses = []
    with service() as environment:
        if environment is None:
            alone = paths
        elif shared:
            workers_of_service = min(workers, MOST_WORKERS_OF_SERVICE)
            statuses.append(run(shared, workers_of_service, log, timeout, environment))
    if alone:
        left = timeout - (time.monotonic() - begun)
        without = {name: value for name, value in os.environ.items() if name != PIPES}
        statuses.append(run(alone, workers, log, max(left, 1.0), without))
    return all(status == 0 for status in statuses)


def outcomes(told: str) -> dict[str, dict[str, Any]]:
    """By file: how many tests passed and were skipped, and which failed."""
    found: dict[str, dict[str, Any]] = defaultdict(lambda: {"passed": 0, "skipped": 0, "failed": []})
    for outcome, file, test in _ENDED.findall(told):
        if outcome == "PASSED":
            found[file]["passed"] += 1
        elif outcome == "SKIPPED":
            found[file]["skipped"] += 1
        else:
            found[file]["failed"].append(test)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="by name, without test_ and .py; default: all")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_tests.json")
    parser.add_argument(
        "--logs", type=Path, default=Path(tempfile.mkdtemp()), help="folder for pytest's output"
    )
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 12), help="tests at a time")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for all tests together")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing to run", file=sys.stderr)
        return 2
    args.logs.mkdir(parents=True, exist_ok=True)
    folder = ROOT / "tests" / "gpu"
    paths = [folder / f"test_{name}.py" for name in args.files] or sorted(folder.glob("test_*.py"))
    has_passed = run_all(paths, args.workers, args.logs / "pytest.log", args.timeout)
    told = (args.logs / "pytest.log").read_text(errors="replace")
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    ran = {name: {"date": now, **each} for name, each in sorted(outcomes(told).items())}
    collected = sum(map(int, _COLLECTED.findall(told)))
    ended = sum(each["passed"] + each["skipped"] + len(each["failed"]) for each in ran.values())
    not_run = collected - ended
    for name, each in ran.items():
        print(f"{name}: {each}")
    print(f"not run: {not_run}")
    files = json.loads(args.output.read_text())["files"] if args.files and args.output.exists() else {}
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        # Of the newest run: tests that it had no time for.
        "not_run": not_run,
        "files": files | ran,
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if has_passed and not_run == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
