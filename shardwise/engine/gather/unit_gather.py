"""Gathers a unit: from every rank's row of shards to full parameters.

    shards (own row) ──cast──▶ sent row ──one all-gather──▶ rows of all ranks ──copy-out──▶ full parameters
                                  ├───────one all-gather of many tensors (NCCL, large units)───────▲
                                  └───────shared memory, read in place (processes on one host)─────▲

There is no cast when rows are sent as they are stored, and no copy-out where the rows of all ranks are the full
parameters end to end; on CUDA the cast then writes straight into them. All of it runs on the gather stream.

With ``reshard_after_forward=<int>`` a rank keeps a *part* after forward: its own row and some of its neighbours'. The
gather in backward then runs over a smaller group, and yields the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from shardwise.comm.collectives.group import GroupCollectives, LentRows, Work, drain
from shardwise.comm.dry_run import is_like_cuda
from shardwise.comm.streams import SideStream, StreamEvent
from shardwise.engine.buffers import ElasticBuffer
from shardwise.engine.gather.tensor_extensions import TensorExtension
from shardwise.engine.kernels import plan_copy_out_kernel
from shardwise.planning.column_blocks import column_blocks_of_layout
from shardwise.planning.layout import Block, EvenShard, Layout, blocks_by_rank
from shardwise.planning.memory import GATHERED, GATHERING
from shardwise.planning.rows import RowsLayout
from shardwise.torch_internals import copy_all

# From this size of a parameter on, on average, a copy-out takes longer than gathering the parameters one by one.
_IN_PLACE_BYTES = 2 << 20


def _plan_in_place(
    layout: Layout, full: ElasticBuffer, row: ElasticBuffer | torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
    """Outputs and inputs of a gather straight into the full parameters; None where that is impossible or slower."""
    shards = layout.even_shards()
    if layout.is_in_place or not shards or layout.full_bytes < _IN_PLACE_BYTES * len(shards):
        return None
    outputs, inputs = [], []
    for shard in shards:
        outputs.append(full.tensor(torch.uint8, shard.full_start_bytes, (shard.shard_bytes * layout.world,)))
        stop = shard.shard_start_bytes + shard.shard_bytes
        inputs.append(
            row[shard.shard_start_bytes : stop]
            if isinstance(row, torch.Tensor)
            else row.tensor(torch.uint8, shard.shard_start_bytes, (shard.shard_bytes,))
        )
    return outputs, inputs


class CopyOut(Protocol):
    def run(self) -> None:
        """Copies the rows of all ranks into the full parameters."""


def _plan_copy_out(
    layout: Layout, rows: ElasticBuffer, full: ElasticBuffer, sent_dtypes: list[torch.dtype]
) -> CopyOut:
    if isinstance(layout, RowsLayout) and (blocks := column_blocks_of_layout(layout)) is not None:
        kernel = plan_copy_out_kernel(blocks, layout.world, layout.sent_bytes, rows, full)
        if kernel is not None:
            return kernel
    shards = layout.even_shards()
    if shards is not None and is_like_cuda(full.device):
        return SplitRows(layout, shards, rows, full)
    return CopyBlocks(layout, rows, full, sent_dtypes)


class SplitRows:
    """Copies all parameters out in one torch operation; each is the same columns of all rows."""

    def __init__(
        self, layout: Layout, shards: list[EvenShard], rows: ElasticBuffer, full: ElasticBuffer
    ) -> None:
        world = layout.world
        self._rows = rows.tensor(torch.uint8, 0, (world, layout.sent_bytes))
        self._sizes: list[int] = []
        self._outputs: list[torch.Tensor] = []
        end = 0
        for shard in sorted(shards, key=lambda shard: shard.shard_start_bytes):
            self._skip(shard.shard_start_bytes - end, full.device)
            self._sizes.append(shard.shard_bytes)
            self._outputs.append(full.tensor(torch.uint8, shard.full_start_bytes, (world, shard.shard_bytes)))
            end = shard.shard_start_bytes + shard.shard_bytes
        self._skip(layout.sent_bytes - end, full.device)

    def _skip(self, num_bytes: int, device: torch.device) -> None:
        if num_bytes:
            self._sizes.append(num_bytes)
            self._outputs.append(
                torch.empty(self._rows.shape[0], num_bytes, dtype=torch.uint8, device=device)
            )

    def run(self) -> None:
        torch.split_with_sizes_copy(self._rows, self._sizes, 1, out=self._outputs)


class CopyBlocks:
    """Copies the rows out with one strided copy per block."""

    def __init__(
        self, layout: Layout, rows: ElasticBuffer, full: ElasticBuffer, sent_dtypes: list[torch.dtype]
    ) -> None:
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        for segment, block in layout.copy_out_blocks():
            dtype = sent_dtypes[segment.members[0]]
            size = dtype.itemsize
            self._targets.append(full.tensor(dtype, block.full_start * size, block.shape, block.full_strides))
            self._sources.append(
                rows.tensor(dtype, block.packed_start * size, block.shape, block.packed_strides)
            )

    def run(self) -> None:
        if self._targets:
            copy_all(self._targets, self._sources)


class CopySharedRows:
    """Copies out rows that every rank keeps in its own shared memory."""

    def __init__(self, layout: Layout, full: ElasticBuffer, sent_dtypes: list[torch.dtype]) -> None:
        self._targets: list[torch.Tensor] = []
        self._blocks: list[tuple[int, torch.dtype, Block]] = []
        for segment, block in layout.copy_out_blocks():
            dtype = sent_dtypes[segment.members[0]]
            for rank, of_rank in blocks_by_rank(block, layout.sent_bytes // dtype.itemsize):
                start_bytes = of_rank.full_start * dtype.itemsize
                self._targets.append(full.tensor(dtype, start_bytes, of_rank.shape, of_rank.full_strides))
                self._blocks.append((rank, dtype, of_rank))

    def run(self, lent: LentRows) -> None:
        rows: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        sources = []
        for rank, dtype, block in self._blocks:
            if (rank, dtype) not in rows:
                rows[rank, dtype] = lent.row(rank).view(dtype)
            row = rows[rank, dtype]
            start = row.storage_offset() + block.packed_start
            sources.append(row.as_strided(block.shape, block.packed_strides, start))
        if sources:
            copy_all(self._targets, sources)
        lent.release_rows()


class UnitGather:
    """The gather of one unit. Everything is planned at set-up, except which collective the group offers at the time."""

    def __init__(
        self,
        layout: Layout,
        shards: torch.Tensor,
        stored_dtypes: list[torch.dtype],
        sent_dtypes: list[torch.dtype],
        full: ElasticBuffer,
        device: torch.device,
        calls: GroupCollectives,
        part_calls: GroupCollectives | None,
        extensions: Sequence[TensorExtension],
    ) -> None:
        self.calls = calls
        # Parameters that decide themselves what is sent.
        self._extensions = extensions
        self._part_calls = part_calls
        self._full = full
        # Where the rows of all ranks are the full buffer, they are received there and nothing is copied out.
        self._rows = (
            full if layout.is_in_place else ElasticBuffer(layout.world * layout.sent_bytes, device, GATHERING)
        )
        self._all_rows = self._rows.tensor(torch.uint8, 0, (layout.world * layout.sent_bytes,))
        # The buffers that a gather needs only until it has finished.
        self._temporary = [] if self._rows is full else [self._rows]
        self._work: Work | None = None
        self._lent: LentRows | None = None
        # Whether the gather issued last keeps a part of the rows when it finishes, and whether it is a prefetch.
        self.keeps_part = False
        self.is_prefetch = False
        # On the gather stream, behind the copy-out of the gather that finished last.
        self.arrival: StreamEvent | None = None

        self._part: ElasticBuffer | None = None
        if part_calls is not None:
            part_bytes = layout.sent_bytes * layout.world // part_calls.world
            self._part = ElasticBuffer(part_bytes, device, GATHERED)
            self._part_row = self._part.tensor(torch.uint8, 0, (part_bytes,))
            self._part_source = self._rows.tensor(torch.uint8, part_calls.rank * part_bytes, (part_bytes,))

        # How the shards become the row that is sent: (a buffer to grow, (target, source) of the copies into it).
        self._row_copies: list[tuple[ElasticBuffer, list[tuple[torch.Tensor, torch.Tensor]]]] = []
        row = self._plan_own_row(layout, shards, stored_dtypes, sent_dtypes, device)

        self._in_place = None if self._part is not None else _plan_in_place(layout, full, row)
        self._copy_out = None if self._rows is full else _plan_copy_out(layout, self._rows, full, sent_dtypes)
        self._copy_shared_rows: CopySharedRows | None = None
        if self._rows is not full and device.type == "cpu" and part_calls is None:
            self._copy_shared_rows = CopySharedRows(layout, full, sent_dtypes)

    def _plan_own_row(
        self,
        layout: Layout,
        shards: torch.Tensor,
        stored_dtypes: list[torch.dtype],
        sent_dtypes: list[torch.dtype],
        device: torch.device,
    ) -> ElasticBuffer | torch.Tensor:
        """Plans how the shards become the row that is sent, ``self._own``; returns the memory of that row."""
        self._own = shards
        row: ElasticBuffer | torch.Tensor = shards
        device_row: ElasticBuffer | None = None
        if shards.device != device:
            # Shards are offloaded to the host: one transfer copies the row to the device, which casts it.
            row = device_row = ElasticBuffer(layout.stored_bytes, device, GATHERING)
            self._own = device_row.tensor(torch.uint8, 0, (layout.stored_bytes,))
            self._row_copies.append((device_row, [(self._own, shards)]))
        if sent_dtypes != stored_dtypes:
            if self._rows is self._full and is_like_cuda(device) and self._part is None:
                # Cast to where this rank's row is received: NCCL then skips the copy of the own row.
                cast_row, start = self._full, self.calls.rank * layout.sent_bytes
            else:
                row = cast_row = ElasticBuffer(layout.sent_bytes, device, GATHERING)
                start = 0
                self._temporary.append(cast_row)
            self._own = cast_row.tensor(torch.uint8, start, (layout.sent_bytes,))
            casts: list[tuple[torch.Tensor, torch.Tensor]] = []
            self._row_copies.append((cast_row, casts))
            for segment in layout.segments:
                stored_dtype, sent_dtype = stored_dtypes[segment.members[0]], sent_dtypes[segment.members[0]]
                target = cast_row.tensor(sent_dtype, start + segment.sent_start_bytes, (segment.numel,))
                if device_row is not None:
                    source = device_row.tensor(stored_dtype, segment.stored_start_bytes, (segment.numel,))
                else:
                    stop_bytes = segment.stored_start_bytes + segment.numel * segment.stored_itemsize
                    source = shards[segment.stored_start_bytes : stop_bytes].view(stored_dtype)
                casts.append((target, source))
        if device_row is not None:
            self._temporary.append(device_row)
        return row

    @property
    def temporary_bytes(self) -> int:
        """The bytes that a gather needs beside the full parameters, until it has finished."""
        gathers_each = self._in_place is not None and self.calls.gathers_each
        return sum(
            buffer.size_bytes for buffer in self._temporary if buffer is not self._rows or not gathers_each
        )

    @property
    def rows_bytes(self) -> int:
        """The bytes that a gather of parts needs, if they are to be copied out."""
        return 0 if self._rows is self._full else self._rows.size_bytes

    @property
    def part_bytes(self) -> int:
        return 0 if self._part is None else self._part.size_bytes

    def issue(self, code: int, from_part: bool, keeps_part: bool, is_prefetch: bool) -> None:
        """Starts the gather, from every rank's shards or from the parts kept after forward.

        With ``keeps_part`` this rank's part of the rows stays, from ``finish`` to ``drop_part``.
        """
        self.keeps_part = keeps_part
        self.is_prefetch = is_prefetch
        if from_part:
            assert self._part_calls is not None
            self._full.grow()
            self._rows.grow()
            self._work = self._part_calls.issue_all_gather(self._all_rows, self._part_row, code)
            return
        for extension in self._extensions:
            extension.write_row()
        if self._part is not None:
            self._part.shrink()
        self._full.grow()
        for buffer, copies in self._row_copies:
            buffer.grow()
            for target, source in copies:
                # ``non_blocking`` only matters to the transfer from the host.
                target.copy_(source, non_blocking=True)
        if self._in_place is not None and self.calls.gathers_each:
            self._work = self.calls.issue_all_gather_each(*self._in_place, code)
        elif self._copy_shared_rows is not None and self.calls.lends_rows:
            self._work = self._lent = self.calls.issue_all_gather_lent(self._all_rows, self._own, code)
        else:
            self._rows.grow()
            self._work = self.calls.issue_all_gather(self._all_rows, self._own, code)

    def finish(self, stream: SideStream) -> None:
        """Waits for the rows and copies them out, on the gather stream, which is current."""
        assert self._work is not None
        self._work.wait()
        self._work = None
        if self._lent is not None:
            assert self._copy_shared_rows is not None
            self._copy_shared_rows.run(self._lent)
            self._lent = None
        elif self._copy_out is not None and self._rows.is_grown:
            self._copy_out.run()
        if self.keeps_part:
            assert self._part is not None
            self._part.grow()
            self._part_row.copy_(self._part_source)
        elif self._part is not None:
            self._part.shrink()
        for buffer in self._temporary:
            buffer.shrink()
        for extension in self._extensions:
            extension.rebuild()
        self.arrival = self.calls.channel.last_event = stream.record_event()

    def free(self) -> None:
        """Frees the full parameters."""
        self._full.shrink()
        for extension in self._extensions:
            extension.free()

    def abandon(self) -> bool:
        """Drops a gather that nobody waits for, once it has ended; False if its buffers may still be written to."""
        work, self._work, self._lent = self._work, None, None
        if work is not None and not drain(work):
            return False
        self.drop_part()
        for buffer in (self._rows, *self._temporary):
            buffer.shrink()
        return True

    def drop_part(self) -> None:
        if self._part is not None:
            self._part.shrink()
