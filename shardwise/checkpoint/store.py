"""The folder that holds a run's checkpoints, and why a crash at any moment leaves the last good one.

    step-00000100/         whole: it got its name, by one rename, after every byte of it was on disk
    latest                 the name of the one saved last; replaced in one step, after the folder has its name
    .saving-00000150/      being written; whatever a crash leaves of it is swept away at the next start
    damaged-step-00000125  found altered when a run resumed; kept for whoever wants to look

One rank writes here (`rank 0` of the run); all of them read. Links are not followed: what is read, replaced and
removed lies in this folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from shardwise.checkpoint.disk import read_file, sync_folder, write_text
from shardwise.errors import CheckpointError

__all__ = ["Store"]

_NAME = re.compile(r"step-([0-9]{8,})")


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
        found = [path for path in self.folder.iterdir() if _is_checkpoint(path)]
        return sorted(found, key=self.step_of, reverse=True)

    def latest(self) -> Path | None:
        """The one saved last, or None."""
        try:
            name = read_file(self.folder / "latest", 1000, follow_links=False).decode().strip()
        except (OSError, UnicodeDecodeError):
            return None
        path = self.folder / name
        return path if path.name == name and _is_checkpoint(path) else None

    @staticmethod
    def step_of(path: Path) -> int:
        match = _NAME.fullmatch(path.name)
        assert match is not None
        return int(match[1])

    # --- what one rank does -------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Removes what is half written, or half removed; while no rank saves."""
        if self.folder.is_dir():
            for path in (*self.folder.glob(".saving-*"), self.folder / ".latest"):
                _delete(path)

    def commit(self, step: int) -> None:
        """Gives a checkpoint that is whole on disk its name, and makes it the latest.

        All that needs room on disk comes first; if a rename fails all the same, the old checkpoint has its name back.
        """
        path, pointer = self.path_of(step), self._new_pointer(self.path_of(step))
        # A run that went back has come to this step again.
        replaced = self._put_off(path) if os.path.lexists(path) else None
        try:
            os.rename(self.saving_path(step), path)
        except BaseException:
            if replaced is not None:
                os.rename(replaced, path)
            raise
        sync_folder(self.folder)
        self._set_pointer(pointer)
        if replaced is not None:
            _delete(replaced)

    def prune(self, keep: int) -> None:
        """Keeps the newest ``keep``, all if it is 0. What cannot be removed now is tried again the next time."""
        with contextlib.suppress(OSError):
            for path in self.checkpoints()[keep:] if keep else []:
                self._put_off(path)
        with contextlib.suppress(OSError):
            self.sweep()

    def put_aside(self, path: Path) -> Path:
        """Takes a damaged checkpoint out of the way without losing it; where it went."""
        aside, number = self.folder / f"damaged-{path.name}", 2
        while aside.exists():
            aside, number = self.folder / f"damaged-{path.name}.{number}", number + 1
        try:
            os.rename(path, aside)
        except OSError as error:
            raise CheckpointError(
                f"a damaged checkpoint cannot be put aside: {error.strerror}",
                where=str(path),
                fix="make the folder writable, or remove the checkpoint",
            ) from None
        with contextlib.suppress(OSError):  # a full disk: the next save points at itself
            if remaining := self.checkpoints():
                self._point_at(remaining[0])
            else:
                (self.folder / "latest").unlink(missing_ok=True)
        return aside

    def _put_off(self, path: Path) -> Path:
        """Renames what is to be removed: a folder that is half removed must not look like a checkpoint."""
        doomed = self.folder / f".saving-{path.name}"
        _delete(doomed)
        os.rename(path, doomed)
        return doomed

    def _point_at(self, path: Path) -> None:
        self._set_pointer(self._new_pointer(path))

    def _new_pointer(self, path: Path) -> Path:
        pointer = self.folder / ".latest"
        write_text(pointer, path.name + "\n")
        return pointer

    def _set_pointer(self, pointer: Path) -> None:
        os.replace(pointer, self.folder / "latest")
        sync_folder(self.folder)


def _is_checkpoint(path: Path) -> bool:
    return bool(_NAME.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()


def _delete(path: Path) -> None:
    """Removes a folder and what is in it, or a file or link, as far as that can be done."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
