"""What a run writes down about itself: one line a step, one summary at the end."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["METRICS", "RunFacts", "StepRecord", "Summary", "keep_metrics_up_to", "read_metrics"]

METRICS = "metrics.jsonl"


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
    """Of a run that goes on: what it wrote down until then."""


@dataclass(frozen=True)
class StepRecord:
    """One step; ``step`` counts from 1."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    seconds: float
    tokens_per_second: float
    memory_bytes: int
    mfu: float | None = None
    saving: bool = False
    """Whether a checkpoint was being written meanwhile."""
    eval_loss: float | None = None

    def to_json(self) -> str:
        values = {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        return json.dumps(values)


@dataclass(frozen=True)
class Summary:
    """How a run, or this part of it, ended."""

    ended: str
    folder: str
    step: int
    num_steps: int
    first_loss: float | None
    last_loss: float | None
    """The first of the whole run, the last of this part of it; None where there was no step."""
    eval_loss: float | None
    seconds: float
    tokens: int
    tokens_per_second: float
    memory_bytes: int
    checkpoint: str | None
    curve: str | None = None

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read_metrics(folder: Path) -> list[StepRecord]:
    """Every step that a run wrote down; a last line that was cut short by a crash is left out."""
    records = []
    path = folder / METRICS
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(StepRecord(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return records


def keep_metrics_up_to(folder: Path, step: int) -> None:
    """Forgets steps that will be run again."""
    kept = [record.to_json() + "\n" for record in read_metrics(folder) if record.step <= step]
    (folder / METRICS).write_text("".join(kept))
