"""The page that describes a checkpoint: which tensors, where their bytes lie, and how to tell that none has changed.

    step-00000100/
      manifest.json     tensors: dtype, shape, chunks; files: size and checksum; run: step, samples, configuration
      rank-00000.bin    chunks of tensors, end to end, raw

It is JSON, and nothing but text and numbers is ever made of it: reading a checkpoint cannot run code that someone
put there. The page carries its own checksum; a page that is cut short or altered is refused, never half believed.
The chunks of a tensor tile it, and the chunks in a file fill it: every element is on disk once, and every byte of a
file belongs to one tensor or is padding in front of one. A page that says otherwise is refused too.
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
_MAX_CUT_DIMS = 6  # of a tensor: a chunk has two to this power corners to look at
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
        """Raises CheckpointError unless the text is, to the last letter, what ``to_text`` writes of some checkpoint."""
        try:
            page = _PAGE.fullmatch(text)
            if page is None:
                raise ValueError("it is cut short, or no manifest")
            if zlib.crc32(page[2].encode()) != int(page[1]):
                raise ValueError("its checksum does not match")
            body = strict_json.parse(page[2])
            if count(body.get("format")) != FORMAT:
                raise ValueError(f"it is of format {body['format']}, known is {FORMAT}")
            obj(body, ("format", "run", "files", "tensors"))
            files = {_file_name(name): _file(record) for name, record in obj(body["files"]).items()}
            tensors = {name: _tensor(name, record, files) for name, record in obj(body["tensors"]).items()}
            _check_filled(files, tensors)
            return Manifest(tensors, files, _run(body["run"]))
        except ValueError as error:
            raise CheckpointError(
                f"the manifest of a checkpoint cannot be read: {error}",
                where=where,
                fix="resume from another checkpoint of the run",
            ) from None


def _file_name(name: str) -> str:
    """As ranks name their files: no path may lead out of the folder."""
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"{shown(name)} is not the name of a rank's file")
    return name


def _file(record: Any) -> FileRecord:
    num_bytes, crc32 = counts(record, 2)
    return FileRecord(num_bytes, count(crc32, 1 << 32))


def _run(run: Any) -> dict[str, Any]:
    strict_json.check_nesting(obj(run))
    for key in ("step", "samples"):
        if key in run:
            count(run[key])
    return dict(run)


def _tensor(name: str, record: Any, files: dict[str, FileRecord]) -> TensorRecord:
    obj(record, ("dtype", "shape", "chunks"))
    dtype, shape = strict_json.text(record["dtype"]), counts(record["shape"])
    if dtype not in ITEM_BYTES:
        raise ValueError(f"there is no dtype {shown(dtype)}")
    item_bytes = ITEM_BYTES[dtype]
    check_shape(shape, item_bytes)
    if type(record["chunks"]) is not list:
        raise ValueError(f"'{name}' has no list of chunks")
    chunks = []
    for entry in record["chunks"]:
        if type(entry) is not list or len(entry) != 4:
            raise ValueError(f"{shown(entry)} is no chunk")
        offsets, sizes = counts(entry[0], len(shape)), counts(entry[1], len(shape))
        chunk = Chunk(offsets, sizes, strict_json.text(entry[2]), count(entry[3]))
        if any(map(_sticks_out, offsets, sizes, shape)):
            raise ValueError(f"a chunk does not lie inside its tensor '{name}'")
        if chunk.file not in files or chunk.start % item_bytes or (0 in sizes and 0 not in shape):
            raise ValueError(f"a chunk of '{name}' cannot lie at {chunk.start} of {shown(chunk.file)}")
        chunks.append(chunk)
    if not _tile(shape, chunks):
        raise ValueError(
            f"the chunks of '{name}' overlap or leave elements out: they do not make up the whole"
        )
    return TensorRecord(dtype, shape, tuple(chunks))


def _sticks_out(offset: int, size: int, whole: int) -> bool:
    return offset + size > whole


def check_shape(shape: tuple[int, ...], item_bytes: int) -> None:
    """Refuses what no tensor has; a huge size beside a 0, too: the tensor is empty, but a loop over it has no end."""
    if len(shape) > 64 or math.prod(max(size, 1) for size in shape) * item_bytes > _MAX_TENSOR_BYTES:
        raise ValueError(f"no tensor can have the shape {shown(list(shape))}")


def _tile(shape: tuple[int, ...], chunks: list[Chunk]) -> bool:
    """Is each element of a tensor in exactly one of these chunks?

    How many chunks an element is in changes at the corners of chunks alone, so the corners, each with its sign,
    tell the whole count. It is one everywhere if all corners cancel out but those of the tensor itself.
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
            place = tuple(position for position, _ in corner)
            corners[place] = corners.get(place, 0) + sign * math.prod(side for _, side in corner)
    return not any(corners.values())


def _check_filled(files: dict[str, FileRecord], tensors: dict[str, TensorRecord]) -> None:
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
            raise ValueError(f"{name} has {record.num_bytes} bytes, its chunks end at {end}")


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of a checkpoint's folder; raises CheckpointError if it is missing or damaged."""
    path = Path(folder) / MANIFEST
    try:
        text = read_file(path, LIMIT_BYTES, follow_links=False).decode()
    except (OSError, ValueError) as error:
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
            with open_file(folder / name, follow_links=False) as file:
                num_bytes = os.fstat(file.fileno()).st_size
                if num_bytes != record.num_bytes:
                    return f"{name} has {num_bytes} bytes, it was written with {record.num_bytes}"
                if checksum_of(file) != record.crc32:
                    return f"the checksum of {name} does not match: its bytes have changed"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None
