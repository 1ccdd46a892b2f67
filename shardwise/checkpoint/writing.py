"""A checkpoint's files: planned once with DCP, written at every save.

    plan    outlines of all ranks ──DCP: who writes what, each block once──▶ each rank's file layout, all chunks
    write   image ──▶ rank-*.bin ──sizes, checksums──▶ first rank: manifest.json, commit

As long as no rank has other parts than before, a plan stands. Then all that is left to do in Python is to tell the
first rank two numbers: the rest is a few long writes and checksums, which leave the interpreter to the steps.
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
from shardwise.checkpoint.image import FileLayout, Image, Outline, lay_out
from shardwise.checkpoint.manifest import ITEM_BYTES, MANIFEST, Chunk, Manifest, TensorRecord
from shardwise.checkpoint.parts import dtype_name
from shardwise.errors import CheckpointError

__all__ = ["WritePlan", "plan_writes", "write_checkpoint"]

Found = TypeVar("Found")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class WritePlan:
    """What this rank writes of what it has."""

    layout: FileLayout
    tensors: dict[str, TensorRecord] | None
    """Where every rank's chunks go; on the first rank, which writes the manifest."""


# --- planning -----------------------------------------------------------------------------------------------------


def plan_writes(outlines: Mapping[str, Outline], group: dist.ProcessGroup) -> WritePlan:
    """Shares the writing out; on every rank of the group."""
    return _settle(group, lambda: _offer(outlines), _share_out)


def _offer(outlines: Mapping[str, Outline]) -> SavePlan:
    """What a rank could write."""
    items = []
    for name, outline in outlines.items():
        if dtype_name(outline.dtype) not in ITEM_BYTES:
            raise CheckpointError(
                f"'{name}' is of {outline.dtype}, which no checkpoint can hold",
                fix="keep it in another dtype, or leave it out of the state dict: register_buffer(persistent=False)",
            )
        if 0 in outline.sizes and 0 not in outline.shape:
            continue  # a rank without a share of a short tensor
        chunk = ChunkStorageMetadata(torch.Size(outline.offsets), torch.Size(outline.sizes))
        data = TensorWriteData(chunk, TensorProperties(outline.dtype), torch.Size(outline.shape))
        index = MetadataIndex(name, outline.offsets)
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items)


def _share_out(offers: list[SavePlan]) -> list[WritePlan]:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    shares, _ = planner.create_global_plan(offers)
    layouts = [lay_out(_outline(item) for item in share.items) for share in shares]
    chunks: dict[str, list[Chunk]] = {}
    outlines: dict[str, Outline] = {}
    for rank, layout in enumerate(layouts):
        outlines.update(layout.outlines)
        for name, outline in layout.outlines.items():
            chunk = Chunk(outline.offsets, outline.sizes, _file_name(rank), layout.starts[name])
            chunks.setdefault(name, []).append(chunk)
    tensors = {
        name: TensorRecord(dtype_name(outlines[name].dtype), outlines[name].shape, tuple(found))
        for name, found in chunks.items()
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
    image: Image,
    plan: WritePlan,
    folder: Path,
    run: dict[str, Any],
    group: dist.ProcessGroup,
    commit: Callable[[], None],
    unstaged: CheckpointError | None = None,
) -> None:
    """Writes what ranks staged into ``folder``; on every rank of the group.

    Once all of it is on disk, the first rank calls ``commit``. Whatever goes wrong on any rank is raised on all, and so
    is ``unstaged``, why this rank could not stage.
    """

    def write_file() -> FileRecord | None:
        if unstaged is not None:
            raise unstaged
        # Not the folder above: where a run lives is for the run to look after.
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
        _check_are_there(folder, files)
        write_text(folder / MANIFEST, Manifest(plan.tensors, files, run).to_text())
        sync_folder(folder)
        commit()
        return [None] * len(records)

    _settle(group, write_file, write_manifest)


def _check_are_there(folder: Path, files: dict[str, FileRecord]) -> None:
    """Raises CheckpointError if somebody has removed or moved what was written, or the folder that it was in."""
    for name, record in files.items():
        try:
            is_whole = (folder / name).stat().st_size == record.num_bytes
        except FileNotFoundError:
            is_whole = False
        if not is_whole:
            raise CheckpointError(f"{name} was removed or changed while the checkpoint was written")


def _settle(
    group: dist.ProcessGroup, work: Callable[[], Found], conclude: Callable[[list[Found]], list[Answer]]
) -> Answer:
    """Works on every rank, concludes on the first from what all found; that rank's answer to each.

    Raises:
        CheckpointError: it failed on some rank; raised on all, and nothing was concluded.
    """
    rank, world_size, first = dist.get_rank(group), dist.get_world_size(group), dist.get_global_rank(group, 0)
    found: list[Any] | None = None if rank else [None] * world_size
    dist.gather_object(_attempt(work, rank), found, dst=first, group=group)
    answers: list[Any] | None = None
    if found is not None:
        problem = next((problem for _, problem in found if problem is not None), None)
        told = None
        if problem is None:
            told, problem = _attempt(lambda: conclude([value for value, _ in found]), rank)
        answers = [(None if told is None else told[peer], problem) for peer in range(world_size)]
    received: list[Any] = [None]
    dist.scatter_object_list(received, answers, src=first, group=group)
    ((answer, problem),) = received
    if problem is not None:
        raise CheckpointError(problem)
    return answer  # type: ignore[no-any-return]


def _attempt(work: Callable[[], Found], rank: int) -> tuple[Found | None, str | None]:
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001  whatever it is, the other ranks wait to hear of it
        what = error.what if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        return None, f"{what} (rank {rank})"
