"""Reads and writes files in a run's folder: replaces them atomically, appends whole lines, and never writes to links.

A run's folder may come from somebody else. A link in it could make a run write, with the user's permissions, to a file
that its author chose; so links are refused wherever a run writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardwise.checkpoint.disk import sync_folder
from shardwise.errors import ConfigError

__all__ = [
    "LineFile",
    "fill_standard_streams",
    "open_for_append",
    "read_json",
    "refuse_links",
    "replace_file",
    "write_with_time",
]


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty one if there is none."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_text())
        if isinstance(found, dict):
            return found
    return {}


def replace_file(path: Path, content: str | bytes) -> None:
    """Replaces a file atomically: at any moment, also after a crash, it has either its old or its new content."""
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
    """Opens a file for appending and returns its descriptor; raises OSError if it is a link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def write_with_time(descriptor: int, text: str) -> None:
    """Writes a line, or several, to a log, with the time in front; raises OSError if that fails."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    os.write(descriptor, f"{now}  {text}\n".encode(errors="backslashreplace"))


def refuse_links(paths: Iterable[Path]) -> None:
    """Raises ConfigError if one of the paths is a symbolic link."""
    for path in paths:
        if path.is_symlink():
            raise ConfigError(
                f"{path} is a symbolic link, and a run does not write through links",
                where="the run's folder",
                fix="put the file or folder itself there, or move the whole run to where the link points",
            )


class LineFile:
    """A file that grows by whole lines. A line that could not be written does not damage the next one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._is_torn = False

    def write(self, line: str) -> None:
        """Appends a line; raises OSError if it cannot be written in full."""
        if self._descriptor is None or self._was_removed():
            self.close()
            self._descriptor = open_for_append(self._path)
        data = (("\n" if self._is_torn else "") + line + "\n").encode()
        while data:
            count = os.write(self._descriptor, data)
            data = data[count:]
            self._is_torn = bool(data)

    def _was_removed(self) -> bool:
        """Returns whether the file was removed or moved, so that nobody would see what is written to it."""
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
    """Opens the null device for each of standard input, output and error that is closed.

    Otherwise the next files to be opened would get their descriptors, and what libraries print would go there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115  for as long as the process lives
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  for as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  for as long as the process lives
