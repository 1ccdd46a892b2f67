"""Files of a run's folder: replaced whole, appended to line by line, and never written through a link.

A run's folder may have been brought from elsewhere. A link in it would have us write to a file that its maker chose,
with our rights; so links are refused wherever we write.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterable
from pathlib import Path

from shardwise.checkpoint.disk import sync_folder
from shardwise.errors import ConfigError

__all__ = ["LineFile", "fill_standard_streams", "open_for_append", "refuse_links", "replace_file"]


def replace_file(path: Path, content: str | bytes) -> None:
    """Writes a file that is there as a whole, or as it was before: at any moment, also after a crash."""
    data = content.encode() if isinstance(content, str) else content
    unfinished = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def open_for_append(path: Path) -> int:
    """A descriptor; an OSError where the file is a link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def refuse_links(paths: Iterable[Path]) -> None:
    """Raises ConfigError if one of them is a symbolic link."""
    for path in paths:
        if path.is_symlink():
            raise ConfigError(
                f"{path} is a symbolic link, and a run does not write through links",
                where="the run's folder",
                fix="put the file or folder itself there, or move the whole run to where the link points",
            )


class LineFile:
    """A file that grows by whole lines. A line that could not be written does not spoil the next one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._is_torn = False

    def write(self, line: str) -> None:
        """Adds a line; an OSError leaves it out."""
        if self._descriptor is None or self._was_removed():
            self.close()
            self._descriptor = open_for_append(self._path)
        data = (("\n" if self._is_torn else "") + line + "\n").encode()
        while data:
            count = os.write(self._descriptor, data)
            data = data[count:]
            self._is_torn = bool(data)

    def _was_removed(self) -> bool:
        """Whether the file was removed or moved: what is written to it would never be seen."""
        assert self._descriptor is not None
        try:
            return not os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
        except FileNotFoundError:
            return True

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor, self._is_torn = None, False


def fill_standard_streams() -> None:
    """Opens the null device where standard input, output or error is closed.

    Or the next files to be opened would be given their numbers, and whatever libraries print would go there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  for as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  for as long as the process lives
