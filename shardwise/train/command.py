"""``shardwise train``: resolves recipe and settings, opens the run's folder, and trains on all ranks."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.weights import TOKENIZER
from shardwise.errors import ShardwiseError
from shardwise.policies import set_trust, trust
from shardwise.torch_internals import store_of
from shardwise.train.checkpointing import refuse_fewer_steps
from shardwise.train.config_file import config_text
from shardwise.train.display import Display, Logged, Quiet, make_display
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
from shardwise.train.rank_states import RANKS, RankState, clear_rank_states
from shardwise.train.records import CONFIG_FILE, LOG, counted, short_path
from shardwise.train.request import Request, Resolved, find_run_to_resume, resolve
from shardwise.train.run_files import fill_standard_streams, replace_file
from shardwise.train.run_folder import (
    LOCK,
    LOGS,
    FolderLock,
    new_folder,
    refuse_checkpoints_in,
    refuse_links_in,
)
from shardwise.train.team import Team
from shardwise.train.tokenizing import remove_unfinished

__all__ = ["Request", "resolve", "train"]

_PEER_SECONDS = 5.0
_HAS_REPORTED = "has told"


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
                devices = counted(num_ranks, f"{kind.upper()} rank")
                say(f"starting {devices} in {short_path(folder)} …", request)
                work = partial(train_on_rank, request, folder)
                return run_local_ranks(work, num_ranks, kind, logs=folder / LOGS)
        except ShardwiseError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    if assigned.rank == 0 and assigned.world_size > 1:
        ranks = counted(assigned.world_size, "rank")
        say(f"waiting for {ranks} at {assigned.address}:{assigned.port} …", request)
    return _train_as_assigned_rank(assigned, request, num_gpus)


def say(text: str, request: Request) -> None:
    """Shows what the command waits for before a display exists, beside the output proper."""
    asked = [setting.partition("=") for setting in request.settings]
    shown = [value.strip() for name, _, value in asked if name.strip() == "output.show"]
    if (request.show or (shown[-1] if shown else "auto")) not in ("quiet", "json"):
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


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
    resolved = team.together(partial(resolve, request))
    config = resolved.config
    output = config.output if request.show is None else replace(config.output, show=request.show)  # type: ignore[arg-type]
    display: Display = Quiet() if team.rank else Logged(make_display(output), folder / LOG)
    before = set_trust(trace_dir=trust().trace_dir or str(folder / LOGS))
    team.from_first(partial(clear_rank_states, folder))
    state = RankState(folder, team.rank)
    # Of an error that all ranks have agreed on, where each of them was says nothing.
    is_agreed = True
    try:
        trainer = Trainer(config, folder, team, device, display, resolved.origin, state.now)
        if request.resume is not None:
            trainer.resume()
            if request.stop_after is not None:
                done, last = trainer.progress.step, request.stop_after
                team.together(lambda: refuse_fewer_steps(last, done, "--stop-after"))
            _tell_what_is_kept(resolved, trainer.display)
        if team.rank == 0:
            _write_config_file(folder, resolved, trainer.display)
        trainer.run(request.stop_after, request.profile)
    except BaseException as error:
        is_agreed = getattr(error, "agreed", False)
        raise
    finally:
        state.close(remove=is_agreed)
        set_trust(trace_dir=before.trace_dir)


def _tell_what_is_kept(resolved: Resolved, display: Display) -> None:
    kept = [setting for setting in resolved.kept if not setting.startswith("output.")]
    if kept:
        display.note(f"kept from before: {', '.join(kept)}")
    if resolved.recipe_before:
        display.note(f"the recipe was '{resolved.recipe_before}' before: settings given then are not kept")


def _write_config_file(folder: Path, resolved: Resolved, display: Display) -> None:
    """Writes the settings so that they can be read and used again; resuming does without."""
    path = folder / CONFIG_FILE
    try:
        text = config_text(resolved.config, resolved.base, resolved.recipe, short_path(path))
        replace_file(path, text.encode(errors="replace"))
    except OSError as error:
        display.warn(f"{CONFIG_FILE} cannot be written, training continues: {error.strerror}")


@contextlib.contextmanager
def opened_run_folder(request: Request) -> Iterator[tuple[Request, Path]]:
    """Finds or creates the run's folder and locks it; yields the request, with the folder to resume, and the folder.

    Raises:
        ConfigError: the request is invalid, the folder belongs to another run, or has links where runs write.
    """
    request = find_run_to_resume(request)
    config = resolve(request).config
    is_new = request.resume is None
    if request.resume is None:
        folder = new_folder(config.output.folder, config.name)
    else:
        folder = Path(request.resume).expanduser().resolve()
    was_empty = is_new and not any(folder.iterdir())
    lock = FolderLock(folder)
    try:
        refuse_links_in(folder)
        if is_new:
            # Checked again: before the lock was taken, another run may have begun and ended here.
            refuse_checkpoints_in(folder)
        yield request, folder
    finally:
        # A run that never began leaves nothing behind.
        is_left = False
        with contextlib.suppress(OSError):
            remove_unfinished(folder)
            remove_empty_logs(folder / LOGS)
            is_left = was_empty and {path.name for path in folder.iterdir()} <= {LOCK, RANKS, TOKENIZER}
        lock.release(remove=is_left)
        if is_left:
            with contextlib.suppress(OSError):
                for name in (RANKS, TOKENIZER):
                    shutil.rmtree(folder / name, ignore_errors=True)
                folder.rmdir()
