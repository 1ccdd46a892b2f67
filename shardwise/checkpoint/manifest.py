"""The page that describes a checkpoint: which tensors, where their bytes lie, and how to tell that none has changed.

    step-00000100/
      manifest.json     tensors: dtype, shape, chunks; files: size and checksum; run: step, samples, configuration
      rank-00000.bin    chunks of tensors, end to end, raw

It is JSON, and nothing but text and numbers is ever made of it: reading a checkpoint cannot run code that someone
put there. The page carries its own checksum; a page that is cut short or altered is refused, never half believed.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.disk import FileRecord, checksum_of
from shardwise.errors import CheckpointError

__all__ = [
    "MANIFEST",
    "Chunk",
    "Manifest",
    "TensorRecord",
    "first_damage",
    "read_manifest",
]

MANIFEST = "manifest.json"
FORMAT = 1
ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Dtypes a checkpoint may hold, by the names torch gives them."""


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor: where in the tensor, and where on disk."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class TensorRecord:
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but the bytes of its tensors; ``run`` is what the run keeps for itself."""

    tensors: dict[str, TensorRecord]
    files: dict[str, FileRecord]
    run: dict[str, Any]

    def to_text(self) -> str:
        body = {
            "format": FORMAT,
            "run": self.run,
            "files": {name: [file.num_bytes, file.crc32] for name, file in sorted(self.files.items())},
            "tensors": {
                name: {
                    "dtype": tensor.dtype,
                    "shape": tensor.shape,
                    "chunks": [
                        [chunk.offsets, chunk.sizes, chunk.file, chunk.start] for chunk in tensor.chunks
                    ],
                }
                for name, tensor in sorted(self.tensors.items())
            },
        }
        text = json.dumps(body, sort_keys=True)
        return f'{{"crc32": {zlib.crc32(text.encode())}, "body": {text}}}\n'

    @staticmethod
    def from_text(text: str, where: str) -> Manifest:
        """Raises CheckpointError unless the text is, to the last letter, what ``to_text`` wrote."""
        try:
            page = json.loads(text)
            body = page["body"]
            if zlib.crc32(json.dumps(body, sort_keys=True).encode()) != page["crc32"]:
                raise ValueError("its checksum does not match")
            if body["format"] != FORMAT:
                raise ValueError(f"it is of format {body['format']}, known is {FORMAT}")
            files = {_plain(name): FileRecord(*record) for name, record in body["files"].items()}
            tensors = {name: _tensor(record, files) for name, record in body["tensors"].items()}
            return Manifest(tensors, files, dict(body["run"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"the manifest of a checkpoint cannot be read: {error}",
                where=where,
                fix="resume from another checkpoint of the run",
            ) from None


def _plain(name: Any) -> str:
    """A file of this very folder: no path may lead out of it."""
    if not isinstance(name, str) or name != os.path.basename(name) or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is not the name of a file in its folder")
    return name


def _tensor(record: dict[str, Any], files: dict[str, FileRecord]) -> TensorRecord:
    dtype, shape = record["dtype"], tuple(record["shape"])
    if dtype not in ITEM_BYTES:
        raise ValueError(f"there is no dtype {dtype!r}")
    chunks = []
    for offsets, sizes, file, start in record["chunks"]:
        chunk = Chunk(tuple(offsets), tuple(sizes), file, start)
        inside = len(chunk.offsets) == len(chunk.sizes) == len(shape) and all(
            offset >= 0 and size >= 0 and offset + size <= whole
            for offset, size, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)
        )
        if not inside or start < 0 or start + chunk.numel * ITEM_BYTES[dtype] > files[file].num_bytes:
            raise ValueError("a chunk does not lie inside its tensor and file")
        chunks.append(chunk)
    tensor = TensorRecord(dtype, shape, tuple(chunks))
    if sum(chunk.numel for chunk in chunks) != tensor.numel:
        raise ValueError("the chunks of a tensor do not make up the whole")
    return tensor


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of a checkpoint's folder; raises CheckpointError if it is missing or damaged."""
    path = Path(folder) / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"there is no readable checkpoint: {error}",
            where=str(folder),
            fix="pass a folder that holds manifest.json, such as runs/tiny/checkpoints/step-00000100",
        ) from None
    return Manifest.from_text(text, str(path))


def first_damage(folder: Path, manifest: Manifest, names: list[str] | None = None) -> str | None:
    """What is wrong with the first damaged file of a checkpoint, or None; ``names`` picks files to look at."""
    for name in sorted(manifest.files) if names is None else names:
        record = manifest.files[name]
        try:
            num_bytes = (folder / name).stat().st_size
            if num_bytes != record.num_bytes:
                return f"{name} has {num_bytes} bytes, it was written with {record.num_bytes}"
            if checksum_of(folder / name) != record.crc32:
                return f"the checksum of {name} does not match: its bytes have changed"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None
