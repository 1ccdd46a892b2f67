"""Reading safetensors files, as strictly as they are specified: tensors fill a file from its header to its end, without
overlap or hole, each name is there once, every size fits its shape.

Not by the ``safetensors`` package: of two entries with one name it takes the last, and shardwise needs torch alone.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from shardwise.checkpoint import strict_json
from shardwise.checkpoint.disk import open_file
from shardwise.checkpoint.manifest import check_shape
from shardwise.checkpoint.strict_json import counts, obj, shown
from shardwise.errors import CheckpointError

__all__ = ["DTYPE_NAMES", "read_safetensors"]

HEADER_LIMIT_BYTES = 100_000_000  # as in the reference implementation
DTYPE_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
_TORCH_NAMES = {theirs: ours for ours, theirs in DTYPE_NAMES.items()}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, mapped: they are read from disk when they are used.

    Raises:
        CheckpointError: it is damaged, or no such file.
    """
    try:
        with open_file(path) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            header = _read_header(file, num_bytes)
        mapped = torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"it is no safetensors file, or a damaged one: {error}", where=str(path), fix="get the file again"
        ) from None
    begin = num_bytes - header.data_bytes
    tensors = {}
    for name, entry in sorted(header.entries.items()):
        data = mapped[begin + entry.start : begin + entry.stop]
        if (begin + entry.start) % entry.dtype.itemsize:
            data = data.clone()
        tensors[name] = data.view(entry.dtype).view(entry.shape)
    return tensors


@dataclass(frozen=True)
class _Entry:
    """Where a tensor begins and ends is counted from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class _Header:
    entries: dict[str, _Entry]
    data_bytes: int


def _read_header(file: BinaryIO, num_bytes: int) -> _Header:
    """Raises ValueError unless tensors fill the file, in some order, from its header to its end."""
    length_bytes = file.read(8)
    if len(length_bytes) < 8:
        raise ValueError("it ends before its header")
    (length,) = struct.unpack("<Q", length_bytes)
    data_bytes = num_bytes - 8 - length
    if length > HEADER_LIMIT_BYTES or data_bytes < 0:
        raise ValueError(f"its header of {length} bytes is longer than the file, or than a header may be")
    header = strict_json.parse(file.read(length))
    for value in obj(header.pop("__metadata__", {})).values():
        strict_json.text(value)
    entries = {name: _entry(name, entry) for name, entry in header.items()}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise ValueError(f"'{name}' begins at byte {entry.start}, the tensor before it ends at {end}")
        end = entry.stop
    if end != data_bytes:
        raise ValueError(f"its tensors have {end} bytes, there are {data_bytes} after the header")
    return _Header(entries, data_bytes)


def _entry(name: str, entry: Any) -> _Entry:
    obj(entry, ("dtype", "shape", "data_offsets"))
    theirs, shape = strict_json.text(entry["dtype"]), counts(entry["shape"])
    start, stop = counts(entry["data_offsets"], 2)
    if theirs not in _TORCH_NAMES:
        raise ValueError(f"'{name}' has the dtype {shown(theirs)}, which is unknown")
    dtype: torch.dtype = getattr(torch, _TORCH_NAMES[theirs])
    check_shape(shape, dtype.itemsize)
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"'{name}' has {stop - start} bytes, which is not its shape {list(shape)} in {theirs}"
        )
    return _Entry(dtype, shape, start, stop)
