"""Runs the tests marked `arithmetic` with every instruction set of this machine, with one thread and with two.

    python -m tests.arithmetic                      # beside `make test`: each of both with each of the other, once
    python -m tests.arithmetic --all --at-once 12   # every pair, on a machine with many cores, a file at a time
    python -m tests.arithmetic -- -k exact -x       # what follows -- is for pytest
    python -m tests.arithmetic --all --record benchmarks/results/arithmetic.json

torch chooses its kernels by the processor, and the choice may change the last bits of a result. A claim about bits has
to hold with all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch

from tests.processor import avoid_instructions_that_do_not_run

ROOT = Path(__file__).parent.parent
# As `ATEN_CPU_CAPABILITY` names them; a machine that has one also has those before it.
CAPABILITIES = ["default", "avx2", "avx512"]
THREADS = [1, 2]


def capabilities() -> list[str]:
    """What torch can be told to use here, the machine's own last."""
    own = torch.backends.cpu.get_cpu_capability().lower()
    return CAPABILITIES[: CAPABILITIES.index(own) + 1] if own in CAPABILITIES else ["default"]


def pairs(is_all: bool) -> list[tuple[str, int]]:
    """Returns instruction sets with numbers of threads: all pairs, or one of each set.

    The numbers alternate, so that each has a run. The machine's own set has two threads: `make test` has it with one.
    """
    known = capabilities()
    if is_all:
        return list(product(known, THREADS))
    return [(name, THREADS[(len(known) - index) % 2]) for index, name in enumerate(known)]


def marked_files() -> tuple[list[str], list[str]]:
    """Files with such tests: those that can be imported here, and those that need a package this machine lacks."""
    missing = [name for name in ("hypothesis",) if find_spec(name) is None]
    found, left_out = [], []
    for path in sorted((ROOT / "tests").glob("*/test_*.py")):
        text, name = path.read_text(), str(path.relative_to(ROOT))
        if "mark.arithmetic" not in text:
            continue
        lacks = [module for module in missing if f"from {module} import" in text]
        (left_out if lacks else found).append(name)
    return found, left_out


@dataclass
class Run:
    """The tests with one instruction set and one number of threads."""

    capability: str
    num_threads: int
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        counts = {name: self.counts[name] for name in ("passed", "skipped")}
        return {"capability": self.capability, "threads": self.num_threads, **counts, "failed": self.failed}


def run_files(run: Run, files: list[str], arguments: list[str]) -> None:
    """Runs the tests of some files in a process of their own, and adds their outcomes to the run."""
    # Idle threads would otherwise spin and slow the other ranks down.
    environment = os.environ | {"ATEN_CPU_CAPABILITY": run.capability, "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "arithmetic", "-p", "no:cacheprovider"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command += [f"--compute-threads={run.num_threads}", f"--junitxml={report}", *arguments, *files]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        outcomes = _outcomes(report)
    reported = done.stdout.decode(errors="replace").rstrip()
    # The whole output if something failed, otherwise pytest's last line. 5: none of the tests was chosen.
    is_right = done.returncode in (0, 5)
    lines = reported.splitlines()[-1] if is_right else reported
    which = files[0] if len(files) == 1 else f"{len(files)} files"
    print(f"{run.capability}, threads {run.num_threads}, {which}: {lines}", flush=True)
    failed = [name for name, outcome in outcomes.items() if outcome == "failed"]
    run.counts.update(outcomes.values())
    run.failed += failed if failed or is_right else [f"{which}: exit status {done.returncode}"]


def _outcomes(report: Path) -> dict[str, str]:
    if not report.exists():
        return {}
    outcomes = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        has_failed = case.find("failure") is not None or case.find("error") is not None
        outcome = "failed" if has_failed else "skipped" if case.find("skipped") is not None else "passed"
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return outcomes


def record(runs: list[Run], left_out: list[str], seconds: float) -> dict[str, Any]:
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "cpu_capability": capabilities()[-1],
        "seconds": round(seconds, 1),
        "files_left_out": left_out,
        "passed": sum(run.counts["passed"] for run in runs),
        "failed": sum(len(run.failed) for run in runs),
        "runs": [run.as_json() for run in runs],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--all", action="store_true", help="every instruction set with every number of threads"
    )
    parser.add_argument("--at-once", type=int, default=2, help="how many processes beside each other")
    parser.add_argument("--record", type=Path, help="where to write what happened, as JSON")
    parser.add_argument("arguments", nargs="*", help="for pytest, after --")
    args = parser.parse_args()
    avoid_instructions_that_do_not_run()
    own = capabilities()[-1]
    runs = [Run(*each) for each in pairs(args.all)]
    print(f"torch {torch.__version__}, {own}: {len(runs)} runs", flush=True)
    files, left_out = marked_files()
    for name in left_out:
        print(f"left out: {name} needs a package that is not here")
    # Starting a process per file costs more than it gains, unless there are cores for it.
    together = [[name] for name in files] if args.at_once > len(runs) else [files]
    start = time.monotonic()
    with ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(lambda each: run_files(each[1], each[0], args.arguments), product(together, runs)))
    if args.record:
        result = record(runs, left_out, time.monotonic() - start)
        args.record.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(run.failed for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
