"""Weights, wherever they lie: a run, a checkpoint, a Hugging Face folder, a file. Opened, not yet read.

Each tensor is read in blocks of rows, from files that are mapped: a model is never in memory, not even its largest
tensor. Nothing that is opened here can run code.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.manifest import ITEM_BYTES, MANIFEST, first_damage, read_manifest
from shardwise.checkpoint.parts import dtype_name
from shardwise.checkpoint.reading import MappedFiles
from shardwise.checkpoint.state import MODEL
from shardwise.checkpoint.store import Store
from shardwise.errors import CheckpointError

__all__ = ["SAFETENSORS_NAMES", "Weight", "Weights", "open_weights"]

BLOCK_BYTES = 64 << 20
SAFETENSORS_NAMES = {
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
_TORCH_NAMES = {theirs: ours for ours, theirs in SAFETENSORS_NAMES.items()}


@dataclass(frozen=True)
class Weight:
    """A tensor that is read in blocks of rows."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[tuple[tuple[int, ...], Tensor], ...]
    """Mapped parts, each with its offsets."""

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def rows(self, dtype: torch.dtype, block_bytes: int | None = None) -> Iterator[Tensor]:
        """The tensor from its first row to its last, a block at a time, contiguous."""
        shape = self.shape or (1,)
        row_bytes = max(1, torch.Size(shape[1:]).numel() * torch.empty(0, dtype=dtype).element_size())
        step = max(1, (BLOCK_BYTES if block_bytes is None else block_bytes) // row_bytes)
        for start in range(0, shape[0], step):
            stop = min(shape[0], start + step)
            block = torch.empty((stop - start, *shape[1:]), dtype=dtype)
            for offsets, part in self.blocks:
                _copy_overlap(part.reshape(part.shape or (1,)), offsets or (0,), block, start)
            yield block


def _copy_overlap(part: Tensor, offsets: tuple[int, ...], block: Tensor, start: int) -> None:
    first, last = max(start, offsets[0]), min(start + block.size(0), offsets[0] + part.size(0))
    if first >= last:
        return
    target = block[first - start : last - start]
    for dim in range(1, part.dim()):
        target = target.narrow(dim, offsets[dim], part.size(dim))
    target.copy_(part[first - offsets[0] : last - offsets[0]])


@dataclass(frozen=True)
class Weights:
    tensors: tuple[Weight, ...]
    config: dict[str, Any] | None
    """Hugging Face's, where it is known."""
    is_checkpoint: bool = False


def open_weights(source: str | Path) -> Weights:
    """Weights of a run, a checkpoint, a Hugging Face folder, or a .safetensors or .pt file; nothing is read yet.

    Raises:
        CheckpointError: it is damaged, or none of these.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        checkpoint = _checkpoint_in(path)
        if checkpoint is not None:
            return _of_checkpoint(checkpoint)
        if files := sorted(path.glob("*.safetensors")):
            config = path / "config.json"
            tensors = [weight for file in files for weight in _of_safetensors(file)]
            return Weights(tuple(tensors), json.loads(config.read_text()) if config.exists() else None)
    elif path.suffix == ".safetensors" and path.is_file():
        return Weights(tuple(_of_safetensors(path)), None)
    elif path.suffix in (".pt", ".pth", ".bin") and path.is_file():
        return Weights(tuple(_of_torch_file(path)), None)
    raise CheckpointError(
        f"there are no weights in '{source}'",
        where=str(source),
        fix="pass a run's folder, a checkpoint's, a folder of .safetensors, or a .safetensors or .pt file",
    )


def _checkpoint_in(path: Path) -> Path | None:
    if (path / MANIFEST).exists():
        return path
    for folder in (path, path / "checkpoints"):
        if found := Store(folder).checkpoints():
            return found[0]
    return None


def _of_checkpoint(folder: Path) -> Weights:
    manifest = read_manifest(folder)
    if damage := first_damage(folder, manifest):
        raise CheckpointError(
            f"the checkpoint is damaged: {damage}",
            where=str(folder),
            fix="convert another checkpoint of the run",
        )
    files = MappedFiles(folder, manifest)
    tensors = tuple(
        Weight(
            name.removeprefix(MODEL),
            record.shape,
            getattr(torch, record.dtype),
            tuple((chunk.offsets, files.read(record, chunk)) for chunk in record.chunks),
        )
        for name, record in sorted(manifest.tensors.items())
        if name.startswith(MODEL)
    )
    return Weights(tensors, manifest.run.get("hugging_face"), is_checkpoint=True)


def _of_safetensors(path: Path) -> list[Weight]:
    num_bytes = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(num_bytes - 8, 100 << 20):
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        mapped = torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)
        weights = []
        for name, entry in sorted(header.items()):
            start, stop = entry["data_offsets"]
            dtype: torch.dtype = getattr(torch, _TORCH_NAMES[entry["dtype"]])
            shape = tuple(entry["shape"])
            wanted = torch.Size(shape).numel() * ITEM_BYTES[dtype_name(dtype)]
            if not 0 <= start <= stop <= num_bytes - 8 - length or stop - start != wanted:
                raise ValueError(f"'{name}' does not lie inside the file")
            data = mapped[8 + length + start : 8 + length + stop]
            if (8 + length + start) % ITEM_BYTES[dtype_name(dtype)]:
                data = data.clone()
            weights.append(Weight(name, shape, dtype, (((0,) * len(shape), data.view(dtype).view(shape)),)))
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise CheckpointError(
            f"it is no safetensors file, or a damaged one: {error}", where=str(path), fix="get the file again"
        ) from None
    return weights


def _of_torch_file(path: Path) -> list[Weight]:
    if not zipfile.is_zipfile(path):
        raise CheckpointError(
            "it is no file that torch.save has written in the last years, or a damaged one",
            where=str(path),
            fix="get the file again, or load and save it anew with torch",
        )
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # noqa: BLE001  of any kind: the file decides which
        first = str(error).splitlines()[0]
        raise CheckpointError(
            f"torch cannot load it without running code: {first}",
            where=str(path),
            fix="save a plain state dict",
        ) from None
    for key in ("state_dict", "model"):
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise CheckpointError("it holds no state dict", where=str(path), fix="save model.state_dict()")
    return [
        Weight(name, tuple(value.shape), value.dtype, (((0,) * value.dim(), value.detach()),))
        for name, value in sorted(loaded.items())
    ]
