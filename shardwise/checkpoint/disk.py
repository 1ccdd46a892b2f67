"""Reads and writes a checkpoint's files: written to disk with fsync, and with checksums.

Every file of a checkpoint is opened here. Only regular files are opened for reading: a pipe would block forever, a
device never end. Only new files are opened for writing: a link under the same name is removed, not followed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

__all__ = [
    "FileRecord",
    "RawFile",
    "bytes_of",
    "checksum_of",
    "create_file",
    "open_file",
    "read_file",
    "sync_folder",
    "write_text",
]

ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class FileRecord:
    """Size and checksum of a file when it was written."""

    num_bytes: int
    crc32: int


class RawFile:
    """A file of raw tensors that is written once, from start to end, and checksummed on the way."""

    def __init__(self, path: Path) -> None:
        self._file = create_file(path, buffering=0)
        self._num_bytes = self._crc = 0

    @property
    def record(self) -> FileRecord:
        return FileRecord(self._num_bytes, self._crc)

    def append(self, tensor: torch.Tensor, *, aligned: bool = True) -> int:
        """Appends a tensor's elements, after padding if ``aligned``; returns the offset of the first."""
        if aligned:
            self._write(b"\0" * (-self._num_bytes % ALIGNMENT_BYTES))
        start = self._num_bytes
        whole = tensor.detach().cpu().contiguous()
        self._write(bytes_of(whole))
        return start

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            # In blocks, so that the checksum reads from the cache what was just written.
            count = self._file.write(view[: 1 << 22])
            self._crc = zlib.crc32(view[:count], self._crc)
            self._num_bytes += count
            view = view[count:]

    def __enter__(self) -> RawFile:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns a view of a contiguous CPU tensor's memory; the tensor must outlive the view."""
    num_bytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")


def checksum_of(file: BinaryIO) -> int:
    crc = 0
    while block := file.read(1 << 22):
        crc = zlib.crc32(block, crc)
    return crc


def open_file(path: Path, *, follow_links: bool = True) -> BinaryIO:
    """Opens a regular file for reading; never blocks, whatever has this name.

    Raises:
        OSError: there is no such file, it is not a regular file, or it is a link and ``follow_links`` is False.
    """
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    if not follow_links and path.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link", str(path))
    descriptor = os.open(path, flags if follow_links else flags | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_file(path: Path, limit_bytes: int, *, follow_links: bool = True) -> bytes:
    """Reads a whole file; raises OSError if it has more than ``limit_bytes``."""
    with open_file(path, follow_links=follow_links) as file:
        # On some file systems (/proc) files are longer than their size says, so the content is checked too.
        is_short = os.fstat(file.fileno()).st_size <= limit_bytes
        content = file.read(limit_bytes + 1) if is_short else b""
    if not is_short or len(content) > limit_bytes:
        raise OSError(errno.EFBIG, f"it has more than {limit_bytes} bytes", str(path))
    return content


def create_file(path: Path, *, buffering: int = -1) -> BinaryIO:
    """Creates a new, empty file, and removes what had its name before."""
    path.unlink(missing_ok=True)
    return path.open("xb", buffering=buffering)


def write_text(path: Path, text: str) -> None:
    """Writes a text file; it is on disk when this returns."""
    with create_file(path) as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Makes created, renamed and removed names in a folder survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
