"""Opens weights for conversion: of a run, a checkpoint, a Hugging Face folder or a single file.

Tensors are read in blocks of rows from memory-mapped files: neither the model nor its largest tensor is ever in memory.
Opening a file never runs code from it. Formats are read as strictly as they are specified, checksums are compared where
a format has them, and invalid files are refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint import strict_json
from shardwise.checkpoint.disk import read_file
from shardwise.checkpoint.manifest import MANIFEST, first_damage, read_manifest
from shardwise.checkpoint.parts import Part
from shardwise.checkpoint.reading import MappedFiles
from shardwise.checkpoint.safetensors_file import read_safetensors
from shardwise.checkpoint.store import Store
from shardwise.checkpoint.strict_json import obj, shown
from shardwise.checkpoint.torch_file import read_torch_file
from shardwise.checkpoint.training_state import MODEL
from shardwise.errors import CheckpointError

__all__ = ["Weight", "Weights", "open_weights"]

BLOCK_BYTES = 64 << 20
CONFIG_LIMIT_BYTES = 16 << 20
INDEX = "model.safetensors.index.json"
INDEX_LIMIT_BYTES = 256 << 20
TOKENIZER = "tokenizer"
"""The folder of a run that holds its tokenizer's files."""


@dataclass(frozen=True)
class Weight:
    """A tensor that is read in blocks of rows."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[tuple[tuple[int, ...], Tensor], ...]
    """Memory-mapped chunks, each with its offsets."""

    @staticmethod
    def of(name: str, tensor: Tensor) -> Weight:
        """Returns the weight of a tensor that is memory-mapped as a whole."""
        return Weight(name, tuple(tensor.shape), tensor.dtype, (((0,) * tensor.dim(), tensor),))

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def rows(self, dtype: torch.dtype, block_bytes: int | None = None) -> Iterator[Tensor]:
        """Yields the tensor in contiguous blocks of rows, converted to ``dtype``."""
        if not self.numel:
            return
        shape = self.shape or (1,)
        row_bytes = max(1, torch.Size(shape[1:]).numel() * dtype.itemsize)
        step = max(1, (BLOCK_BYTES if block_bytes is None else block_bytes) // row_bytes)
        for start in range(0, shape[0], step):
            stop = min(shape[0], start + step)
            block = torch.empty((stop - start, *shape[1:]), dtype=dtype, device="cpu")
            for offsets, part in self.blocks:
                _copy_overlap(part.reshape(part.shape or (1,)), offsets or (0,), block, start)
            yield block

    def copy_into(self, target: Part) -> None:
        """Copies what overlaps a rank's part of this tensor, and reads nothing else."""
        for offsets, block in self.blocks:
            into, out_of = target.tensor, block
            for dim, (start, ours) in enumerate(zip(offsets, target.offsets, strict=True)):
                first = max(start, ours)
                length = min(start + block.size(dim), ours + target.tensor.size(dim)) - first
                if length <= 0:
                    break
                into, out_of = (
                    into.narrow(dim, first - ours, length),
                    out_of.narrow(dim, first - start, length),
                )
            else:
                into.copy_(out_of)


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
    """Hugging Face's config.json, if there is one."""
    is_checkpoint: bool = False
    tokenizer: tuple[Path, ...] = ()
    """The files of its tokenizer."""


def open_weights(source: str | Path) -> Weights:
    """Opens the weights of a run, a checkpoint, a Hugging Face folder, or a .safetensors or .pt file.

    Raises:
        CheckpointError: the source is damaged, or none of these.
    """
    path = Path(source).expanduser()
    try:
        found = _weights_in(path)
    except OSError as error:
        raise CheckpointError(
            f"the weights cannot be read: {error}",
            where=str(source),
            fix="make the folder and its files readable",
        ) from None
    if found is None:
        raise CheckpointError(
            f"there are no weights in '{source}'",
            where=str(source),
            fix="pass the folder of a run or checkpoint, a folder of .safetensors, or a .safetensors or .pt file",
        )
    return found


def _weights_in(path: Path) -> Weights | None:
    if path.is_dir():
        checkpoint = _checkpoint_in(path)
        if checkpoint is not None:
            return _weights_of_checkpoint(checkpoint)
        return _weights_of_folder(path)
    if path.suffix == ".safetensors" and path.exists():
        return _weights_of_tensors(read_safetensors(path))
    if path.suffix in (".pt", ".pth", ".bin") and path.exists():
        return _weights_of_tensors(read_torch_file(path))
    return None


def _weights_of_tensors(tensors: dict[str, Tensor], config: dict[str, Any] | None = None) -> Weights:
    return Weights(tuple(Weight.of(name, tensor) for name, tensor in tensors.items()), config)


def _checkpoint_in(path: Path) -> Path | None:
    if (path / MANIFEST).exists():
        return path
    for folder in (path, path / "checkpoints"):
        if found := Store(folder).checkpoints():
            return found[0]
    return None


def _weights_of_checkpoint(folder: Path) -> Weights:
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
    config = manifest.run.get("hugging_face")
    if config is not None and not isinstance(config, dict):
        raise CheckpointError(
            f"its configuration for Hugging Face is {shown(config)}, not an object",
            where=str(folder),
            fix="convert another checkpoint of the run",
        )
    kept = folder.parent.parent / TOKENIZER
    tokenizer = tuple(sorted(path for path in kept.iterdir() if path.is_file())) if kept.is_dir() else ()
    return Weights(tensors, config, is_checkpoint=True, tokenizer=tokenizer)


def _weights_of_folder(folder: Path) -> Weights | None:
    """Opens a folder in Hugging Face's layout: the files in its index, or all .safetensors if it has none.

    Links are followed, because Hugging Face's cache consists of them.
    """
    file_of: dict[str, str] | None = None
    if os.path.lexists(folder / INDEX):
        file_of = _weight_map(folder / INDEX)
        files = [folder / name for name in sorted(set(file_of.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    found: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in read_safetensors(file).items():
            if name in found or (file_of is not None and file_of.get(name) != file.name):
                raise CheckpointError(
                    f"'{name}' is in {file.name}, where it does not belong",
                    where=str(folder),
                    fix=f"keep only the files of one model in the folder, those that {INDEX} lists",
                )
            found[name] = tensor
    if missing := sorted(set(file_of or ()) - set(found)):
        raise CheckpointError(
            f"'{missing[0]}' is not in {(file_of or {})[missing[0]]}, where it should be by {INDEX}",
            where=str(folder),
            fix="download or copy the folder again",
        )
    config = folder / "config.json"
    return _weights_of_tensors(found, _read_config(config) if os.path.lexists(config) else None)


def _weight_map(path: Path) -> dict[str, str]:
    try:
        file_of = obj(strict_json.parse(read_file(path, INDEX_LIMIT_BYTES)).get("weight_map"))
        for name in file_of.values():
            if strict_json.text(name) != os.path.basename(name) or not name.endswith(".safetensors"):
                raise ValueError(f"{shown(name)} is not the name of a .safetensors file in the folder")
    except ValueError as error:
        raise CheckpointError(
            f"not an index of weights: {error}", where=str(path), fix="download or copy the file again"
        ) from None
    return file_of


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = strict_json.parse(read_file(path, CONFIG_LIMIT_BYTES))
        strict_json.check_nesting(config)
    except ValueError as error:
        raise CheckpointError(
            f"not a configuration: {error}",
            where=str(path),
            fix="download or copy the file again, or remove it",
        ) from None
    return config
