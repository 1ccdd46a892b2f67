"""``shardwise runs``: what is in a folder, what runs did and how they ended, how they differ, and which are damaged.

Everything is read from the files that runs leave; nothing of torch is needed.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.manifest import MANIFEST, first_damage, read_manifest
from shardwise.checkpoint.store import Store
from shardwise.errors import CheckpointError, ConfigError
from shardwise.train.records import (
    CONFIG,
    METRICS,
    SUMMARY,
    StepRecord,
    command_to_go_on,
    counted,
    format_bytes,
    format_count,
    format_duration,
    read_metrics,
    short_path,
    smoothed,
    sparkline,
)
from shardwise.train.run_folder import CHECKPOINTS, LOGS, FolderLock, is_locked, lock_holder

__all__ = [
    "Run",
    "compare_runs",
    "describe_folder",
    "find_runs",
    "list_runs",
    "prune_run",
    "read_run",
    "show_run",
    "verify_run",
]


@dataclass(frozen=True)
class CheckpointFacts:
    name: str
    step: int
    num_bytes: int
    saved_at: float


@dataclass(frozen=True)
class Run:
    """What a run's folder says about it."""

    folder: Path
    recipe: str
    settings: tuple[str, ...]
    config: dict[str, Any]
    records: list[StepRecord]
    summary: dict[str, Any]
    checkpoints: tuple[CheckpointFacts, ...]
    """The newest first."""
    holder: str
    """Which process is training in it now; empty if none is."""

    @property
    def step(self) -> int:
        newest = self.checkpoints[0].step if self.checkpoints else 0
        return max(newest, self.records[-1].step if self.records else 0)

    @property
    def num_steps(self) -> int:
        found = self.config.get("train.steps", 0)
        return found if isinstance(found, int) else 0

    @property
    def state(self) -> str:
        """How the run stands: running, finished, stopped, or ended without a summary."""
        if self.holder:
            return "running"
        if self.summary.get("step") == self.step and self.summary.get("ended") in ("finished", "stopped"):
            # A run that was given more steps since is not finished.
            ended = str(self.summary["ended"])
            return "stopped" if ended == "finished" and self.step < self.num_steps else ended
        return "broken off" if self.records or self.checkpoints else "not begun"

    @property
    def loss(self) -> float | None:
        values = smoothed([record.loss for record in self.records])
        return values[-1] if values else None

    @property
    def eval_record(self) -> StepRecord | None:
        return next((record for record in reversed(self.records) if record.eval_loss is not None), None)

    @property
    def changed_at(self) -> float:
        times = [facts.saved_at for facts in self.checkpoints]
        for name in (METRICS, SUMMARY, CONFIG):
            with contextlib.suppress(OSError):
                times.append((self.folder / name).stat().st_mtime)
        return max(times, default=0.0)

    def as_json(self) -> dict[str, Any]:
        evaluated = self.eval_record
        return {
            "folder": str(self.folder),
            "state": self.state,
            "step": self.step,
            "num_steps": self.num_steps,
            "loss": self.loss,
            "eval_loss": None if evaluated is None else evaluated.eval_loss,
            "eval_step": None if evaluated is None else evaluated.step,
            "recipe": self.recipe,
            "settings": list(self.settings),
            "config": self.config,
            "checkpoints": [vars(facts) for facts in self.checkpoints],
            "num_bytes": sum(facts.num_bytes for facts in self.checkpoints),
        }


def is_run(folder: Path) -> bool:
    if (folder / CHECKPOINTS).is_dir() or (folder / METRICS).is_file():
        return True
    return "config" in _read_json(folder / CONFIG)


def find_runs(folder: Path, depth: int = 3) -> list[Path]:
    """Returns the runs in a folder and below it, in the order of their names."""
    if not folder.is_dir():
        return []
    if is_run(folder):
        return [folder]
    if not depth:
        return []
    inner = sorted(
        path
        for path in _entries(folder)
        if path.is_dir() and not path.name.startswith(".") and not path.is_symlink()
    )
    return [run for path in inner for run in find_runs(path, depth - 1)]


def read_run(folder: str | Path) -> Run:
    """Reads what a run's folder says; raises ConfigError if it is not one."""
    path = Path(folder).expanduser()
    if not path.is_dir() or not is_run(path):
        raise ConfigError(
            f"there is no run in '{folder}'",
            where=str(folder),
            fix="pass the folder of a run, such as runs/tiny; 'shardwise runs' lists those here",
        )
    config = _read_json(path / CONFIG)
    settings = config.get("settings")
    return Run(
        folder=path,
        recipe=str(config.get("recipe") or ""),
        settings=tuple(map(str, settings)) if isinstance(settings, list) else (),
        config=config["config"] if isinstance(config.get("config"), dict) else {},
        records=read_metrics(path),
        summary=_read_json(path / SUMMARY),
        checkpoints=tuple(_checkpoints_of(path)),
        holder=lock_holder(path) if is_locked(path) else "",
    )


def _checkpoints_of(folder: Path) -> Iterator[CheckpointFacts]:
    for path in Store(folder / CHECKPOINTS).checkpoints():
        sizes = [file.stat() for file in _entries(path) if file.is_file()]
        when = max((entry.st_mtime for entry in sizes), default=0.0)
        yield CheckpointFacts(path.name, Store.step_of(path), sum(entry.st_size for entry in sizes), when)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _read_json(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_text())
        if isinstance(found, dict):
            return found
    return {}


# --- as text ------------------------------------------------------------------------------------------------------


def list_runs(runs: Iterable[Run], width: int) -> Iterator[str]:
    """Yields a table of runs; narrow terminals get fewer columns, and no column is cut."""
    rows = [
        [
            short_path(run.folder),
            run.state,
            f"{run.step}/{run.num_steps or '?'}",
            "–" if run.loss is None else f"{run.loss:.4f}",
            "–" if run.eval_record is None else f"{run.eval_record.eval_loss:.4f}",
            format_bytes(sum(facts.num_bytes for facts in run.checkpoints)),
            format_age(time.time() - run.changed_at),
            sparkline([record.loss for record in run.records], 16),
        ]
        for run in runs
    ]
    yield from table([["run", "state", "step", "loss", "eval", "size", "changed", "curve"], *rows], width)


def table(rows: list[list[str]], width: int) -> Iterator[str]:
    """Yields aligned rows; columns that do not fit the width are left out, from the right."""
    sizes = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    while len(sizes) > 3 and sum(sizes) + 2 * (len(sizes) - 1) > width:
        sizes.pop()
    for row in rows:
        yield "  ".join(cell.ljust(size) for cell, size in zip(row, sizes, strict=False)).rstrip()


def show_run(run: Run) -> Iterator[str]:
    """Yields all about one run: settings, checkpoints, curve, how it ended, and how to go on."""
    yield short_path(run.folder)
    yield f"  {'state':<12} {_state_text(run)}"
    if run.recipe:
        yield f"  {'recipe':<12} {run.recipe}"
    for number, setting in enumerate(run.settings):
        yield f"  {'settings' if not number else '':<12} {setting}"
    if run.records:
        first, last = run.records[0].loss, run.loss
        yield f"  {'loss':<12} {first:.4f} → {last:.4f}"
        yield f"  {'':<12} {sparkline([record.loss for record in run.records], 44)}"
    if (evaluated := run.eval_record) is not None:
        old = "" if evaluated.step == run.step else f", at step {evaluated.step}"
        yield f"  {'eval loss':<12} {evaluated.eval_loss:.4f}{old}"
    if run.records:
        last_record = run.records[-1]
        spent = sum(record.seconds for record in run.records)
        speed = format_count(last_record.tokens_per_second)
        yield f"  {'speed':<12} {speed} tokens/s, {format_duration(spent)} in steps"
        yield f"  {'memory':<12} {format_bytes(last_record.memory_bytes)} peak per rank"
    for number, facts in enumerate(run.checkpoints):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(facts.saved_at)) if facts.num_bytes else "empty"
        yield f"  {'checkpoints' if not number else '':<12} {facts.name}  {format_bytes(facts.num_bytes)}  {when}"
    for path in sorted(_entries(run.folder / LOGS)):
        yield f"  {'log':<12} {short_path(path)}"
    if command := go_on_with(run):
        yield f"  {'go on with':<12} {command}"


def _state_text(run: Run) -> str:
    if run.holder:
        return f"running at step {run.step} of {run.num_steps}: {run.holder}"
    if run.state == "broken off":
        saved = f"saved at step {run.checkpoints[0].step}" if run.checkpoints else "with no checkpoint"
        return f"broken off at step {run.step} of {run.num_steps or '?'}, {saved}"
    return f"{run.state} at step {run.step} of {run.num_steps or '?'}"


def go_on_with(run: Run) -> str:
    """Returns the command that continues a run; empty while it runs, or if there is nothing to continue."""
    if run.holder or not any(facts.num_bytes for facts in run.checkpoints):
        return ""
    return command_to_go_on(run.recipe, run.folder, run.step, run.num_steps)


def compare_runs(runs: list[Run], width: int) -> Iterator[str]:
    """Yields what differs between runs: settings, results, and their curves on one scale."""
    names = [short_path(run.folder) for run in runs]
    keys = sorted({key for run in runs for key in run.config})
    differing = [
        key for key in keys if key != "output.folder" and len({repr(run.config.get(key)) for run in runs}) > 1
    ]
    rows = [["", *names]]
    rows += [[key, *(str(run.config.get(key, "–")) for run in runs)] for key in differing]
    rows.append(["state", *(run.state for run in runs)])
    rows.append(["step", *(str(run.step) for run in runs)])
    rows.append(["loss", *("–" if run.loss is None else f"{run.loss:.4f}" for run in runs)])
    rows.append(
        [
            "eval loss",
            *(
                "–"
                if run.eval_record is None
                else f"{run.eval_record.eval_loss:.4f} (step {run.eval_record.step})"
                for run in runs
            ),
        ]
    )
    if sum(max(len(row[column]) for row in rows) + 2 for column in range(len(rows[0]))) <= width:
        yield from table(rows, width)
    else:
        # Too wide for a table: one setting below the other.
        for row in rows[1:]:
            yield row[0]
            for name, value in zip(names, row[1:], strict=True):
                yield f"  {name}: {value}"
    values = [smoothed([record.loss for record in run.records]) for run in runs]
    low = min((min(curve) for curve in values if curve), default=0.0)
    high = max((max(curve) for curve in values if curve), default=0.0)
    last = max((run.step for run in runs), default=1)
    for name, run, curve in zip(names, runs, values, strict=True):
        length = max(1, 40 * run.step // max(1, last))
        if not curve:
            continue
        yield ""
        yield f"{name}: loss, steps 1 to {run.step}"
        yield f"  {sparkline(curve, length, low, high)}"
    if not differing:
        yield ""
        yield "their settings are the same"


def describe_folder(folder: Path) -> Iterator[str]:
    """Yields what is in a folder that is no run: a checkpoint, an exported model, weights, text, or nothing known."""
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        run = manifest.run
        size = sum(record.num_bytes for record in manifest.files.values())
        ranks = "" if "world_size" not in run else f", saved on {counted(run['world_size'], 'rank')}"
        yield f"{short_path(folder)}: a checkpoint of step {run['step']}, {format_bytes(size)}{ranks}"
        yield f"  {'use it':<12} shardwise generate {short_path(folder)}"
        return
    config = _read_json(folder / CONFIG)
    weights = sorted(folder.glob("*.safetensors"))
    if weights:
        size = sum(path.stat().st_size for path in weights)
        kind = config.get("model_type")
        yield (
            f"{short_path(folder)}: {'a model of type ' + str(kind) if kind else 'weights without a config.json'}, "
            f"{counted(len(weights), 'file')} of safetensors, {format_bytes(size)}"
        )
        if kind:
            yield f"  {'use it':<12} shardwise generate {short_path(folder)}"
        return
    files = [path for path in _entries(folder) if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    yield f"{short_path(folder)}: no run, checkpoint or model; {counted(len(files), 'file')}, {format_bytes(size)}"


def format_age(seconds: float) -> str:
    for size, noun in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            return f"{counted(int(seconds // size), noun)} ago"
    return "just now"


# --- what changes or checks a run ---------------------------------------------------------------------------------


def prune_run(run: Run, keep: int) -> list[str]:
    """Deletes all but the newest ``keep`` checkpoints, and returns the names of those deleted.

    Raises:
        ConfigError: a run is active in the folder, or none would be kept.
    """
    if keep < 1:
        raise ConfigError(
            f"{keep} checkpoints would be kept",
            where=str(run.folder),
            fix="keep 1 or more; to delete a run, delete its folder",
        )
    lock = FolderLock(run.folder)
    try:
        store = Store(run.folder / CHECKPOINTS)
        before = [path.name for path in store.checkpoints()]
        store.prune(keep)
        after = {path.name for path in store.checkpoints()}
        return [name for name in before if name not in after]
    finally:
        lock.release()


def verify_run(run: Run) -> Iterator[tuple[str, str | None]]:
    """Yields each checkpoint of a run, and what is damaged in it: every byte is compared with its checksum."""
    for facts in run.checkpoints:
        path = run.folder / CHECKPOINTS / facts.name
        try:
            yield facts.name, first_damage(path, read_manifest(path))
        except CheckpointError as error:
            yield facts.name, error.what
