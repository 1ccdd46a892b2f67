"""Loads a checkpoint's tensors, with any sharding, into a rank's parts.

manifest.json ──check every file's checksum──▶ ──DCP: which chunks overlap my parts──▶ copied from memory-mapped files
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from shardwise.checkpoint.disk import open_file
from shardwise.checkpoint.manifest import ITEM_BYTES, Chunk, Manifest, TensorRecord, first_damage
from shardwise.checkpoint.parts import Part
from shardwise.errors import CheckpointError

__all__ = ["MappedFiles", "check_files", "load_parts"]


def load_parts(
    parts: Mapping[str, Part],
    folder: Path,
    manifest: Manifest,
    group: dist.ProcessGroup | None,
    *,
    verify: bool = True,
) -> None:
    """Loads a checkpoint's tensors into the parts with their names, in place. Called on every rank of the group.

    ``verify=False`` skips checksums, if they have just been checked.

    Raises:
        CheckpointError: a file is damaged, and nothing has changed; or the checkpoint does not have the parts.
    """
    if verify:
        check_files(folder, manifest, group)
    planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        dcp_load(dict(parts), storage_reader=_Reader(folder, manifest), planner=planner, process_group=group)
    except CheckpointException as failure:
        rank, (error, _) = min(failure.failures.items())
        raise CheckpointError(
            f"the checkpoint cannot be loaded: {type(error).__name__}: {error} (rank {rank})",
            where=str(folder),
            fix="load it into the model it was saved from, or load another checkpoint of the run",
        ) from error


def check_files(folder: Path, manifest: Manifest, group: dist.ProcessGroup | None = None) -> None:
    """Checks every file's checksum, each file on one rank of the group; raises CheckpointError on all ranks."""
    alone = not dist.is_initialized()
    rank, world_size = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))
    by_rank: list[str | None] = [None] * world_size
    by_rank[rank] = first_damage(folder, manifest, sorted(manifest.files)[rank::world_size])
    if not alone:
        dist.all_gather_object(by_rank, by_rank[rank], group)
    if damage := next(filter(None, by_rank), None):
        raise CheckpointError(
            f"the checkpoint is damaged: {damage}",
            where=str(folder),
            fix="load another checkpoint of the run",
        )


class MappedFiles:
    """Memory-maps a checkpoint's files: chunks are tensors that are read from disk when they are used."""

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
            return torch.empty(chunk.sizes, dtype=dtype, device="cpu")
        if chunk.file not in self._mapped:
            self._mapped[chunk.file] = self._map(chunk.file)
        stop = chunk.start + chunk.numel * ITEM_BYTES[record.dtype]
        return self._mapped[chunk.file][chunk.start : stop].view(dtype).view(chunk.sizes)

    def _map(self, name: str) -> torch.Tensor:
        path, num_bytes = self._folder / name, self._manifest.files[name].num_bytes
        try:
            # Reading beyond the end of a mapped file would kill the process (SIGBUS).
            with open_file(path, follow_links=False) as file:
                found_bytes = os.fstat(file.fileno()).st_size
            if found_bytes != num_bytes:
                raise OSError(f"it has {found_bytes} bytes, but had {num_bytes} when it was written")
            return torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint's file {name} cannot be read: {error}",
                where=str(self._folder),
                fix="load another checkpoint of the run",
            ) from None


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # torch's method would search the state dict for meta tensors, and does not know parts.
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        part: Part = self.state_dict[index.fqn]
        return part.tensor


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
