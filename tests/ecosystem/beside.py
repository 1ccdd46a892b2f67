"""Runs a program on two ranks with torch's FSDP and then with ours, and compares what they wrote down."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ecosystem.programs.cases import CASES

REPOSITORY = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
# On the side "import" a program imports ours by itself, and nothing is installed.
SIDES = {"torch": [], "shardwise": ["-m", "shardwise", "run"], "import": []}


class Beside:
    """The results of a program's cases on both sides; each side runs once, with the cases that are asked for."""

    def __init__(self, program: str, folder: Path, cases: list[str]) -> None:
        self._program = program
        self._folder = folder
        self._cases = cases
        self._logs: dict[str, str] = {}

    def results(self, side: str, case: str) -> list[dict[str, Any]]:
        """What the ranks returned, on the side "torch", "shardwise" or "import"."""
        if side not in self._logs:
            self._logs[side] = self._run(side)
        files = [self._folder / side / case / f"result{rank}.pt" for rank in range(2)]
        if not all(file.exists() for file in files):
            failures = sorted((self._folder / side).glob("*/failure*.txt"))
            why = (
                "\n\n".join(f"{file.parent.name}: {file.read_text()}" for file in failures)
                or self._logs[side]
            )
            pytest.fail(f"case {case} did not end on {side}'s side\n{why[-6000:]}", pytrace=False)
        return [torch.load(file, weights_only=False) for file in files]

    def _run(self, side: str) -> str:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        environment = {
            # Some virtual machines offer AMX and end a process that uses it.
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "SHARD_WITH": side,
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self._folder / side / "hugging_face"),
            "TOKENIZERS_PARALLELISM": "false",
        }
        done = subprocess.run(
            [
                *launch,
                *SIDES[side],
                str(PROGRAMS / f"{self._program}.py"),
                str(self._folder / side),
                *self._cases,
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        if side == "shardwise":
            assert "shardwise replaces torch's FSDP and ZeRO" in done.stdout, done.stdout[-4000:]
        return done.stdout


def parameters_of(program: str, short: tuple[str, ...] | None = None) -> list[Any]:
    """The cases of a program as parameters of a test, in the order in which they run; slow ones but ``short``."""
    slow = [pytest.mark.slow]
    return [
        pytest.param(program, case, marks=[] if short is None or case in short else slow, id=case)
        for case in cases_of(program)
    ]


def cases_of(program: str) -> list[str]:
    """The cases of a program, in the order in which they run."""
    module = importlib.import_module(f"tests.ecosystem.programs.{program}").__name__
    return [name for name, case in CASES.items() if case.__module__ == module]


def differences(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """Where two results differ in anything, down to the last bit."""
    if type(ours) is not type(theirs):
        return [f"{where}: {ours!r:.80} is not {theirs!r:.80}"]
    if isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            return [f"{where}: {sorted(ours.keys() ^ theirs.keys())} are on one side alone"]
        return [found for key in ours for found in differences(ours[key], theirs[key], f"{where} {key}")]
    if isinstance(ours, (list, tuple)):
        if len(ours) != len(theirs):
            return [f"{where}: {ours!r:.200} is not {theirs!r:.200}"]
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [found for index, pair in pairs for found in differences(*pair, f"{where}[{index}]")]
    if isinstance(ours, torch.Tensor):
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            return [f"{where}: {ours.dtype} {tuple(ours.shape)} is not {theirs.dtype} {tuple(theirs.shape)}"]
        if torch.equal(ours, theirs):
            return []
        return [f"{where}: up to {(ours.double() - theirs.double()).abs().max().item()} apart"]
    return [] if ours == theirs else [f"{where}: {ours!r} is not {theirs!r}"]
