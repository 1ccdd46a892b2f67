"""A training run small enough to repeat many times: its config, one call of the trainer on every rank, its files."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint.manifest import read_manifest
from shardwise.checkpoint.reading import MappedFiles
from shardwise.train.config import Checkpoints, Config, Data, Evaluation, Optimization, Training
from shardwise.train.llama import Llama
from shardwise.train.loop import Trainer
from shardwise.train.report import Report
from shardwise.train.settings import with_settings
from shardwise.train.team import Team

STEPS = 6
FSYNC = os.fsync


def small_config(text, *settings):
    config = Config(
        name="test",
        # Sizes that no number of ranks divides, and two heads that share keys and values.
        model=Llama(layers=2, width=20, heads=2, kv_heads=1, hidden=27, vocabulary=128, context=8),
        data=Data(path=str(text)),
        # Sums differ in their last bits between numbers of ranks, and Adam turns tiny gradients into full steps.
        optimizer=Optimization(lr=1e-2, warmup=2, clip=0.0),
        train=Training(steps=STEPS, batch_size=12),
        checkpoint=Checkpoints(every=0, keep=0),
        evaluate=Evaluation(batches=1),
    )
    return with_settings(config, settings)


def write_text(folder):
    path = Path(folder) / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return path


class Noted:
    """A display that records what it is shown."""

    def __init__(self):
        self.lines, self.records, self.summary = [], [], None

    def begin(self, facts): ...

    def step(self, record):
        self.records.append(record)

    def note(self, text):
        self.lines.append(text)

    def warn(self, text):
        self.lines.append(f"warning: {text}")

    def end(self, summary):
        self.summary = summary

    def close(self): ...


def run_part(config, folder, *, resume=False, stop_after=None, display=None, device=None, draws=False):
    """Runs one part of a run on this rank; returns the losses of its steps, and the lines it displayed.

    Skips drawing the curve (unless ``draws``) and fsync, which would take most of the time of so small a run.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    display = Noted() if display is None else display
    trainer = Trainer(config, Path(folder), Team(), device or torch.device("cpu"), display)
    if resume:
        trainer.resume()
    with pytest.MonkeyPatch.context() as patch:
        if not draws:
            patch.setattr(Report, "draw_curve", lambda self: None)
        if os.fsync is FSYNC:
            patch.setattr(os, "fsync", lambda descriptor: None)
        trainer.run(stop_after)
    return trainer.progress.losses, display.lines


def in_mode(config, mode):
    return dataclasses.replace(config, sharding=dataclasses.replace(config.sharding, mode=mode))


def whole_tensors(checkpoint):
    """Returns all tensors of a checkpoint, each assembled from its chunks."""
    checkpoint = Path(checkpoint)
    manifest = read_manifest(checkpoint)
    files = MappedFiles(checkpoint, manifest)
    tensors = {}
    for name, record in manifest.tensors.items():
        whole = torch.empty(record.shape, dtype=getattr(torch, record.dtype))
        for chunk in record.chunks:
            block = whole
            for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                block = block.narrow(dim, start, size)
            block.copy_(files.read(record, chunk))
        tensors[name] = whole
    return tensors


def checkpoint_at(folder, step=STEPS):
    return Path(folder) / "checkpoints" / f"step-{step:08d}"


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name
