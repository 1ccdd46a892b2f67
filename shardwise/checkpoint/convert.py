"""Converts a checkpoint's weights to other formats, and back (``shardwise convert``).

    checkpoint ──▶ folder of safetensors, in Hugging Face's layout, sharded by size
               ──▶ one .safetensors or .pt file
               ◀── any of these: a checkpoint of weights only, which a run can resume

Tensors are copied in blocks of rows: no tensor is ever in memory as a whole. The target gets its name when it is
complete. Optimizer state is not converted.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shardwise.checkpoint.disk import RawFile, bytes_of, create_file, sync_folder, write_text
from shardwise.checkpoint.manifest import ITEM_BYTES, MANIFEST, Chunk, Manifest, TensorRecord
from shardwise.checkpoint.parts import dtype_name
from shardwise.checkpoint.safetensors_file import DTYPE_NAMES
from shardwise.checkpoint.store import Store
from shardwise.checkpoint.training_state import MODEL
from shardwise.checkpoint.weights import INDEX, Weight, Weights
from shardwise.errors import CheckpointError, ConfigError

__all__ = ["export_safetensors", "export_torch", "import_weights"]

_CALL = "shardwise convert"


def export_safetensors(
    weights: Weights, target: str | Path, *, shard_bytes: int = 5 << 30, dtype: torch.dtype | None = None
) -> list[Path]:
    """Writes a .safetensors file, or a folder in Hugging Face's layout; returns the files of weights.

    Args:
        weights: from ``open_weights``.
        target: a name that ends in ``.safetensors``, or a folder to create.
        shard_bytes: the maximum size of a file in a folder, unless a single tensor is larger.
        dtype: the dtype to convert floating-point tensors to; None leaves them as they are.
    """
    with _renamed_when_complete(target) as unfinished:
        if unfinished.suffix == ".safetensors":
            _write_safetensors(unfinished, list(weights.tensors), dtype)
            names = [""]
        else:
            unfinished.mkdir()
            names = _write_folder(unfinished, weights, shard_bytes, dtype)
    return [Path(target).expanduser() / name for name in names]


@contextlib.contextmanager
def _renamed_when_complete(target: str | Path) -> Iterator[Path]:
    """Yields a temporary path, which is renamed to the target at the end, or deleted after an error."""
    path = Path(target).expanduser()
    if os.path.lexists(path):
        raise ConfigError(f"'{path}' exists already", where=_CALL, fix="choose another name, or delete it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In a folder of its own, so that no other process uses the same name.
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=path.parent) as folder:
            unfinished = Path(folder) / path.name
            yield unfinished
            os.rename(unfinished, path)
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"'{path}' could not be written: {error}", where=_CALL, fix="free disk space, or write elsewhere"
        ) from None


def _write_folder(folder: Path, weights: Weights, shard_bytes: int, dtype: torch.dtype | None) -> list[str]:
    shards = _split_into_files(weights, shard_bytes, dtype)
    names = [
        "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    total = 0
    for name, shard in zip(names, shards, strict=True):
        total += _write_safetensors(folder / name, shard, dtype)
    if len(shards) > 1:
        where = {weight.name: name for name, shard in zip(names, shards, strict=True) for weight in shard}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
    if weights.config is not None:
        kinds = {_target_dtype(weight, dtype) for weight in weights.tensors}
        config = {**weights.config, "dtype": dtype_name(kinds.pop()) if len(kinds) == 1 else "float32"}
        write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    for path in weights.tokenizer:
        if path.name not in (*names, INDEX, "config.json"):
            shutil.copyfile(path, folder / path.name, follow_symlinks=False)
    sync_folder(folder)
    return names


def _target_dtype(weight: Weight, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and weight.dtype.is_floating_point else weight.dtype


def _num_bytes(weight: Weight, dtype: torch.dtype | None) -> int:
    return weight.numel * ITEM_BYTES[dtype_name(_target_dtype(weight, dtype))]


def _split_into_files(weights: Weights, shard_bytes: int, dtype: torch.dtype | None) -> list[list[Weight]]:
    shards: list[list[Weight]] = [[]]
    free_bytes = shard_bytes
    for weight in weights.tensors:
        size = _num_bytes(weight, dtype)
        if size > free_bytes and shards[-1]:
            shards.append([])
            free_bytes = shard_bytes
        shards[-1].append(weight)
        free_bytes -= size
    return shards


def _write_safetensors(path: Path, weights: list[Weight], dtype: torch.dtype | None) -> int:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in weights:
        start, end = end, end + _num_bytes(weight, dtype)
        kind = DTYPE_NAMES.get(dtype_name(_target_dtype(weight, dtype)))
        if kind is None or weight.name in header:
            raise CheckpointError(
                f"a safetensors file cannot hold '{weight.name}' with dtype {_target_dtype(weight, dtype)}",
                where=_CALL,
                fix="write a .pt file",
            )
        header[weight.name] = {"dtype": kind, "shape": weight.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with create_file(path) as file:
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
    """Writes a plain state dict for ``torch.load``; returns its path."""
    with _renamed_when_complete(target) as unfinished:
        state = {}
        for number, weight in enumerate(weights.tensors):
            kind = _target_dtype(weight, dtype)
            if not weight.numel:
                state[weight.name] = torch.empty(weight.shape, dtype=kind, device="cpu")
                continue
            # Written to a file and memory-mapped, so that torch.save reads one tensor after another.
            temporary = unfinished.with_name(f"{number}.tensor")
            with create_file(temporary) as file:
                _write_rows(file, weight, kind)
            mapped = torch.from_file(str(temporary), shared=False, size=weight.numel, dtype=kind)
            state[weight.name] = mapped.view(weight.shape)
        try:
            torch.save(state, unfinished)
        except RuntimeError as error:  # what torch raises if the disk is full
            raise OSError(str(error).splitlines()[0]) from error
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
    return Path(target).expanduser()


# --- import -------------------------------------------------------------------------------------------------------


def import_weights(weights: Weights, run_folder: str | Path) -> Path:
    """Creates a run's folder with one checkpoint, of step 0, of these weights; returns the checkpoint's path."""
    with _renamed_when_complete(run_folder) as unfinished:
        store = Store(unfinished / "checkpoints")
        saving = store.saving_path(0)
        saving.mkdir(parents=True)
        name = "rank-00000.bin"
        tensors = {}
        with RawFile(saving / name) as file:
            for weight in weights.tensors:
                start = None
                for block in weight.rows(weight.dtype):
                    offset = file.append(block, aligned=start is None)
                    start = offset if start is None else start
                chunk = Chunk((0,) * len(weight.shape), weight.shape, name, start or 0)
                tensors[MODEL + weight.name] = TensorRecord(dtype_name(weight.dtype), weight.shape, (chunk,))
        run = {"step": 0, "samples": 0, "hugging_face": weights.config}
        write_text(saving / MANIFEST, Manifest(tensors, {name: file.record}, run).to_text())
        sync_folder(saving)
        store.commit(0)
    return Store(Path(run_folder).expanduser() / "checkpoints").path_of(0)
