"""Runs ``tests/gpu`` and writes which tests passed, and on which hardware, to a results file.

    PYTHONPATH=. python benchmarks/gpu_tests.py                 # on a machine with a GPU, straight from the source tree
    PYTHONPATH=. python benchmarks/gpu_tests.py wrapper_gpu     # only some files; the results of others are kept

Files run in parallel, each in its own process. Ranks share the GPU, so that several ranks need only one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from datetime import datetime, timezone
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"


def start(path: Path, report: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "--durations=12",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        str(path),
    ]
    return subprocess.Popen(command, cwd=ROOT, stdout=log.open("wb"), stderr=subprocess.STDOUT)


def outcome(report: Path, log: Path, exit_status: int) -> dict[str, object]:
    if not report.exists():
        # pytest's output so far.
        told = log.read_text(errors="replace")
        tests = re.search(r"collected (\d+) items", told)
        return {
            "exit_status": exit_status,
            "note": "ended before its last test, without a report",
            "passed": len(re.findall(r" PASSED +\[", told)),
            "tests": int(tests[1]) if tests else 0,
            "failed": re.findall(r"^(\S+) FAILED +\[", told, re.MULTILINE),
        }
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    wrong = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {"passed": passed, **counts, "seconds": float(suite.get("time", 0)), "failed": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="by name, without test_ and .py; default: all")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_tests.json")
    parser.add_argument(
        "--logs", type=Path, default=Path(tempfile.mkdtemp()), help="folder for pytest's output"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for all files together")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing to run", file=sys.stderr)
        return 2
    args.logs.mkdir(parents=True, exist_ok=True)
    folder = ROOT / "tests" / "gpu"
    paths = [folder / f"test_{name}.py" for name in args.files] or sorted(folder.glob("test_*.py"))
    deadline = time.monotonic() + args.timeout
    running = {}
    for path in paths:
        report, log = args.logs / f"{path.stem}.xml", args.logs / f"{path.stem}.log"
        running[path.stem] = (start(path, report, log), report, log)
    files = json.loads(args.output.read_text())["files"] if args.files and args.output.exists() else {}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    for name, (process, report, log) in running.items():
        try:
            status = process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        files[name] = {"date": now, **outcome(report, log, status)}
        print(f"{name}: {files[name]}")
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "files": files,
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    ran = [files[name] for name in running]
    return 0 if all("note" not in entry and not entry["failed"] for entry in ran) else 1


if __name__ == "__main__":
    sys.exit(main())
