"""Which checkpoint a run goes on from, and what to do when that one is damaged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.manifest import Manifest, first_damage, read_manifest
from shardwise.checkpoint.store import Store
from shardwise.errors import CheckpointError
from shardwise.train.team import Team

__all__ = ["Found", "find_good_checkpoint"]


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
