"""The folder that holds a run's checkpoints, and why a crash at any moment leaves the last good one.

    step-00000100/         whole: it got its name, by one rename, after every byte of it was on disk
    latest                 the name of the one saved last; replaced in one step, after the folder has its name
    .saving-00000150/      being written; whatever a crash leaves of it is swept away at the next start
    damaged-step-00000125  found altered when a run resumed; kept for whoever wants to look

One rank writes here (`rank 0` of the run); all of them read.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from shardwise.checkpoint.disk import sync_folder, write_text
from shardwise.engine.stepping import note_checkpoint

__all__ = ["Store"]

_NAME = re.compile(r"step-(\d{8,})")


class Store:
    """The checkpoints of one run, in ``folder``."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path_of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def saving_path(self, step: int) -> Path:
        return self.folder / f".saving-{step:08d}"

    def checkpoints(self) -> list[Path]:
        """Those that were finished, newest first: a folder has its name only once it is whole."""
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=self.step_of, reverse=True)

    def latest(self) -> Path | None:
        """The one saved last, or None."""
        try:
            name = (self.folder / "latest").read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None
        path = self.folder / name
        return path if _NAME.fullmatch(name) and path.is_dir() else None

    @staticmethod
    def step_of(path: Path) -> int:
        match = _NAME.fullmatch(path.name)
        assert match is not None
        return int(match[1])

    # --- what one rank does -------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Removes what a crash left half written; before any rank saves."""
        if self.folder.is_dir():
            for path in self.folder.glob(".saving-*"):
                shutil.rmtree(path, ignore_errors=True)

    def commit(self, step: int) -> None:
        """Gives a checkpoint that is whole on disk its name, and makes it the latest."""
        path = self.path_of(step)
        if path.exists():
            # A run that went back has come to this step again.
            self._remove(path)
        os.rename(self.saving_path(step), path)
        sync_folder(self.folder)
        self._point_at(path)
        note_checkpoint(str(path))

    def discard(self, step: int) -> None:
        shutil.rmtree(self.saving_path(step), ignore_errors=True)

    def prune(self, keep: int) -> None:
        """Keeps the newest ``keep``, all if it is 0."""
        for path in self.checkpoints()[keep:] if keep else []:
            self._remove(path)

    def put_aside(self, path: Path) -> Path:
        """Takes a damaged checkpoint out of the way without losing it; where it went."""
        aside, number = self.folder / f"damaged-{path.name}", 2
        while aside.exists():
            aside, number = self.folder / f"damaged-{path.name}.{number}", number + 1
        os.rename(path, aside)
        if remaining := self.checkpoints():
            self._point_at(remaining[0])
        else:
            (self.folder / "latest").unlink(missing_ok=True)
        return aside

    def _remove(self, path: Path) -> None:
        # Renamed first: a folder that is half removed must not look like a checkpoint.
        doomed = self.folder / f".saving-{path.name}"
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def _point_at(self, path: Path) -> None:
        pointer = self.folder / ".latest"
        write_text(pointer, path.name + "\n")
        os.replace(pointer, self.folder / "latest")
        sync_folder(self.folder)
