"""Tensors to a checkpoint's folder.

parts ──DCP: who writes what, each block once──▶ rank-*.bin ──first rank──▶ manifest.json
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from shardwise.checkpoint.disk import FileRecord, RawFile, sync_folder, write_text
from shardwise.checkpoint.manifest import MANIFEST, Chunk, Manifest, TensorRecord
from shardwise.checkpoint.parts import Part, dtype_name

__all__ = ["save_parts"]


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


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        part: Part = self.state_dict[index.fqn]
        return part.tensor


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
