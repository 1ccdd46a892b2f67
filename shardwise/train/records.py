"""The records that a run writes about itself, one per step and a summary at the end, and how they are shown as text."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.train.run_files import replace_file

__all__ = [
    "CONFIG",
    "CONFIG_FILE",
    "CURVE",
    "LOG",
    "LOGGED_RUNS",
    "METRICS",
    "SUMMARY",
    "TENSORBOARD",
    "RunFacts",
    "StepRecord",
    "Summary",
    "command_to_go_on",
    "counted",
    "format_bytes",
    "format_count",
    "format_duration",
    "headline",
    "json_line",
    "keep_metrics_up_to",
    "read_metrics",
    "recent_loss",
    "short_path",
    "smoothed",
    "sparkline",
    "summary_rows",
]

CONFIG = "config.json"
CONFIG_FILE = "config.toml"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
CURVE = "loss.png"
LOG = "log.txt"
TENSORBOARD = "tensorboard"
LOGGED_RUNS = "loggers.json"


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
    seconds: float
    tokens_per_second: float
    memory_bytes: int
    grad_norm: float | None = None
    """None if the step was skipped, because its gradients overflowed in fp16."""
    mfu: float | None = None
    saving: bool = False
    """Whether a checkpoint was being written at the time."""
    eval_loss: float | None = None
    loss_scale: float | None = None
    """In fp16, what the next step's loss is multiplied by."""
    time: float | None = None
    """When the step ended, in seconds since 1970."""

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
    """The first loss of the whole run, and ``recent_loss`` at the end; None if there was no step."""
    eval_loss: float | None
    seconds: float
    tokens: int
    tokens_per_second: float
    memory_bytes: int
    checkpoint: str | None
    curve: str | None = None
    unwritten: tuple[str, ...] = ()
    """What could not be written, and why; checkpoints are reported elsewhere."""
    skipped: int = 0
    """Steps of the whole run whose gradients overflowed in fp16."""
    eval_step: int | None = None
    """The step of ``eval_loss``."""
    go_on_with: str = ""
    """The command that continues the run; empty if there is no checkpoint."""

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


def json_line(value: Any) -> str:
    """Returns a value as JSON for other programs; null for numbers that are not finite, which JSON does not have."""
    return json.dumps(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value


# --- as text -------------------------------------------------------------------------------------------------------


_BARS = "▁▂▃▄▅▆▇█"


def headline(facts: RunFacts) -> list[str]:
    return [
        (
            f"{facts.name}: {facts.model}, {format_count(facts.num_parameters)} parameters, "
            f"{format_count(facts.num_tokens)} tokens of data"
        ),
        (
            f"{counted(facts.world_size, facts.device + ' rank')}, sharding {facts.mode}, {facts.precision}, "
            f"{format_count(facts.tokens_of_step)} tokens per step; {short_path(facts.folder)}"
        ),
    ]


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    ended = f"{summary.ended} at step {summary.step} of {summary.num_steps}"
    speed = f"{format_count(summary.tokens_per_second)} tokens/s, {format_duration(summary.seconds)} in total"
    if not summary.tokens:
        speed = ""
        if summary.step >= summary.num_steps:
            ended += ": no steps were left; use --set train.steps=N to train longer"
    rows = [
        ("ended", ended),
        ("loss", _loss_change(summary.first_loss, summary.last_loss)),
        ("eval loss", _evaluation(summary)),
        ("speed", speed),
        ("skipped", _skipped_steps(summary.skipped)),
        ("memory", f"{format_bytes(summary.memory_bytes)} peak per rank"),
        ("checkpoint", short_path(summary.checkpoint) if summary.checkpoint else "none"),
        ("curve", short_path(summary.curve) if summary.curve else ""),
        ("not written", "; ".join(summary.unwritten)),
        ("go on with", summary.go_on_with),
    ]
    return [(key, value) for key, value in rows if value]


def _skipped_steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}, whose gradients overflowed in fp16" if count else ""


def _loss_change(first: float | None, last: float | None) -> str:
    return "" if first is None or last is None else f"{first:.4f} → {last:.4f}"


def _evaluation(summary: Summary) -> str:
    if summary.eval_loss is None:
        return ""
    is_old = summary.eval_step is not None and summary.eval_step != summary.step
    return f"{summary.eval_loss:.4f}" + (f", at step {summary.eval_step}" if is_old else "")


def command_to_go_on(recipe: str, folder: str | Path, step: int, num_steps: int) -> str:
    """Returns the command that continues a run; for one that has no steps left, with twice as many."""
    # A recipe of one's own must be named again; one that the folder does not know, for the first time.
    named = "RECIPE" if not recipe else recipe if ":" in recipe else None
    words = ["shardwise", "train", *([named] if named else []), "--resume", short_path(folder)]
    if num_steps and step >= num_steps:
        words += ["--set", f"train.steps={2 * num_steps}"]
    return shlex.join(words)


def short_path(path: str | Path) -> str:
    """Returns a path as it is shortest: from the current folder, if it is below that."""
    with contextlib.suppress(ValueError, OSError):
        return str(Path(path).resolve().relative_to(Path.cwd()))
    return str(path)


def counted(number: Any, noun: str, plural: str = "") -> str:
    """Returns a number with its noun: 1 rank, 2 ranks."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def format_count(number: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


def format_bytes(number: float) -> str:
    for size, letter in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return f"{number / 1024:.0f} KiB" if number >= 1024 else counted(round(number), "byte")


def format_duration(seconds: float) -> str:
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def recent_loss(losses: list[float]) -> float | None:
    """Returns the mean of the last twentieth of all losses, which is less erratic than the last one."""
    recent = [loss for loss in losses[-max(1, len(losses) // 20) :] if math.isfinite(loss)]
    return sum(recent) / len(recent) if recent else losses[-1] if losses else None


def smoothed(values: list[float]) -> list[float]:
    """Returns running means, each over a twentieth of all values; values that are not finite are left out."""
    width = max(1, len(values) // 20)
    finite = [value if math.isfinite(value) else None for value in values]
    found: list[float] = []
    total, num_values = 0.0, 0
    for number, value in enumerate(finite):
        old = finite[number - width] if number >= width else None
        total += (value or 0.0) - (old or 0.0)
        num_values += (value is not None) - (old is not None)
        if num_values:
            found.append(total / num_values)
    return found


def sparkline(
    values: list[float], width: int, lowest: float | None = None, highest: float | None = None
) -> str:
    """Returns a curve as one line of text, in which each bar is the mean of several consecutive values.

    The lowest and highest bar stand for the lowest and highest mean, or for the values given.
    """
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if not finite:
        return ""
    count = min(width, len(finite))
    edges = [len(finite) * number // count for number in range(count + 1)]
    means = [sum(finite[low:high]) / (high - low) for low, high in itertools.pairwise(edges) if high > low]
    low = min(means) if lowest is None else lowest
    high = max(means) if highest is None else highest
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[min(len(_BARS) - 1, max(0, round((mean - low) * scale)))] for mean in means)
