"""The records that a run writes about itself: one line per step, and a summary at the end."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.train.run_files import replace_file

__all__ = [
    "CONFIG",
    "CURVE",
    "METRICS",
    "SUMMARY",
    "TENSORBOARD",
    "RunFacts",
    "StepRecord",
    "Summary",
    "keep_metrics_up_to",
    "read_metrics",
]

CONFIG = "config.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
CURVE = "loss.png"
TENSORBOARD = "tensorboard"


@dataclass(frozen=True)
class RunFacts:
    """What is known before the first step."""

    name: str
    folder: str
    model: str
    num_parameters: int
    num_tokens: int
    mode: str
    precision: str
    device: str
    world_size: int
    num_steps: int
    first_step: int
    tokens_of_step: int
    peak_flops: float | None
    flops_of_token: float
    losses_before: tuple[float, ...] = ()
    """The losses that a resumed run recorded before."""


@dataclass(frozen=True)
class StepRecord:
    """The figures of one step; ``step`` counts from 1."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    seconds: float
    tokens_per_second: float
    memory_bytes: int
    mfu: float | None = None
    saving: bool = False
    """Whether a checkpoint was being written at the time."""
    eval_loss: float | None = None

    def to_json(self) -> str:
        values = {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        return json.dumps(values)


@dataclass(frozen=True)
class Summary:
    """How a run, or one part of a resumed run, ended."""

    ended: str
    folder: str
    step: int
    num_steps: int
    first_loss: float | None
    last_loss: float | None
    """The first loss of the whole run, and the last of this part; None if there was no step."""
    eval_loss: float | None
    seconds: float
    tokens: int
    tokens_per_second: float
    memory_bytes: int
    checkpoint: str | None
    curve: str | None = None
    unwritten: tuple[str, ...] = ()
    """What could not be written, and why; checkpoints are reported elsewhere."""

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read_metrics(folder: Path) -> list[StepRecord]:
    """Returns the records of all steps of a run, in order.

    Lines that a crash or a full disk cut short are skipped. If a run went back to an earlier step, and the lines after
    that step could not be removed, the later line of a step counts.
    """
    records: list[StepRecord] = []
    path = folder / METRICS
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            record = StepRecord(**json.loads(line))
            while records and records[-1].step >= record.step:
                records.pop()
        except (ValueError, TypeError, RecursionError):
            continue
        records.append(record)
    return records


def keep_metrics_up_to(folder: Path, step: int) -> None:
    """Drops the records of later steps, which will run again."""
    kept = [record.to_json() + "\n" for record in read_metrics(folder) if record.step <= step]
    replace_file(folder / METRICS, "".join(kept))
