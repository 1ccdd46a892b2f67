"""Weights, wherever they lie: a run, a checkpoint, a Hugging Face folder, a file. Opened, not yet read.

Each tensor is read in blocks of rows, from files that are mapped: a model is never in memory, not even its largest
tensor. Nothing that is opened here can run code. Formats are read as strictly as they are specified, and checksums are
compared where a format has them: what cannot be right is refused, whoever wrote it.
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from shardwise.checkpoint import strict_json
from shardwise.checkpoint.disk import open_file, read_file
from shardwise.checkpoint.manifest import ITEM_BYTES, MANIFEST, check_shape, first_damage, read_manifest
from shardwise.checkpoint.parts import dtype_name
from shardwise.checkpoint.reading import MappedFiles
from shardwise.checkpoint.state import MODEL
from shardwise.checkpoint.store import Store
from shardwise.checkpoint.strict_json import counts, obj, shown
from shardwise.errors import CheckpointError

__all__ = ["SAFETENSORS_NAMES", "Weight", "Weights", "open_weights"]

BLOCK_BYTES = 64 << 20
CONFIG_LIMIT_BYTES = 16 << 20
INDEX = "model.safetensors.index.json"
INDEX_LIMIT_BYTES = 256 << 20
HEADER_LIMIT_BYTES = 100_000_000  # as in the reference implementation
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
        if not self.numel:
            return
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
    try:
        found = _weights_in(path)
    except OSError as error:
        raise CheckpointError(
            f"it cannot be read: {error}", where=str(source), fix="pass a folder and files that can be read"
        ) from None
    if found is None:
        raise CheckpointError(
            f"there are no weights in '{source}'",
            where=str(source),
            fix="pass a run's folder, a checkpoint's, a folder of .safetensors, or a .safetensors or .pt file",
        )
    return found


def _weights_in(path: Path) -> Weights | None:
    if path.is_dir():
        checkpoint = _checkpoint_in(path)
        if checkpoint is not None:
            return _of_checkpoint(checkpoint)
        return _of_folder(path)
    if path.suffix == ".safetensors" and path.exists():
        return Weights(tuple(_of_safetensors(path)), None)
    if path.suffix in (".pt", ".pth", ".bin") and path.exists():
        return Weights(tuple(_of_torch_file(path)), None)
    return None


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
    config = manifest.run.get("hugging_face")
    if config is not None and not isinstance(config, dict):
        raise CheckpointError(
            f"its configuration for Hugging Face is {shown(config)}, no object",
            where=str(folder),
            fix="convert another checkpoint of the run",
        )
    return Weights(tensors, config, is_checkpoint=True)


# --- safetensors ----------------------------------------------------------------------------------------------------


def _of_folder(folder: Path) -> Weights | None:
    """A folder in Hugging Face's layout: the files its index names, or all there are; links are followed, as its
    cache is made of them."""
    homes: dict[str, str] | None = None
    if os.path.lexists(folder / INDEX):
        homes = _weight_map(folder / INDEX)
        files = [folder / name for name in sorted(set(homes.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    found: dict[str, Weight] = {}
    for file in files:
        for weight in _of_safetensors(file):
            if weight.name in found or (homes is not None and homes.get(weight.name) != file.name):
                raise CheckpointError(
                    f"'{weight.name}' is in {file.name}, where it does not belong",
                    where=str(folder),
                    fix=f"leave the files of one model in the folder, as {INDEX} lists them",
                )
            found[weight.name] = weight
    if missing := sorted(set(homes or ()) - set(found)):
        raise CheckpointError(
            f"'{missing[0]}' is not in {(homes or {})[missing[0]]}, where {INDEX} has it",
            where=str(folder),
            fix="get the folder again",
        )
    config = folder / "config.json"
    return Weights(tuple(found.values()), _config(config) if os.path.lexists(config) else None)


def _weight_map(path: Path) -> dict[str, str]:
    try:
        homes = obj(strict_json.parse(read_file(path, INDEX_LIMIT_BYTES)).get("weight_map"))
        for name in homes.values():
            if strict_json.text(name) != os.path.basename(name) or not name.endswith(".safetensors"):
                raise ValueError(f"{shown(name)} is not the name of a safetensors file in its folder")
    except ValueError as error:
        raise CheckpointError(
            f"it lists no files of weights: {error}", where=str(path), fix="get the file again"
        ) from None
    return homes


def _config(path: Path) -> dict[str, Any]:
    try:
        config = strict_json.parse(read_file(path, CONFIG_LIMIT_BYTES))
        strict_json.check_nesting(config)
    except ValueError as error:
        raise CheckpointError(
            f"it is no configuration: {error}", where=str(path), fix="get the file again, or remove it"
        ) from None
    return config


def _of_safetensors(path: Path) -> list[Weight]:
    try:
        with open_file(path) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            content = _safetensors_header(file, num_bytes)
        begin = num_bytes - content.num_bytes
        mapped = torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"it is no safetensors file, or a damaged one: {error}", where=str(path), fix="get the file again"
        ) from None
    weights = []
    for name, (dtype, shape, start, stop) in sorted(content.tensors.items()):
        data = mapped[begin + start : begin + stop]
        if (begin + start) % dtype.itemsize:
            data = data.clone()
        weights.append(Weight(name, shape, dtype, (((0,) * len(shape), data.view(dtype).view(shape)),)))
    return weights


@dataclass(frozen=True)
class _SafetensorsHeader:
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...], int, int]]
    """Dtype, shape, first byte and end, counted from the end of the header."""
    num_bytes: int


def _safetensors_header(file: BinaryIO, num_bytes: int) -> _SafetensorsHeader:
    """Raises ValueError unless tensors fill the file, in some order, from its header to its end."""
    length_bytes = file.read(8)
    if len(length_bytes) < 8:
        raise ValueError("it ends before its header")
    (length,) = struct.unpack("<Q", length_bytes)
    if length > HEADER_LIMIT_BYTES or length > num_bytes - 8:
        raise ValueError(f"its header of {length} bytes is longer than the file, or than a header may be")
    header = strict_json.parse(file.read(length))
    for value in obj(header.pop("__metadata__", {})).values():
        strict_json.text(value)
    tensors = {name: _safetensors_entry(name, entry) for name, entry in header.items()}
    end = 0
    for name, (_, _, start, stop) in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if start != end:
            raise ValueError(f"'{name}' begins at byte {start}, the tensor before it ends at {end}")
        end = stop
    if end != num_bytes - 8 - length:
        raise ValueError(f"its tensors have {end} bytes, there are {num_bytes - 8 - length} after the header")
    return _SafetensorsHeader(tensors, end)


def _safetensors_entry(name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
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
    return dtype, shape, start, stop


# --- torch's files --------------------------------------------------------------------------------------------------


def _of_torch_file(path: Path) -> list[Weight]:
    with open_file(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        sizes = _record_sizes(file, str(path))
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # noqa: BLE001  of any kind: the file decides which
        first = (str(error).splitlines() or [type(error).__name__])[0]
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
    try:
        _check_state(loaded, num_bytes, sizes)
    except ValueError as error:
        raise CheckpointError(
            f"its state dict cannot be converted: {error}",
            where=str(path),
            fix="save a state dict of plain tensors: {name: tensor.clone() for name, tensor in ...}",
        ) from None
    return [
        Weight(name, tuple(value.shape), value.dtype, (((0,) * value.dim(), value.detach()),))
        for name, value in sorted(loaded.items())
    ]


def _record_sizes(file: BinaryIO, where: str) -> set[int]:
    """The sizes of a torch file's records; raises CheckpointError unless each has the bytes that torch.save wrote.

    torch.load maps the file, and so looks at neither checksums nor whether a record is compressed.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            records = sorted(archive.infolist(), key=lambda record: record.header_offset)
            end = 0
            for record in records:
                if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
                    raise ValueError(f"its record {shown(record.filename)} is compressed")
                if record.header_offset < end:
                    raise ValueError(f"its record {shown(record.filename)} overlaps the one before it")
                end = record.header_offset + record.file_size
            if end > archive.start_dir:
                raise ValueError("its records reach beyond its end")
            names = {record.filename for record in records}
            if len(names) != len(records):
                raise ValueError("two of its records have one name")
            for record in records:
                with archive.open(record) as content:
                    while content.read(1 << 22):
                        pass  # reading to the end compares the checksum
            return {record.file_size for record in records}
    except Exception as error:  # noqa: BLE001  zipfile has no error of its own for much of what can be wrong
        raise CheckpointError(
            f"it is no file that torch.save has written in the last years, or a damaged one: {error}",
            where=where,
            fix="get the file again; if it is older, or was saved without checksums "
            "(torch.serialization.set_crc32_options(False)), load and save it anew with torch",
        ) from None


def _check_state(state: dict[Any, Tensor], num_bytes: int, record_sizes: set[int]) -> None:
    """Refuses what cannot be written as it is, and what a small file makes large."""
    total_bytes = 0
    for name, value in state.items():
        strict_json.text(name).encode()
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise ValueError(f"'{name}' is a {type(value).__name__}")
        if (
            value.layout != torch.strided
            or value.device.type != "cpu"
            or dtype_name(value.dtype) not in ITEM_BYTES
        ):
            raise ValueError(f"'{name}' is of {value.dtype}, {value.layout} on {value.device}")
        if value.untyped_storage().nbytes() not in record_sizes and value.numel():
            raise ValueError(f"'{name}' claims more or fewer bytes than the file holds for it")
        check_shape(tuple(value.shape), value.itemsize)
        total_bytes += value.nbytes
    if total_bytes > 64 * max(num_bytes, 1 << 20):
        raise ValueError(f"it makes {total_bytes} bytes of a file of {num_bytes}: tensors are expanded")
