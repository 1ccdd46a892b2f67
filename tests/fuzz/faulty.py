"""The small model and data that `faults` trains, and the faults that are injected from inside a rank.

The fault is set before the ranks are forked, so that all ranks know it and one of them performs it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.train import Checkpoints, Config, Data, Evaluation, OwnModel, Training, samples, sources

WORDS = "this is the fault that was planned"
STEPS, EVERY = 8, 2
# Set by `faults` before ranks are forked.
fault: Fault | None = None
folder = Path()


@dataclass(frozen=True)
class Fault:
    """What happens, on which rank and in which step (counted from 1, in the current part of the run)."""

    kind: str
    rank: int
    step: int
    seconds: float = 0.0
    steps: int = 0
    """For how many steps it lasts; 0: to the end."""
    status: int = 7
    """The exit status."""


def strike(here: str, step: int) -> None:
    """Performs the fault if it is due here; called on every rank in every step, by its data and by its model."""
    if fault is None or dist.get_rank() != fault.rank:
        return
    if fault.steps and step == fault.step + fault.steps and here == "model":
        _lift()
    if step != fault.step or here != ("data" if fault.kind == "data" else "model"):
        return
    if fault.kind in ("raise", "data"):
        raise ValueError(WORDS)
    if fault.kind == "late":
        time.sleep(fault.seconds)
    elif fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "crash":
        ctypes.string_at(0)
    elif fault.kind == "exit":
        os._exit(fault.status)
    elif fault.kind == "thread":
        loader = threading.Thread(target=_raise, name="loader")
        loader.start()
        loader.join()
        raise RuntimeError("no batch came")
    elif fault.kind == "files":
        # No file descriptor from the first free one on: open files stay open.
        first_free = os.open(os.devnull, os.O_RDONLY)
        os.close(first_free)
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (first_free, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
    elif fault.kind == "disk":
        # Every write that extends a file fails from now on.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))


def _raise() -> None:
    raise ValueError(WORDS)


def _lift() -> None:
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
        _, most = resource.getrlimit(kind)
        resource.setrlimit(kind, (most, most))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.step = 0

    def forward(self, x):
        if self.training:
            self.step += 1
            strike("model", self.step)
        return x + torch.nn.functional.dropout(self.linear(x), 0.1, self.training)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(128, 8)
        self.blocks = torch.nn.Sequential(Block())
        self.head = torch.nn.Linear(8, 128)

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


class Texts(samples.Texts):
    """The data of a run, in which the fault may be."""

    _num_batches = 0

    def batch(self, samples):
        self._num_batches += 1
        strike("data", self._num_batches)
        return super().batch(samples)


sources.Texts = Texts


def recipe() -> Config:
    return Config(
        name="faulty",
        model=OwnModel(Model, Block, context=8, vocabulary=128),
        data=Data(path=str(folder / "text.txt")),
        train=Training(steps=STEPS, batch_size=4),
        checkpoint=Checkpoints(every=EVERY, keep=3),
        evaluate=Evaluation(batches=0),
    )
