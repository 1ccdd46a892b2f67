"""Reading safetensors files: the ``safetensors`` package reads the tensors, after a check of what it lets pass.

The package refuses overlaps, holes, truncated files and sizes that overflow. It accepts a header that has a name twice,
sizes that no tensor has, and waits for ever on a pipe. `convert` writes these files itself, in blocks: the package
would need every tensor in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from shardwise.checkpoint import strict_json
from shardwise.checkpoint.disk import open_file
from shardwise.checkpoint.manifest import check_shape
from shardwise.checkpoint.strict_json import counts, obj, shown
from shardwise.errors import CheckpointError, ConfigError

__all__ = ["DTYPE_NAMES", "read_safetensors"]

HEADER_LIMIT_BYTES = 100_000_000  # as in the package
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
_ITEM_BYTES = {theirs: getattr(torch, ours).itemsize for ours, theirs in DTYPE_NAMES.items()}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file by name, memory-mapped: their data is read from disk when it is used.

    Raises:
        CheckpointError: the file is damaged, or is no safetensors file.
        ConfigError: the package is not installed.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ConfigError(
            "reading .safetensors files needs the package 'safetensors', which is not installed",
            where=str(path),
            fix="pip install safetensors",
        ) from None
    try:
        with open_file(path) as file:
            _check_header(file)
        with safe_open(path, framework="pt") as tensors:
            return {name: tensors.get_tensor(name) for name in sorted(tensors.keys())}
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"not a safetensors file, or a damaged one: {error}",
            where=str(path),
            fix="download or copy the file again",
        ) from None


def _check_header(file: BinaryIO) -> None:
    """Raises ValueError for what the package accepts and we do not."""
    length = int.from_bytes(file.read(8), "little")
    if length > HEADER_LIMIT_BYTES:
        raise ValueError(f"its header has {length} bytes, the limit is {HEADER_LIMIT_BYTES}")
    header = strict_json.parse(file.read(length))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        obj(entry, ("dtype", "shape", "data_offsets"))
        item_bytes = _ITEM_BYTES.get(strict_json.text(entry["dtype"]))
        if item_bytes is None:
            raise ValueError(f"'{name}' has the dtype {shown(entry['dtype'])}, which is unknown")
        check_shape(counts(entry["shape"]), item_bytes)
