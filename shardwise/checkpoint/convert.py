"""A checkpoint's weights in other people's formats, and back.

    checkpoint ──▶ folder of safetensors, in Hugging Face's layout, sharded by size
               ──▶ one .safetensors or .pt file
               ◀── any of these: a checkpoint of weights alone, from which a run can go on

Tensors go through in blocks of rows: the model is never in memory, not even its largest tensor. What is written
appears under its name when it is whole. Optimizer state stays behind.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from shardwise.checkpoint.files import MappedFiles, RawFile, bytes_of, dtype_name
from shardwise.checkpoint.manifest import (
    ITEM_BYTES,
    MANIFEST,
    Chunk,
    Manifest,
    TensorRecord,
    first_damage,
    read_manifest,
    sync_folder,
    write_text,
)
from shardwise.checkpoint.state import MODEL
from shardwise.checkpoint.store import Store
from shardwise.errors import CheckpointError, ConfigError

__all__ = ["export_safetensors", "export_torch", "import_weights", "open_weights"]

BLOCK_BYTES = 64 << 20
_CALL = "shardwise convert"
_SAFETENSORS_NAMES = {
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
_TORCH_NAMES = {theirs: ours for ours, theirs in _SAFETENSORS_NAMES.items()}


# --- weights, wherever they lie -----------------------------------------------------------------------------------


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
        where=_CALL,
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


# --- out ----------------------------------------------------------------------------------------------------------


def export_safetensors(
    weights: Weights, target: str | Path, *, shard_bytes: int = 5 << 30, dtype: torch.dtype | None = None
) -> list[Path]:
    """Writes a .safetensors file, or a folder in Hugging Face's layout; the files of weights.

    Args:
        weights: from ``open_weights``.
        target: a name that ends in ``.safetensors``, or a folder to make.
        shard_bytes: the most a file of a folder holds, unless a single tensor is larger.
        dtype: what floating-point tensors become; None leaves them.
    """
    path = _new(target)
    if path.suffix == ".safetensors":
        unfinished = path.with_name(f".unfinished-{path.name}")
        _write_safetensors(unfinished, list(weights.tensors), dtype)
        os.replace(unfinished, path)
        return [path]
    shards = _shards(weights, shard_bytes, dtype)
    unfinished = path.with_name(f".unfinished-{path.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    names = [
        "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    total = 0
    for name, shard in zip(names, shards, strict=True):
        total += _write_safetensors(unfinished / name, shard, dtype)
    if len(shards) > 1:
        where = {weight.name: name for name, shard in zip(names, shards, strict=True) for weight in shard}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        write_text(unfinished / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
    if weights.config is not None:
        kinds = {_target_dtype(weight, dtype) for weight in weights.tensors}
        config = {**weights.config, "dtype": dtype_name(kinds.pop()) if len(kinds) == 1 else "float32"}
        write_text(unfinished / "config.json", json.dumps(config, indent=2) + "\n")
    sync_folder(unfinished)
    os.rename(unfinished, path)
    return [path / name for name in names]


def _new(target: str | Path) -> Path:
    path = Path(target).expanduser()
    if path.exists():
        raise ConfigError(f"'{path}' is there already", where=_CALL, fix="choose another name, or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _target_dtype(weight: Weight, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and weight.dtype.is_floating_point else weight.dtype


def _num_bytes(weight: Weight, dtype: torch.dtype | None) -> int:
    return weight.numel * ITEM_BYTES[dtype_name(_target_dtype(weight, dtype))]


def _shards(weights: Weights, shard_bytes: int, dtype: torch.dtype | None) -> list[list[Weight]]:
    shards: list[list[Weight]] = [[]]
    room = shard_bytes
    for weight in weights.tensors:
        size = _num_bytes(weight, dtype)
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(weight)
        room -= size
    return shards


def _write_safetensors(path: Path, weights: list[Weight], dtype: torch.dtype | None) -> int:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in weights:
        start, end = end, end + _num_bytes(weight, dtype)
        kind = _SAFETENSORS_NAMES[dtype_name(_target_dtype(weight, dtype))]
        header[weight.name] = {"dtype": kind, "shape": weight.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for weight in weights:
            _write_rows(file, weight, _target_dtype(weight, dtype))
        file.flush()
        os.fsync(file.fileno())
    return end


def _write_rows(file: BinaryIO, weight: Weight, dtype: torch.dtype) -> None:
    for block in weight.rows(dtype):
        file.write(bytes_of(block))


def export_torch(weights: Weights, target: str | Path, *, dtype: torch.dtype | None = None) -> Path:
    """Writes a plain state dict that ``torch.load`` takes."""
    path = _new(target)
    unfinished = path.with_name(f".unfinished-{path.name}")
    with tempfile.TemporaryDirectory(prefix=".converting-", dir=path.parent) as folder:
        state = {}
        for number, weight in enumerate(weights.tensors):
            kind = _target_dtype(weight, dtype)
            if not weight.numel:
                state[weight.name] = torch.empty(weight.shape, dtype=kind)
                continue
            # Laid out on disk and mapped from there: torch.save reads them one by one.
            laid_out = Path(folder) / str(number)
            with laid_out.open("wb") as file:
                _write_rows(file, weight, kind)
            mapped = torch.from_file(str(laid_out), shared=False, size=weight.numel, dtype=kind)
            state[weight.name] = mapped.view(weight.shape)
        torch.save(state, unfinished)
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    return path


# --- back ---------------------------------------------------------------------------------------------------------


def import_weights(weights: Weights, run_folder: str | Path) -> Path:
    """Makes a run's folder whose one checkpoint, of step 0, holds these weights; where that checkpoint is."""
    folder = _new(run_folder)
    store = Store(folder / "checkpoints")
    saving = store.saving_path(0)
    saving.mkdir(parents=True)
    name = "rank-00000.bin"
    tensors = {}
    with RawFile(saving / name) as file:
        for weight in weights.tensors:
            start = None
            for block in weight.rows(weight.dtype):
                placed = file.append(block, aligned=start is None)
                start = placed if start is None else start
            chunk = Chunk((0,) * len(weight.shape), weight.shape, name, start or 0)
            tensors[MODEL + weight.name] = TensorRecord(dtype_name(weight.dtype), weight.shape, (chunk,))
    run = {"step": 0, "samples": 0, "hugging_face": weights.config}
    write_text(saving / MANIFEST, Manifest(tensors, {name: file.record}, run).to_text())
    sync_folder(saving)
    store.commit(0)
    return store.path_of(0)
