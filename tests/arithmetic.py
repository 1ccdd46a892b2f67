"""Runs the tests marked `arithmetic` with every instruction set of this machine, with one thread and with two.

    python -m tests.arithmetic                      # what `make test` leaves out
    python -m tests.arithmetic --all --at-once 6    # all of it, on a machine with many cores
    python -m tests.arithmetic -- -k exact -x       # what follows -- is for pytest

torch chooses its kernels by the processor, and the choice may change the last bits of a result. A claim about bits has
to hold with all of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
# As `ATEN_CPU_CAPABILITY` names them; a machine that has one also has those before it.
CAPABILITIES = ["default", "avx2", "avx512"]
THREADS = [1, 2]


def capabilities() -> list[str]:
    """What torch can be told to use here, the machine's own last."""
    own = torch.backends.cpu.get_cpu_capability().lower()
    return CAPABILITIES[: CAPABILITIES.index(own) + 1] if own in CAPABILITIES else ["default"]


def marked_files() -> list[str]:
    """Files with such tests that can be imported here: a machine with its own torch may lack other packages."""
    missing = [name for name in ("hypothesis",) if find_spec(name) is None]
    found = []
    for path in sorted((ROOT / "tests").glob("*/test_*.py")):
        text, name = path.read_text(), str(path.relative_to(ROOT))
        if "mark.arithmetic" not in text:
            continue
        lacks = [module for module in missing if f"from {module} import" in text]
        if lacks:
            print(f"left out: {name} needs {', '.join(lacks)}")
        else:
            found.append(name)
    return found


def run(capability: str, num_threads: int, arguments: list[str], files: list[str]) -> bool:
    # Idle threads would otherwise spin and slow the other ranks down.
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability, "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "arithmetic", "-p", "no:cacheprovider"]
    command += [f"--compute-threads={num_threads}", *arguments, *files]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    reported = done.stdout.decode(errors="replace").rstrip()
    # The whole output if something failed, otherwise pytest's last line.
    lines = reported if done.returncode else reported.splitlines()[-1]
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
    files = marked_files()
    with ThreadPoolExecutor(args.at_once) as pool:
        passed = list(pool.map(lambda each: run(*each, args.arguments, files), runs))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
