"""Finds runs in folders and reads what they did and how they ended; prunes and verifies their checkpoints.

Everything is read from the files that runs leave; nothing of torch is needed.
"""

from __future__ import annotations

import contextlib
import os
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
    read_metrics,
    smoothed,
)
from shardwise.train.run_files import read_json
from shardwise.train.run_folder import CHECKPOINTS, FolderLock, is_locked, lock_holder

__all__ = [
    "CheckpointFacts",
    "Run",
    "entries_of",
    "find_runs",
    "prune_run",
    "read_run",
    "runs_in",
    "verify_run",
]


@dataclass(frozen=True)
class CheckpointFacts:
    name: str
    step: int
    num_bytes: int
    saved_at: float
    damage: str = ""
    """What can be seen to be wrong with it without reading it all; empty if nothing can."""


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
        return "broken off" if self.records or self.step else "not begun"

    @property
    def steps_text(self) -> str:
        """How many steps are done, and of how many, if its settings say so."""
        return f"{self.step} of {self.num_steps}" if self.num_steps else str(self.step)

    @property
    def go_on_with(self) -> str:
        """The command that continues the run; empty while it runs, or if there is nothing to continue."""
        if self.holder or all(facts.damage for facts in self.checkpoints):
            return ""
        return command_to_go_on(self.recipe, self.folder, self.step, self.num_steps)

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
            "go_on_with": self.go_on_with,
        }


def is_run(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        if (folder / CHECKPOINTS).is_dir() or (folder / METRICS).is_file():
            return True
    return "config" in read_json(folder / CONFIG)


def find_runs(folder: Path, depth: int = 3) -> list[Path]:
    """Returns the runs in a folder and below it, in the order of their names."""
    if is_run(folder):
        return [folder]
    if not depth:
        return []
    inner = sorted(
        folder / entry.name
        for entry in entries_of(folder)
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
    )
    return [run for path in inner for run in find_runs(path, depth - 1)]


def runs_in(folders: Iterable[Path]) -> list[Path]:
    """Returns the runs in several folders and below them, each once."""
    found = {path.resolve(): path for folder in folders for path in find_runs(folder)}
    return list(found.values())


def read_run(folder: str | Path) -> Run:
    """Reads what a run's folder says; raises ConfigError if it is not one."""
    path = Path(folder).expanduser()
    if not path.is_dir() or not is_run(path):
        raise ConfigError(
            f"there is no run in '{folder}'",
            where=str(folder),
            fix="pass the folder of a run, such as runs/tiny; 'shardwise runs' lists those here",
        )
    config = read_json(path / CONFIG)
    settings = config.get("settings")
    return Run(
        folder=path,
        recipe=str(config.get("recipe") or ""),
        settings=tuple(map(str, settings)) if isinstance(settings, list) else (),
        config=config["config"] if isinstance(config.get("config"), dict) else {},
        records=read_metrics(path),
        summary=read_json(path / SUMMARY),
        checkpoints=tuple(_checkpoints_of(path)),
        holder=lock_holder(path) if is_locked(path) else "",
    )


def _checkpoints_of(folder: Path) -> Iterator[CheckpointFacts]:
    for path in Store(folder / CHECKPOINTS).checkpoints():
        sizes = [entry.stat(follow_symlinks=False) for entry in entries_of(path) if entry.is_file()]
        when = max((entry.st_mtime for entry in sizes), default=0.0)
        damage = "" if (path / MANIFEST).is_file() else f"damaged: no {MANIFEST}" if sizes else "empty"
        yield CheckpointFacts(
            path.name, Store.step_of(path), sum(entry.st_size for entry in sizes), when, damage
        )


def entries_of(folder: Path) -> list[os.DirEntry[str]]:
    """Returns what is in a folder, in the order of the names; nothing if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []


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
