"""``shardwise train``: resolves recipe and settings, opens the run's folder, and trains on all ranks."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.store import Store
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.policies import set_trust, trust
from shardwise.torch_internals import store_of
from shardwise.train.config import Config, with_settings
from shardwise.train.display import Quiet, make_display
from shardwise.train.failures import RankLog, failure_of, remove_empty_logs
from shardwise.train.launch import (
    AssignedRank,
    exit_now,
    given_ranks,
    joined_process_group,
    plan_ranks,
    run_local_ranks,
)
from shardwise.train.loop import Trainer
from shardwise.train.optional_packages import require
from shardwise.train.recipes import RECIPES, load_recipe
from shardwise.train.records import CONFIG
from shardwise.train.run_files import fill_standard_streams
from shardwise.train.run_folder import (
    CHECKPOINTS,
    LOCK,
    LOGS,
    FolderLock,
    new_folder,
    newest_folder,
    refuse_checkpoints_in,
    refuse_links_in,
)
from shardwise.train.team import Team

__all__ = ["Request", "train"]

_PEER_SECONDS = 5.0
_HAS_REPORTED = "has told"


@dataclass(frozen=True)
class Request:
    """The arguments of ``shardwise train``."""

    recipe: str | None = None
    settings: tuple[str, ...] = ()
    ranks: int | None = None
    device: str = "auto"
    resume: str | None = None
    """A run's folder; empty: the newest run of the recipe's name; None: a new run."""
    auto_resume: bool = False
    """Continues the run in ``output.folder`` if it has a checkpoint, and begins it otherwise."""
    stop_after: int | None = None
    show: str | None = None
    """Replaces ``output.show`` this time only; it is not saved with the run."""


def train(request: Request) -> int:
    """Trains, and returns the exit status."""
    fill_standard_streams()
    assigned = given_ranks(os.environ) if request.ranks is None else None
    num_gpus = torch.cuda.device_count()
    if assigned is None:
        try:
            # Before any rank exists, so that a bad request fails at once.
            require("numpy", "shardwise train")
            num_ranks, kind = plan_ranks(request.ranks, request.device, num_gpus)
            with opened_run_folder(request) as (request, folder):
                work = partial(train_on_rank, request, folder)
                return run_local_ranks(work, num_ranks, kind, logs=folder / LOGS)
        except ShardwiseError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return _train_as_assigned_rank(assigned, request, num_gpus)


def _train_as_assigned_rank(assigned: AssignedRank, request: Request, num_gpus: int) -> int:
    """Trains as a rank that torchrun or Slurm started, and returns the exit status."""
    status = 0
    failure_store: Any = None

    def report(error: BaseException) -> None:
        nonlocal status
        status = 1
        failure = failure_of(error, assigned.rank)
        if getattr(error, "agreed", False) and assigned.rank:
            return
        if failure.is_consequence and failure_store is not None:
            # All ranks print to one place: let the rank that failed first report first, unless it reports nothing.
            with contextlib.suppress(RuntimeError):
                failure_store.wait([_HAS_REPORTED], timedelta(seconds=_PEER_SECONDS))
        text = failure.text if failure.is_expected else f"rank {assigned.rank} failed\n{failure.text}"
        print(f"error: {text}", file=sys.stderr, flush=True)
        if failure_store is not None:
            with contextlib.suppress(RuntimeError):
                failure_store.set(_HAS_REPORTED, str(assigned.rank))

    try:
        require("numpy", "shardwise train")
        kind = ("cuda" if num_gpus else "cpu") if request.device == "auto" else request.device
        with joined_process_group(assigned, kind) as device:
            try:
                team = Team()
                failure_store = store_of(team.group, "shardwise/failures")
                with contextlib.ExitStack() as stack:
                    # Rank 0 locks the folder for all ranks.
                    request, folder = team.from_first(lambda: stack.enter_context(opened_run_folder(request)))
                    log = RankLog(folder / LOGS, assigned.rank)
                    stack.callback(log.close)
                    try:
                        train_on_rank(request, folder, device, team)
                    except BaseException as error:
                        log.record_failure(error)
                        raise
            except (Exception, SystemExit) as error:  # noqa: BLE001  reported before peers notice that we left
                report(error)
                if assigned.world_size > 1:
                    exit_now(1)
    except Exception as error:  # noqa: BLE001  the launcher only wants a status
        report(error)
    return status


def train_on_rank(request: Request, folder: Path, device: torch.device, team: Team | None = None) -> None:
    """Trains on one rank, in an existing process group and a folder that is already locked."""
    team = Team() if team is None else team
    config, origin = team.together(partial(resolve, request))
    output = config.output if request.show is None else replace(config.output, show=request.show)  # type: ignore[arg-type]
    display = make_display(output) if team.rank == 0 else Quiet()
    before = set_trust(trace_dir=trust().trace_dir or str(folder / LOGS))
    try:
        trainer = Trainer(config, folder, team, device, display, origin)
        if request.resume is not None:
            trainer.resume()
        trainer.run(request.stop_after)
    finally:
        set_trust(trace_dir=before.trace_dir)


@contextlib.contextmanager
def opened_run_folder(request: Request) -> Iterator[tuple[Request, Path]]:
    """Finds or creates the run's folder and locks it; yields the request, with the folder to resume, and the folder.

    Raises:
        ConfigError: the request is invalid, the folder belongs to another run, or has links where runs write.
    """
    if request.auto_resume:
        request = _to_resume_or_begin(request)
    if request.resume == "":
        named = with_settings(load_recipe(request.recipe or "tiny"), request.settings)
        request = replace(request, resume=str(newest_folder(named.name)))
    config, _ = resolve(request)
    is_new = request.resume is None
    if request.resume is None:
        folder = new_folder(config.output.folder, config.name)
    else:
        folder = Path(request.resume).resolve()
    lock = FolderLock(folder)
    try:
        refuse_links_in(folder)
        if is_new:
            # Checked again: before the lock was taken, another run may have begun and ended here.
            refuse_checkpoints_in(folder)
        yield request, folder
    finally:
        # A run that never began leaves nothing behind.
        is_empty = False
        with contextlib.suppress(OSError):
            remove_empty_logs(folder / LOGS)
            is_empty = is_new and [path.name for path in folder.iterdir()] == [LOCK]
        lock.release(remove=is_empty)
        if is_empty:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _to_resume_or_begin(request: Request) -> Request:
    """Returns the request of a launcher that starts the same command again and again, once it is known which it is."""
    config, _ = resolve(request)
    if request.resume is not None or not config.output.folder:
        raise ConfigError(
            "--auto-resume needs to know the folder of the run"
            if request.resume is None
            else "--auto-resume and --resume exclude each other",
            where="--auto-resume",
            fix="name the folder with --out, and leave out --resume",
        )
    folder = Path(config.output.folder).expanduser()
    return replace(request, resume=str(folder)) if Store(folder / CHECKPOINTS).checkpoints() else request


def resolve(request: Request) -> tuple[Config, dict[str, Any]]:
    """Returns the config of a request, and its recipe and settings; a resumed run keeps those that it had.

    A run that was started again by its launcher has them from the command, which is the same every time.
    """
    recipe, settings = request.recipe, list(request.settings)
    if request.resume and not request.auto_resume:
        path = Path(request.resume) / CONFIG
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
            # A run's folder may come from anywhere: code must not run only because the folder names it.
            raise ConfigError(
                f"the run uses a recipe of your own, '{known}'",
                where=f"--resume {request.resume}",
                fix=f"name it again: shardwise train {shlex.quote(str(known))} --resume {request.resume}",
            )
        if recipe is None or recipe == known:
            recipe = known
            kept = before.get("settings", [])
            _refuse_code_named_by(kept, settings, request)
            settings = [*kept, *settings]
    recipe = recipe or "tiny"
    config = with_settings(load_recipe(recipe), settings)
    if request.resume:
        config = replace(config, output=replace(config.output, folder=request.resume))
    return config, {"recipe": recipe, "settings": settings}


def _refuse_code_named_by(kept: list[str], settings: list[str], request: Request) -> None:
    """Raises ConfigError if a run's folder names a class to import, and the request does not name it itself."""

    def named(assignments: list[str]) -> str | None:
        texts = [text.partition("=") for text in assignments]
        values = [
            value.strip() for name, _, value in texts if name.strip() in ("optimizer", "optimizer.name")
        ]
        return values[-1] if values else None

    optimizer = named(kept)
    is_known = optimizer is None or "." not in optimizer or optimizer.startswith("torch.optim.")
    if not is_known and named(settings) is None:
        raise ConfigError(
            f"the run uses an optimizer of your own, '{optimizer}'",
            where=f"--resume {request.resume}",
            fix=f"name it again: --set optimizer.name={optimizer}",
        )
