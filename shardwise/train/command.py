"""``shardwise train``: from a recipe and settings to a run on all ranks."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import traceback
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import ConfigError, ShardwiseError
from shardwise.train.config import Config, with_settings
from shardwise.train.display import Quiet, make_display
from shardwise.train.launch import given_ranks, joined, plan_ranks, run_own_ranks
from shardwise.train.loop import Trainer
from shardwise.train.recipes import RECIPES, load_recipe
from shardwise.train.resume import new_folder, newest_folder
from shardwise.train.team import Team

__all__ = ["Request", "train"]


@dataclass(frozen=True)
class Request:
    """What the command line asked for."""

    recipe: str | None = None
    settings: tuple[str, ...] = ()
    ranks: int | None = None
    device: str = "auto"
    resume: str | None = None
    """A run's folder; empty: the newest run of the recipe's name; None: a new run."""
    stop_after: int | None = None
    show: str | None = None
    """For this time alone; a run does not remember it."""


def train(request: Request) -> int:
    """Trains; the exit status."""
    given = given_ranks(os.environ) if request.ranks is None else None
    num_gpus = torch.cuda.device_count()
    if given is None:
        try:
            num_ranks, kind = plan_ranks(request.ranks, request.device, num_gpus)
            # Once here, before any rank exists: what can be refused now is refused at once.
            resolve(request)
        except ShardwiseError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return run_own_ranks(partial(train_on_rank, request), num_ranks, kind)
    try:
        kind = ("cuda" if num_gpus else "cpu") if request.device == "auto" else request.device
        with joined(given, kind) as device:
            train_on_rank(request, device)
    except ShardwiseError as error:
        if given.rank == 0 or not getattr(error, "agreed", False):
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except Exception:  # noqa: BLE001  the launcher only wants a status
        print(f"error: rank {given.rank} failed\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        return 1
    return 0


def train_on_rank(request: Request, device: torch.device) -> None:
    """One rank's part of a run, in a group that is there."""
    team = Team()
    request = team.from_first(partial(_located, request))
    config, origin = team.together(partial(resolve, request))
    resumes = request.resume is not None
    folder = team.from_first(partial(_folder, request, config))
    output = config.output if request.show is None else replace(config.output, show=request.show)  # type: ignore[arg-type]
    display = make_display(output) if team.rank == 0 else Quiet()
    try:
        trainer = Trainer(config, folder, team, device, display, origin)
    except BaseException:
        if team.rank == 0 and not resumes:
            # Nothing has come of it; what has something in it stays.
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    if resumes:
        trainer.resume()
    trainer.run(request.stop_after)


def _located(request: Request) -> Request:
    """With the folder to continue, where only the newest was asked for."""
    if request.resume != "":
        return request
    config = with_settings(load_recipe(request.recipe or "tiny"), request.settings)
    return replace(request, resume=str(newest_folder(config.name)))


def _folder(request: Request, config: Config) -> Path:
    if request.resume is None:
        return new_folder(config.output.folder, config.name)
    return Path(request.resume).resolve()


def resolve(request: Request) -> tuple[Config, dict[str, Any]]:
    """The config that a request means, and how it came about: a resumed run keeps its recipe and settings."""
    recipe, settings = request.recipe, list(request.settings)
    if request.resume:
        path = Path(request.resume) / "config.json"
        try:
            before = json.loads(path.read_text())
        except (OSError, ValueError):
            before = {}
            if recipe is None:
                raise ConfigError(
                    f"there is no run in '{request.resume}' to continue",
                    where=f"--resume {request.resume}",
                    fix="pass the folder of a run, the one that holds config.json",
                ) from None
        known = before.get("recipe")
        if recipe is None and known is not None and known not in RECIPES:
            # A run's folder may come from anywhere; what it names must not be run because it is named there.
            raise ConfigError(
                f"the run was made by a recipe of your own, '{known}'",
                where=f"--resume {request.resume}",
                fix=f"name it again: shardwise train {shlex.quote(str(known))} --resume {request.resume}",
            )
        if recipe is None or recipe == known:
            recipe = known
            settings = [*before.get("settings", []), *settings]
    recipe = recipe or "tiny"
    config = with_settings(load_recipe(recipe), settings)
    if request.resume:
        config = replace(config, output=replace(config.output, folder=request.resume))
    return config, {"recipe": recipe, "settings": settings}
