"""Runs the cases of a program on this rank, in turn, and writes down what each returned.

torchrun --nproc-per-node=2 PROGRAM.py FOLDER CASE...
torchrun --nproc-per-node=2 -m shardwise run PROGRAM.py FOLDER CASE...
"""

import os
import random
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CASES: dict[str, Callable[[Path], Any]] = {}


def case(*arguments: Any, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds a case: the function's name and the arguments name it. The first argument is a folder of its own."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        values = [*arguments, *(key if value is True else f"{key}={value}" for key, value in options.items())]
        name = "-".join([function.__name__.strip("_"), *map(str, values)])
        CASES[name] = lambda folder: function(folder, *arguments, **options)
        CASES[name].__module__ = function.__module__
        return function

    return add


def main(reset: Callable[[], None] = lambda: None) -> None:
    folder = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for name in sys.argv[2:] or CASES:
        torch.manual_seed(0)
        random.seed(0)
        own = folder / name
        own.mkdir(parents=True, exist_ok=True)
        try:
            result = CASES[name](own)
        except BaseException:
            # The other rank waits for this one: torchrun ends it.
            (own / f"failure{rank}.txt").write_text(traceback.format_exc())
            raise
        torch.save(result, own / f"result{rank}.pt")
        reset()
    if dist.is_initialized():
        dist.destroy_process_group()
