"""Saves a run's checkpoints, finds the newest good one again, and reports the outcome of saves."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.manifest import Manifest, first_damage, read_manifest
from shardwise.checkpoint.saver import Saver
from shardwise.checkpoint.store import Store
from shardwise.checkpoint.training_state import TrainingState
from shardwise.errors import CheckpointError, ConfigError
from shardwise.train.config import Config
from shardwise.train.display import Display
from shardwise.train.loss_scaling import LossScaling
from shardwise.train.rank_grid import described
from shardwise.train.records import counted
from shardwise.train.settings import as_json
from shardwise.train.step import Progress
from shardwise.train.team import Team

__all__ = [
    "GoodCheckpoint",
    "RunCheckpoints",
    "changes_of_split",
    "find_good_checkpoint",
    "refuse_fewer_steps",
]


class RunCheckpoints:
    """Saves and restores a run's tensors and its two numbers, step and samples.

    Args:
        store: the checkpoints on disk.
        state: the tensors.
        config: the settings of the run.
        team: all ranks of the run.
        display: shows the outcome of saves.
        manifest_entries: more entries for the manifest of each checkpoint.
        ensure_folder: called on rank 0 before a save; returns the other run that is using the folder, if any.
        on_saved: called with the step and the path of each checkpoint that is on disk.
        scaling: the loss scaling of a run in fp16.
    """

    def __init__(
        self,
        store: Store,
        state: TrainingState,
        config: Config,
        team: Team,
        display: Display,
        manifest_entries: dict[str, Any],
        ensure_folder: Callable[[], str | None],
        on_saved: Callable[[int, Path], None],
        scaling: LossScaling | None = None,
    ) -> None:
        self._store, self._state, self._team, self._display = store, state, team, display
        self._ensure_folder, self._on_saved, self._scaling = ensure_folder, on_saved, scaling
        self._num_steps = config.train.steps
        self._saver = Saver(
            store,
            team.new_group(),
            keep=config.checkpoint.keep,
            asynchronous=config.checkpoint.asynchronous,
        )
        self._manifest_entries = {
            "world_size": team.world_size,
            "mode": described(config.sharding),
            "config": as_json(config),
            "hugging_face": config.model.hugging_face_config(),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            **manifest_entries,
        }

    @property
    def is_busy(self) -> bool:
        return self._saver.is_busy

    def save(self, progress: Progress) -> str | None:
        """Saves the current state; an asynchronous save delays training only for a copy.

        Returns why no save was tried, or None if one was.
        """
        # The folder must not be recreated during a save.
        self._saver.wait()
        if (other := self._team.from_first(self._ensure_folder)) is not None:
            self._warn(progress.step, problem := f"another run is using the folder: {other}")
            return problem
        progress.saved_step = progress.step
        entries = {"step": progress.step, "samples": progress.samples, **self._manifest_entries}
        if self._scaling is not None:
            entries["loss_scaling"] = self._scaling.state()
        self._saver.save(progress.step, self._state.parts(), entries)
        return None

    def save_and_wait(self, progress: Progress) -> str | None:
        """Ensures a checkpoint of this step, trying again if a save failed; returns the problem, if there was one."""
        # The save under way ends first, so that every rank knows its outcome.
        self._saver.wait()
        problem = self.report_outcomes(progress)
        if progress.saved_step != progress.step:
            refused = self.save(progress)
            self._saver.wait()
            problem = refused or self.report_outcomes(progress)
        return problem

    def report_outcomes(self, progress: Progress) -> str | None:
        """Shows the outcome of saves that have ended, and returns the problem of the last one, if any."""
        problem = None
        for outcome in self._saver.outcomes():
            problem = outcome.problem
            if problem is None:
                self._display.note(f"saved {outcome.path.name} in {outcome.seconds:.1f} s")
                self._on_saved(outcome.step, outcome.path)
                continue
            if progress.saved_step == outcome.step:
                progress.saved_step = -1
            self._warn(outcome.step, problem)
        return problem

    def _warn(self, step: int, problem: str) -> None:
        if self._team.rank == 0:
            self._display.warn(
                f"the checkpoint of step {step} could not be written, training continues: {problem}"
            )

    def resume(self, progress: Progress) -> None:
        """Loads the newest good checkpoint, and sets ``progress`` to its step and samples."""
        found = find_good_checkpoint(self._store, self._team)
        for warning in found.warnings:
            self._display.warn(warning)
        step = int(found.manifest.run["step"])
        self._team.together(lambda: refuse_fewer_steps(self._num_steps, step, "train.steps"))
        had_state = self._state.load(found.path, found.manifest, self._team.group, verify=False)
        run = found.manifest.run
        progress.step = progress.saved_step = int(run["step"])
        progress.samples = int(run["samples"])
        if self._scaling is not None and isinstance(saved := run.get("loss_scaling"), dict):
            self._scaling.load(saved, str(found.path))
        if not had_state:
            self._display.note("the checkpoint contains only weights: the optimizer starts from scratch")
        if run.get("corpus") not in (None, self._manifest_entries.get("corpus")):
            self._display.warn("the data differs from what the checkpoint was trained on")
        if changes := changes_of_split(run.get("config"), self._manifest_entries["config"]):
            self._display.warn(
                f"{', '.join(changes)}: samples that are held out now may have been trained on before"
            )
        # Weights that were imported do not say who saved them.
        on = f", saved on {counted(run['world_size'], 'rank')}" if "world_size" in run else ""
        mode = f" in mode {run['mode']}" if "mode" in run else ""
        self._display.note(f"resumed {found.path.name}{on}{mode}")


def refuse_fewer_steps(wanted: int, done: int, name: str) -> None:
    """Raises ConfigError if a run that has done more steps is to end after ``wanted``."""
    if wanted < done:
        raise ConfigError(
            f"the run has done {counted(done, 'step')}, and {name} is {wanted}",
            where="--resume",
            fix=f"use {name} of {done} or more, or start a new run; nothing was changed",
        )


def changes_of_split(before: Any, now: dict[str, Any]) -> list[str]:
    """Returns how the settings that decide which samples are held out differ from those of a checkpoint."""
    if not isinstance(before, dict) or "data.held_out" not in before:
        return []
    # Before there was this setting, it was the end.
    before = {"data.held_out_from": "end", **before}
    names = ("data.held_out", "data.held_out_from", "data.packing", "model.context")
    return [
        f"{name} was {before[name]} and is {now[name]}"
        for name in names
        if name in before and name in now and before[name] != now[name]
    ]


@dataclass(frozen=True)
class GoodCheckpoint:
    path: Path
    manifest: Manifest
    warnings: tuple[str, ...]


def find_good_checkpoint(store: Store, team: Team) -> GoodCheckpoint:
    """Returns, on every rank, the newest checkpoint in which every byte is as it was written.

    Each rank verifies a part of the files. A damaged checkpoint is set aside with a warning, and the one before it is
    tried.

    Raises:
        CheckpointError: there is no good checkpoint.
    """
    warnings: list[str] = []
    for path in team.from_first(store.checkpoints):
        problem = _first_damage_on_any_rank(path, team)
        if problem is None:
            return GoodCheckpoint(path, read_manifest(path), tuple(warnings))
        aside = team.from_first(lambda path=path: store.put_aside(path))  # type: ignore[misc]
        warnings.append(f"{path.name} is damaged: {problem}; kept as {aside.name}")
    raise CheckpointError(
        "there is no good checkpoint to continue from" + "".join(f"\n    {line}" for line in warnings),
        where=str(store.folder),
        fix="start again without --resume, in another folder",
    )


def _first_damage_on_any_rank(path: Path, team: Team) -> str | None:
    problem = None
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        problem = error.what
    else:
        own = sorted(manifest.files)[team.rank :: team.world_size]
        problem = first_damage(path, manifest, own)
    return next((found for found in team.collect(problem) if found is not None), None)
