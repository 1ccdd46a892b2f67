"""The manifest of a checkpoint: its tensors, where their bytes are on disk, and checksums.

    step-00000100/
      manifest.json     tensors: dtype, shape, chunks; files: size and checksum; run: step, samples, configuration
      rank-00000.bin    raw chunks of tensors, one after another

It is JSON, from which only text and numbers are read: reading a checkpoint cannot run code. It has a checksum of its
own; a truncated or changed manifest is refused. So is one whose chunks do not tile their tensor (every element is on
disk once) or do not fill their file (every byte belongs to one tensor, or is padding in front of one).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint import strict_json
from shardwise.checkpoint.disk import ALIGNMENT_BYTES, FileRecord, checksum_of, open_file, read_file
from shardwise.checkpoint.strict_json import count, counts, obj, shown
from shardwise.errors import CheckpointError

__all__ = [
    "MANIFEST",
    "Chunk",
    "Manifest",
    "TensorRecord",
    "check_shape",
    "first_damage",
    "read_manifest",
]

MANIFEST = "manifest.json"
FORMAT = 1
LIMIT_BYTES = 1 << 29
_MAX_TENSOR_BYTES = 1 << 50
_MAX_CUT_DIMS = 6  # of a tensor: `_cover_exactly_once` looks at two to this power corners per chunk
_PAGE = re.compile(r'\{"crc32": ([0-9]{1,10}), "body": (.*)\}\n', re.DOTALL)
_FILE_NAME = re.compile(r"rank-[0-9]{5,}\.bin")
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
"""The dtypes that a checkpoint can hold, by torch's names."""


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor: its position in the tensor and on disk."""

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
    """Everything in a checkpoint but the tensors' data; ``run`` is the run's own record (step, samples, …)."""

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
        """Parses a manifest; raises CheckpointError unless it is exactly as ``to_text`` writes it."""
        try:
            page = _PAGE.fullmatch(text)
            if page is None:
                raise ValueError("it is truncated, or not a manifest")
            if zlib.crc32(page[2].encode()) != int(page[1]):
                raise ValueError("its checksum does not match")
            body = strict_json.parse(page[2])
            if count(body.get("format")) != FORMAT:
                raise ValueError(f"it has format {body['format']}, this version reads format {FORMAT}")
            obj(body, ("format", "run", "files", "tensors"))
            files = {
                _parse_file_name(name): _parse_file(record) for name, record in obj(body["files"]).items()
            }
            tensors = {
                name: _parse_tensor(name, record, files) for name, record in obj(body["tensors"]).items()
            }
            _check_filled(files, tensors)
            return Manifest(tensors, files, _parse_run(body["run"]))
        except ValueError as error:
            raise CheckpointError(
                f"the manifest of a checkpoint cannot be read: {error}",
                where=where,
                fix="resume from another checkpoint of the run",
            ) from None


def _parse_file_name(name: str) -> str:
    """Accepts only names that ranks give their files: no path may leave the folder."""
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"{shown(name)} is not the name of a rank's file")
    return name


def _parse_file(record: Any) -> FileRecord:
    num_bytes, crc32 = counts(record, 2)
    return FileRecord(num_bytes, count(crc32, 1 << 32))


def _parse_run(run: Any) -> dict[str, Any]:
    strict_json.check_nesting(obj(run))
    for key in ("step", "samples"):
        if key in run:
            count(run[key])
    return dict(run)


def _parse_tensor(name: str, record: Any, files: dict[str, FileRecord]) -> TensorRecord:
    obj(record, ("dtype", "shape", "chunks"))
    dtype, shape = strict_json.text(record["dtype"]), counts(record["shape"])
    if dtype not in ITEM_BYTES:
        raise ValueError(f"'{name}' has the unknown dtype {shown(dtype)}")
    item_bytes = ITEM_BYTES[dtype]
    check_shape(shape, item_bytes)
    if type(record["chunks"]) is not list:
        raise ValueError(f"'{name}' has no list of chunks")
    chunks = []
    for entry in record["chunks"]:
        if type(entry) is not list or len(entry) != 4:
            raise ValueError(f"'{name}' has the invalid chunk {shown(entry)}")
        offsets, sizes = counts(entry[0], len(shape)), counts(entry[1], len(shape))
        chunk = Chunk(offsets, sizes, strict_json.text(entry[2]), count(entry[3]))
        if any(offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"a chunk is not inside its tensor '{name}'")
        if chunk.file not in files or chunk.start % item_bytes or (0 in sizes and 0 not in shape):
            raise ValueError(f"a chunk of '{name}' cannot be at byte {chunk.start} of {shown(chunk.file)}")
        chunks.append(chunk)
    if not _cover_exactly_once(shape, chunks):
        raise ValueError(f"the chunks of '{name}' overlap or leave elements out")
    return TensorRecord(dtype, shape, tuple(chunks))


def check_shape(shape: tuple[int, ...], item_bytes: int) -> None:
    """Raises ValueError for impossible shapes, and for a huge size beside a 0, which would make a loop endless."""
    if len(shape) > 64 or math.prod(max(size, 1) for size in shape) * item_bytes > _MAX_TENSOR_BYTES:
        raise ValueError(f"no tensor can have the shape {shown(list(shape))}")


def _cover_exactly_once(shape: tuple[int, ...], chunks: list[Chunk]) -> bool:
    """Whether each element of a tensor is in exactly one of these chunks.

    The number of chunks that an element is in changes only at corners of chunks, so the corners with their signs
    determine it. It is one everywhere if all corners cancel out, except those of the tensor itself.
    """
    if not math.prod(shape):
        return True
    cut = [
        dim
        for dim, whole in enumerate(shape)
        if any(chunk.offsets[dim] or chunk.sizes[dim] != whole for chunk in chunks)
    ]
    if len(cut) > _MAX_CUT_DIMS:
        return False
    corners: dict[tuple[int, ...], int] = {}
    boxes = [(chunk.offsets, chunk.sizes, 1) for chunk in chunks] + [((0,) * len(shape), shape, -1)]
    for offsets, sizes, sign in boxes:
        edges = [((offsets[dim], 1), (offsets[dim] + sizes[dim], -1)) for dim in cut]
        for corner in itertools.product(*edges):
            point = tuple(position for position, _ in corner)
            corners[point] = corners.get(point, 0) + sign * math.prod(side for _, side in corner)
    return not any(corners.values())


def _check_filled(files: dict[str, FileRecord], tensors: dict[str, TensorRecord]) -> None:
    """Raises ValueError unless chunks fill each file, without overlaps, up to padding."""
    spans: dict[str, list[tuple[int, int]]] = {name: [] for name in files}
    for tensor in tensors.values():
        for chunk in tensor.chunks:
            if chunk.numel:
                spans[chunk.file].append((chunk.start, chunk.start + chunk.numel * ITEM_BYTES[tensor.dtype]))
    for name, record in files.items():
        end = 0
        for start, stop in sorted(spans[name]):
            if start != end + -end % ALIGNMENT_BYTES:
                raise ValueError(f"chunks in {name} overlap or leave bytes out, around byte {end}")
            end = stop
        if not end <= record.num_bytes <= end + -end % ALIGNMENT_BYTES:
            raise ValueError(f"{name} has {record.num_bytes} bytes, but its chunks end at {end}")


def read_manifest(folder: str | Path) -> Manifest:
    """Reads the manifest of a checkpoint's folder; raises CheckpointError if it is missing or damaged."""
    path = Path(folder) / MANIFEST
    try:
        text = read_file(path, LIMIT_BYTES, follow_links=False).decode()
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"not a checkpoint, or not readable: {error}",
            where=str(folder),
            fix="pass a folder that contains manifest.json, such as runs/tiny/checkpoints/step-00000100",
        ) from None
    return Manifest.from_text(text, str(path))


def first_damage(folder: Path, manifest: Manifest, names: list[str] | None = None) -> str | None:
    """Describes the first damaged file of a checkpoint, or returns None; checks only files in ``names`` if given."""
    for name in sorted(manifest.files) if names is None else names:
        record = manifest.files[name]
        try:
            with open_file(folder / name, follow_links=False) as file:
                num_bytes = os.fstat(file.fileno()).st_size
                if num_bytes != record.num_bytes:
                    return f"{name} has {num_bytes} bytes, but had {record.num_bytes} when it was written"
                if checksum_of(file) != record.crc32:
                    return f"the checksum of {name} does not match: its bytes have changed"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None
