"""Tensors to and from a checkpoint's folder: the storage that torch's DCP plans for.

    save   parts ──DCP: who writes what, each block once──▶ rank-*.bin ──coordinator──▶ manifest.json
    load   manifest.json ──DCP: which blocks meet mine──▶ read from mapped files, copied into parts

A *part* is a rank's block of a larger tensor, whatever way the tensor is sharded: so what was saved on some ranks in
some sharding is loaded on any others in any other.
"""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from shardwise.checkpoint.manifest import (
    ITEM_BYTES,
    MANIFEST,
    Chunk,
    FileRecord,
    Manifest,
    TensorRecord,
    sync_folder,
    write_text,
)
from shardwise.torch_internals import local_of

__all__ = ["MappedFiles", "Part", "RawFile", "bytes_of", "dtype_name", "load_parts", "part_of", "save_parts"]

ALIGNMENT = 64


# --- parts ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """This rank's block of a tensor of ``shape``, at ``offsets``; DCP asks it for the methods below."""

    tensor: torch.Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def size(self) -> torch.Size:
        return torch.Size(self.shape)

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)

    def __create_write_items__(self, name: str, _part: object) -> list[WriteItem]:
        if not self.tensor.numel() and 0 not in self.shape:
            return []  # a rank without a share of a short tensor
        data = TensorWriteData(self._chunk(), TensorProperties(self.tensor.dtype), self.size())
        return [WriteItem(MetadataIndex(name, self.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()]


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        part: Part = self.state_dict[index.fqn]
        return part.tensor


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # torch's would walk through the state dict for tensors on the meta device, and knows no parts.
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        part: Part = self.state_dict[index.fqn]
        return part.tensor


def part_of(tensor: torch.Tensor) -> Part:
    """What this rank has of a tensor: all of a plain one, its shard of a DTensor. Shares its memory."""
    detached = tensor.detach()
    if isinstance(detached, DTensor):
        (chunk,) = detached.__create_chunk_list__()
        return Part(local_of(detached), tuple(chunk.offsets), tuple(detached.shape))
    return Part(detached, (0,) * detached.dim(), tuple(detached.shape))


# --- writing --------------------------------------------------------------------------------------------------


def save_parts(
    parts: Mapping[str, Part],
    folder: Path,
    run: dict[str, Any],
    group: dist.ProcessGroup,
    commit: Callable[[], None],
) -> None:
    """Writes all ranks' parts into ``folder``; on every rank of the group.

    Once all of it is on disk, the first rank calls ``commit``. Whatever goes wrong on any rank is raised on all.
    """
    planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp_save(dict(parts), storage_writer=_Writer(folder, run, commit), planner=planner, process_group=group)


@dataclass(frozen=True)
class _Stored:
    """Where a chunk went; travels from the rank that wrote it to the one that writes the manifest."""

    chunk: Chunk
    dtype: str
    shape: tuple[int, ...]
    file: FileRecord


class _Writer(StorageWriter):
    def __init__(self, folder: Path, run: dict[str, Any], commit: Callable[[], None]) -> None:
        self._folder, self._run, self._commit = folder, run, commit
        self._rank = 0

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = kwargs["rank"]
        self._folder.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"rank-{self._rank:05d}.bin"
        written: list[tuple[MetadataIndex, TensorWriteData, Chunk]] = []
        with RawFile(self._folder / name) as file:
            # By name: the same state is the same bytes, whichever way it came about.
            for item in sorted(plan.items, key=lambda item: item.index.fqn):
                data, tensor = item.tensor_data, planner.resolve_data(item)
                assert data is not None
                assert isinstance(tensor, torch.Tensor)
                chunk = Chunk(tuple(data.chunk.offsets), tuple(data.chunk.sizes), name, file.append(tensor))
                written.append((item.index, data, chunk))
        if not written:
            (self._folder / name).unlink()
        results = []
        for index, data, chunk in written:
            stored = _Stored(chunk, dtype_name(data.properties.dtype), tuple(data.size), file.record)
            results.append(WriteResult(index, chunk.numel, stored))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        chunks: dict[str, list[Chunk]] = {}
        outlines: dict[str, _Stored] = {}
        files = {}
        for result in (result for of_rank in results for result in of_rank):
            stored: _Stored = result.storage_data
            chunks.setdefault(result.index.fqn, []).append(stored.chunk)
            outlines[result.index.fqn] = stored
            files[stored.chunk.file] = stored.file
        tensors = {
            name: TensorRecord(outlines[name].dtype, outlines[name].shape, tuple(found))
            for name, found in chunks.items()
        }
        write_text(self._folder / MANIFEST, Manifest(tensors, files, self._run).to_text())
        sync_folder(self._folder)
        self._commit()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


class RawFile:
    """A file of raw tensors that is written once, from start to end, with a checksum of all of it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._num_bytes = self._crc = 0

    @property
    def record(self) -> FileRecord:
        return FileRecord(self._num_bytes, self._crc)

    def append(self, tensor: torch.Tensor, *, aligned: bool = True) -> int:
        """Writes a tensor's elements, right after the last ones unless ``aligned``; the place of the first."""
        if aligned:
            self._write(b"\0" * (-self._num_bytes % ALIGNMENT))
        start = self._num_bytes
        whole = tensor.detach().cpu().contiguous()
        self._write(bytes_of(whole))
        return start

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            # In blocks, so that the checksum finds what was just written in the cache.
            count = self._file.write(view[: 1 << 22])
            self._crc = zlib.crc32(view[:count], self._crc)
            self._num_bytes += count
            view = view[count:]

    def __enter__(self) -> RawFile:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, which must outlive the view."""
    num_bytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- reading --------------------------------------------------------------------------------------------------


def load_parts(
    parts: Mapping[str, Part], folder: Path, manifest: Manifest, group: dist.ProcessGroup | None
) -> None:
    """Fills parts, in place, with what a checkpoint holds under their names; on every rank of the group."""
    planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp_load(dict(parts), storage_reader=_Reader(folder, manifest), planner=planner, process_group=group)


class MappedFiles:
    """Chunks of a checkpoint as tensors that are read from disk when they are used."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._mapped: dict[str, torch.Tensor] = {}

    def chunk(self, name: str, offsets: tuple[int, ...]) -> torch.Tensor:
        record = self._manifest.tensors[name]
        (chunk,) = [chunk for chunk in record.chunks if chunk.offsets == offsets]
        return self.read(record, chunk)

    def read(self, record: TensorRecord, chunk: Chunk) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, record.dtype)
        if not chunk.numel:
            return torch.empty(chunk.sizes, dtype=dtype)
        if chunk.file not in self._mapped:
            num_bytes = self._manifest.files[chunk.file].num_bytes
            self._mapped[chunk.file] = torch.from_file(
                str(self._folder / chunk.file), shared=False, size=num_bytes, dtype=torch.uint8
            )
        stop = chunk.start + chunk.numel * ITEM_BYTES[record.dtype]
        return self._mapped[chunk.file][chunk.start : stop].view(dtype).view(chunk.sizes)


class _Reader(StorageReader):
    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._manifest = manifest
        self._files = MappedFiles(folder, manifest)

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(getattr(torch, record.dtype)),
                    torch.Size(record.shape),
                    [
                        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                        for chunk in record.chunks
                    ],
                )
                for name, record in self._manifest.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *a: Any, **kw: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            offset = item.storage_index.offset
            assert offset is not None
            block = self._files.chunk(item.storage_index.fqn, tuple(offset))
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                block = block.narrow(dim, start, length)
            target = planner.resolve_tensor(item)
            target.copy_(block)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False
