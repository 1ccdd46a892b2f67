"""The folder of a run's checkpoints. A crash at any moment leaves the last complete checkpoint intact.

    step-00000100/         complete: renamed to this after every byte of it was on disk
    latest                 the name of the one saved last; replaced atomically, after the folder was renamed
    .saving-00000150/      being written; what a crash leaves of it is deleted at the next start
    damaged-step-00000125  found damaged when a run resumed; kept for inspection

Only rank 0 writes here; all ranks read. Links are not followed: what is read, replaced and removed is in this folder.
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
        """Returns the complete checkpoints, newest first."""
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if _is_checkpoint(path)]
        return sorted(found, key=self.step_of, reverse=True)

    def latest(self) -> Path | None:
        """Returns the checkpoint saved last, or None."""
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

    # --- rank 0 only --------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Deletes what is partly written or partly deleted. Must not run during a save."""
        if self.folder.is_dir():
            for path in (*self.folder.glob(".saving-*"), self.folder / ".latest"):
                _delete(path)

    def commit(self, step: int) -> None:
        """Gives a complete checkpoint its final name, and makes it the latest.

        Everything that needs disk space comes first. If the rename fails, a replaced checkpoint gets its name back.
        """
        path, pointer = self.path_of(step), self._new_pointer(self.path_of(step))
        # The step may exist already, if the run resumed from an earlier one.
        replaced = self._rename_to_delete(path) if os.path.lexists(path) else None
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
        """Deletes all but the newest ``keep`` checkpoints, none if 0; failures are retried the next time."""
        with contextlib.suppress(OSError):
            for path in self.checkpoints()[keep:] if keep else []:
                self._rename_to_delete(path)
        with contextlib.suppress(OSError):
            self.sweep()

    def put_aside(self, path: Path) -> Path:
        """Renames a damaged checkpoint, so that it is not used any more; returns its new path."""
        aside, number = self.folder / f"damaged-{path.name}", 2
        while aside.exists():
            aside, number = self.folder / f"damaged-{path.name}.{number}", number + 1
        try:
            os.rename(path, aside)
        except OSError as error:
            raise CheckpointError(
                f"a damaged checkpoint cannot be renamed: {error.strerror}",
                where=str(path),
                fix="make the folder writable, or delete the checkpoint",
            ) from None
        with contextlib.suppress(OSError):  # disk full: the next save sets the pointer
            if remaining := self.checkpoints():
                self._point_at(remaining[0])
            else:
                (self.folder / "latest").unlink(missing_ok=True)
        return aside

    def _rename_to_delete(self, path: Path) -> Path:
        """Renames a checkpoint before it is deleted: if partly deleted, it must not look complete."""
        renamed = self.folder / f".saving-{path.name}"
        _delete(renamed)
        os.rename(path, renamed)
        return renamed

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
    """Deletes a folder with its contents, a file or a link; ignores errors."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
