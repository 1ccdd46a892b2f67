"""Bytes that are on disk when we say so, and how to tell later that none has changed."""

from __future__ import annotations

import ctypes
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["FileRecord", "RawFile", "bytes_of", "checksum_of", "sync_folder", "write_text"]

ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class FileRecord:
    """What a file held when it was written."""

    num_bytes: int
    crc32: int


class RawFile:
    """A file of raw tensors that is written once, from start to end, with a checksum of all of it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._num_bytes = self._crc = 0

    @property
    def record(self) -> FileRecord:
        return FileRecord(self._num_bytes, self._crc)

    def append(self, tensor: torch.Tensor, *, aligned: bool = True) -> int:
        """Writes a tensor's elements, right after the last ones unless ``aligned``; the place of the first."""
        if aligned:
            self._write(b"\0" * (-self._num_bytes % ALIGNMENT_BYTES))
        start = self._num_bytes
        whole = tensor.detach().cpu().contiguous()
        self._write(bytes_of(whole))
        return start

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            # In blocks, so that the checksum finds what was just written in the cache.
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
    """The memory of a contiguous CPU tensor, which must outlive the view."""
    num_bytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")


def checksum_of(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


def write_text(path: Path, text: str) -> None:
    """Writes a file that is whole on disk when this returns."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Makes names that came and went in a folder last through a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
