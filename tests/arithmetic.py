"""Runs the tests marked `arithmetic` with other instructions and numbers of threads than the machine would take.

    python -m tests.arithmetic                      # what `make test` leaves out
    python -m tests.arithmetic --all --at-once 6    # all of it, on a machine with many cores
    python -m tests.arithmetic -- -k exact -x       # the rest is pytest's

Which kernels torch takes depends on the processor, and may change the last bits of a result. A claim about bits has to
hold with all of them: those that this machine has are tried one after another.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
# As `ATEN_CPU_CAPABILITY` names them, each with all before it.
CAPABILITIES = ["default", "avx2", "avx512"]
THREADS = [1, 2]


def capabilities() -> list[str]:
    """What torch can be told to use here, the machine's own last."""
    own = torch.backends.cpu.get_cpu_capability().lower()
    return CAPABILITIES[: CAPABILITIES.index(own) + 1] if own in CAPABILITIES else ["default"]


def marked_files() -> list[str]:
    """Files with such tests: others need not be there to be imported."""
    paths = sorted((ROOT / "tests").glob("*/test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if "mark.arithmetic" in path.read_text()]


def run(capability: str, num_threads: int, arguments: list[str]) -> bool:
    # Threads that wait for work would otherwise spin, in the way of the other ranks.
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability, "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "arithmetic", "-p", "no:cacheprovider"]
    command += [f"--compute-threads={num_threads}", *arguments, *marked_files()]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    told = done.stdout.decode(errors="replace").rstrip()
    # All of it where something failed; otherwise how many tests there were, and how long they took.
    lines = told if done.returncode else told.splitlines()[-1]
    print(f"{capability}, threads {num_threads}: {lines}", flush=True)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="also as `make test` runs them")
    parser.add_argument("--at-once", type=int, default=2, help="how many runs beside each other")
    parser.add_argument("arguments", nargs="*", help="for pytest, after --")
    args = parser.parse_args()
    own = capabilities()[-1]
    runs = [each for each in product(capabilities(), THREADS) if args.all or each != (own, 1)]
    print(f"torch {torch.__version__}, {own}: {len(runs)} runs", flush=True)
    with ThreadPoolExecutor(args.at_once) as pool:
        passed = list(pool.map(lambda each: run(*each, args.arguments), runs))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
