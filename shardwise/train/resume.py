"""Where a run goes on: the folder, the checkpoint in it, and what to do when that one is damaged."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.manifest import Manifest, first_damage, read_manifest
from shardwise.checkpoint.store import Store
from shardwise.errors import CheckpointError, ConfigError
from shardwise.train.team import Team

__all__ = ["CHECKPOINTS", "Found", "find_good_checkpoint", "new_folder", "newest_folder"]

CHECKPOINTS = "checkpoints"


def new_folder(wanted: str, name: str) -> Path:
    """A folder for a run that begins, made; rank 0 calls this for all.

    Raises:
        ConfigError: a run lives there already, and nothing of it is touched; or it cannot be made.
    """
    folder = Path(wanted).expanduser()
    if not wanted:
        folder, number = Path("runs") / name, 2
        while folder.exists():
            folder, number = Path("runs") / f"{name}-{number}", number + 1
    elif Store(folder / CHECKPOINTS).checkpoints():
        raise ConfigError(
            f"a run with checkpoints lives in {folder}",
            where="output.folder",
            fix=f"continue it with --resume {folder}, or choose another folder",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(
            f"there can be no run in '{folder}': {error.strerror}",
            where="output.folder" if wanted else "the present folder",
            fix="choose a folder that can be written to: --set output.folder=FOLDER",
        ) from None
    return folder.resolve()


def newest_folder(name: str) -> Path:
    """The run of this name under ``runs/`` that saved last."""
    candidates = [
        (latest.stat().st_mtime, latest.parent.parent)
        for latest in Path("runs").glob(f"*/{CHECKPOINTS}/latest")
        if re.fullmatch(rf"{re.escape(name)}(-\d+)?", latest.parent.parent.name)
    ]
    if not candidates:
        raise ConfigError(
            f"there is no run of '{name}' under runs/ to continue",
            where="--resume",
            fix="name its folder: --resume FOLDER",
        )
    return max(candidates)[1].resolve()


@dataclass(frozen=True)
class Found:
    path: Path
    manifest: Manifest
    warnings: tuple[str, ...]


def find_good_checkpoint(store: Store, team: Team) -> Found:
    """The newest checkpoint whose every byte is as it was written; on every rank.

    Ranks share the files out to read them. A damaged checkpoint is put aside with a warning, and the one before it
    is taken.

    Raises:
        CheckpointError: there is none.
    """
    warnings: list[str] = []
    for path in team.from_first(store.checkpoints):
        problem = _shared_check(path, team)
        if problem is None:
            return Found(path, read_manifest(path), tuple(warnings))
        aside = team.from_first(lambda path=path: store.put_aside(path))  # type: ignore[misc]
        warnings.append(
            f"{path.name} is damaged: {problem}; kept as {aside.name}, going back to the one before"
        )
    raise CheckpointError(
        "there is no good checkpoint to continue from" + "".join(f"\n    {line}" for line in warnings),
        where=str(store.folder),
        fix="start again without --resume, in another folder",
    )


def _shared_check(path: Path, team: Team) -> str | None:
    problem = None
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        problem = error.what
    else:
        own = sorted(manifest.files)[team.rank :: team.world_size]
        problem = first_damage(path, manifest, own)
    return next((found for found in team.collect(problem) if found is not None), None)
