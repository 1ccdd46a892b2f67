"""Runs ``tests/gpu`` and writes which tests passed, and on which hardware, to a results file.

    PYTHONPATH=. python benchmarks/gpu_tests.py                 # on a machine with a GPU, straight from the source tree
    PYTHONPATH=. python benchmarks/gpu_tests.py wrapper_gpu     # only some files; the results of others are kept

Tests run in parallel, each with ranks of its own. Ranks share the GPU, so that several ranks need only one.
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
from collections import defaultdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
# A line of pytest-xdist for a test that has ended.
_ENDED = re.compile(r"^\[gw\d+\] \[ *\d+%\] (\w+) tests/gpu/(\w+)\.py::(.+?) *$", re.MULTILINE)
_COLLECTED = re.compile(r"\d+ workers \[(\d+) items\]")


def run(paths: list[Path], workers: int, log: Path, timeout: float) -> int | None:
    """Runs the tests; returns pytest's exit status, None if the time ran out."""
    command = [sys.executable, "-m", "pytest", "-v", "--durations=40", "-p", "no:cacheprovider"]
    command += ["-n", str(workers), "--dist", "load", "--maxschedchunk", "1", *map(str, paths)]
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
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
    paths = [folder / f"test_{name}.py" for name in args.files] or [folder]
    status = run(paths, args.workers, args.logs / "pytest.log", args.timeout)
    told = (args.logs / "pytest.log").read_text(errors="replace")
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    ran = {name: {"date": now, **each} for name, each in sorted(outcomes(told).items())}
    collected = _COLLECTED.search(told)
    ended = sum(each["passed"] + each["skipped"] + len(each["failed"]) for each in ran.values())
    not_run = int(collected[1]) - ended if collected else None
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
    return 0 if status == 0 and not_run == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
