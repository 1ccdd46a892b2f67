"""Writes a checkpoint's files: planned once with DCP, written at every save.

    plan    outlines of all ranks ──DCP: who writes what, each block once──▶ each rank's file layout, all chunks
    write   image ──▶ rank-*.bin ──sizes, checksums──▶ first rank: manifest.json, commit

A plan is valid as long as no rank's parts change. With a plan, a save is a few long writes and checksums, which release
the GIL, and one message of two numbers from each rank to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from shardwise.checkpoint.disk import FileRecord, RawFile, sync_folder, write_text
from shardwise.checkpoint.manifest import ITEM_BYTES, MANIFEST, Chunk, Manifest, TensorRecord
from shardwise.checkpoint.parts import dtype_name
from shardwise.checkpoint.staging import FileLayout, Outline, StagedFile, lay_out
from shardwise.errors import CheckpointError

__all__ = ["WritePlan", "plan_writes", "write_checkpoint"]

Result = TypeVar("Result")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class WritePlan:
    """What this rank writes."""

    layout: FileLayout
    tensors: dict[str, TensorRecord] | None
    """All ranks' chunks; only on the first rank, which writes the manifest."""


# --- planning -----------------------------------------------------------------------------------------------------


def plan_writes(outlines: Mapping[str, Outline], group: dist.ProcessGroup) -> WritePlan:
    """Plans which rank writes what. Called on every rank of the group."""
    return _work_then_conclude(group, lambda: _local_plan(outlines), _global_plan)


def _local_plan(outlines: Mapping[str, Outline]) -> SavePlan:
    """Returns what this rank could write."""
    items = []
    for name, outline in outlines.items():
        if dtype_name(outline.dtype) not in ITEM_BYTES:
            raise CheckpointError(
                f"'{name}' has dtype {outline.dtype}, which a checkpoint cannot hold",
                fix="use another dtype, or keep it out of the state dict: register_buffer(persistent=False)",
            )
        if 0 in outline.sizes and 0 not in outline.shape:
            continue  # this rank's shard is empty
        chunk = ChunkStorageMetadata(torch.Size(outline.offsets), torch.Size(outline.sizes))
        data = TensorWriteData(chunk, TensorProperties(outline.dtype), torch.Size(outline.shape))
        index = MetadataIndex(name, outline.offsets)
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items)


def _global_plan(local_plans: list[SavePlan]) -> list[WritePlan]:
    """Returns each rank's plan: every block is written by one rank."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    plans, _ = planner.create_global_plan(local_plans)
    layouts = [lay_out(_outline(item) for item in plan.items) for plan in plans]
    chunks: dict[str, list[Chunk]] = {}
    outlines: dict[str, Outline] = {}
    for rank, layout in enumerate(layouts):
        outlines.update(layout.outlines)
        for name, outline in layout.outlines.items():
            chunk = Chunk(outline.offsets, outline.sizes, _file_name(rank), layout.starts[name])
            chunks.setdefault(name, []).append(chunk)
    tensors = {
        name: TensorRecord(dtype_name(outlines[name].dtype), outlines[name].shape, tuple(of_tensor))
        for name, of_tensor in chunks.items()
    }
    return [WritePlan(layout, None if rank else tensors) for rank, layout in enumerate(layouts)]


def _outline(item: WriteItem) -> tuple[str, Outline]:
    data = item.tensor_data
    assert data is not None
    dtype, chunk = data.properties.dtype, data.chunk
    return item.index.fqn, Outline(dtype, tuple(chunk.sizes), tuple(chunk.offsets), tuple(data.size))


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.bin"


# --- writing ------------------------------------------------------------------------------------------------------


def write_checkpoint(
    image: StagedFile,
    plan: WritePlan,
    folder: Path,
    run: dict[str, Any],
    group: dist.ProcessGroup,
    commit: Callable[[], None],
    staging_error: CheckpointError | None = None,
) -> None:
    """Writes what ranks have staged into ``folder``. Called on every rank of the group.

    When everything is on disk, the first rank calls ``commit``. An error on any rank, ``staging_error`` included, is
    raised on all.
    """

    def write_file() -> FileRecord | None:
        if staging_error is not None:
            raise staging_error
        # Does not create the run's folder: one removed or moved during the run must not come back half empty.
        folder.parent.mkdir(exist_ok=True)
        folder.mkdir(exist_ok=True)
        if not plan.layout.starts:
            return None
        with RawFile(folder / _file_name(dist.get_rank(group))) as file:
            for piece in image.pieces(plan.layout):
                file.append(piece)
        return file.record

    def write_manifest(records: list[FileRecord | None]) -> list[None]:
        assert plan.tensors is not None
        files = {_file_name(rank): record for rank, record in enumerate(records) if record is not None}
        _check_files_exist(folder, files)
        write_text(folder / MANIFEST, Manifest(plan.tensors, files, run).to_text())
        sync_folder(folder)
        commit()
        return [None] * len(records)

    _work_then_conclude(group, write_file, write_manifest)


def _check_files_exist(folder: Path, files: dict[str, FileRecord]) -> None:
    """Raises CheckpointError if somebody has removed or moved what was written, or the folder that it was in."""
    for name, record in files.items():
        try:
            is_whole = (folder / name).stat().st_size == record.num_bytes
        except FileNotFoundError:
            is_whole = False
        if not is_whole:
            raise CheckpointError(f"{name} was removed or changed while the checkpoint was written")


def _work_then_conclude(
    group: dist.ProcessGroup, work: Callable[[], Result], conclude: Callable[[list[Result]], list[Answer]]
) -> Answer:
    """Calls ``work`` on every rank, then ``conclude`` on the first with all results; returns this rank's answer.

    Raises:
        CheckpointError: either failed on some rank; raised on all.
    """
    rank, world_size, first = dist.get_rank(group), dist.get_world_size(group), dist.get_global_rank(group, 0)
    results: list[Any] | None = None if rank else [None] * world_size
    dist.gather_object(_result_or_error(work, rank), results, dst=first, group=group)
    answers: list[Any] | None = None
    if results is not None:
        problem = next((problem for _, problem in results if problem is not None), None)
        concluded = None
        if problem is None:
            concluded, problem = _result_or_error(lambda: conclude([value for value, _ in results]), rank)
        answers = [(None if concluded is None else concluded[peer], problem) for peer in range(world_size)]
    received: list[Any] = [None]
    dist.scatter_object_list(received, answers, src=first, group=group)
    ((answer, problem),) = received
    if problem is not None:
        raise CheckpointError(problem)
    return answer  # type: ignore[no-any-return]


def _result_or_error(work: Callable[[], Result], rank: int) -> tuple[Result | None, str | None]:
    """Returns the result and None, or None and a description of the error."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001  sent to the other ranks, which wait for this one
        what = error.what if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        return None, f"{what} (rank {rank})"
