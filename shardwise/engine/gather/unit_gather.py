"""Gathering a unit: from every rank's row of shards to full parameters.

    shards (own row) ──cast──▶ sent row ──one all-gather──▶ rows of all ranks ──copy-out──▶ full parameters
                                  ├───────one all-gather of many tensors (NCCL, large units)───────▲
                                  └───────lent and read where they lie (processes of one host)─────▲

The cast falls away when rows are sent as they are stored, the copy-out where the rows of all ranks already are the full
parameters end to end; on CUDA the cast then goes right to its place among them. All of it runs on the gather lane. With
*parts*, a rank keeps a run of neighbouring rows after forward; the gather in backward then fetches only the others'
runs, over a smaller group, and arrives at the very same rows.
"""

from __future__ import annotations

from typing import Protocol

import torch

from shardwise.comm.collectives.group import GroupCollectives, LentRows, Work, drain
from shardwise.engine.buffers import ElasticBuffer
from shardwise.engine.kernels import plan_copy_out_kernel
from shardwise.plan.layout import Layout, Piece, Share, pieces_by_rank
from shardwise.plan.rows import RowsLayout
from shardwise.plan.strips import strips_of_layout
from shardwise.torch_internals import copy_all

# From here on the time of a copy-out is worth more than that of one operation for each parameter.
_IN_PLACE_BYTES = 16 << 20


def _plan_in_place(
    layout: Layout, full: ElasticBuffer, row: ElasticBuffer | torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
    """Outputs and inputs of a gather that receives each parameter in its place, where that pays."""
    shares = layout.shares()
    if layout.is_in_place or shares is None or layout.full_bytes < _IN_PLACE_BYTES:
        return None
    outputs, owns = [], []
    for share in shares:
        outputs.append(full.tensor(torch.uint8, share.full_start_bytes, (share.own_bytes * layout.world,)))
        stop = share.own_start_bytes + share.own_bytes
        owns.append(
            row[share.own_start_bytes : stop]
            if isinstance(row, torch.Tensor)
            else row.tensor(torch.uint8, share.own_start_bytes, (share.own_bytes,))
        )
    return outputs, owns


class CopyOut(Protocol):
    def run(self) -> None:
        """Copies the rows of all ranks to the parameters' places."""


def _plan_copy_out(
    layout: Layout, rows: ElasticBuffer, full: ElasticBuffer, sent_dtypes: list[torch.dtype]
) -> CopyOut:
    if isinstance(layout, RowsLayout) and (strips := strips_of_layout(layout)) is not None:
        kernel = plan_copy_out_kernel(strips, layout.world, layout.sent_bytes, rows, full)
        if kernel is not None:
            return kernel
    shares = layout.shares()
    if shares is not None and full.device.type == "cuda":
        return SplitRows(layout, shares, rows, full)
    return CopyPieces(layout, rows, full, sent_dtypes)


class SplitRows:
    """One kernel for all: every parameter is the same columns of all rows."""

    def __init__(self, layout: Layout, shares: list[Share], rows: ElasticBuffer, full: ElasticBuffer) -> None:
        world = layout.world
        self._rows = rows.tensor(torch.uint8, 0, (world, layout.sent_bytes))
        self._sizes: list[int] = []
        self._outputs: list[torch.Tensor] = []
        end = 0
        for share in sorted(shares, key=lambda share: share.own_start_bytes):
            self._skip(share.own_start_bytes - end, full.device)
            self._sizes.append(share.own_bytes)
            self._outputs.append(full.tensor(torch.uint8, share.full_start_bytes, (world, share.own_bytes)))
            end = share.own_start_bytes + share.own_bytes
        self._skip(layout.sent_bytes - end, full.device)

    def _skip(self, num_bytes: int, device: torch.device) -> None:
        if num_bytes:
            self._sizes.append(num_bytes)
            self._outputs.append(
                torch.empty(self._rows.shape[0], num_bytes, dtype=torch.uint8, device=device)
            )

    def run(self) -> None:
        torch.split_with_sizes_copy(self._rows, self._sizes, 1, out=self._outputs)


class CopyPieces:
    """A strided copy for each block of the rows."""

    def __init__(
        self, layout: Layout, rows: ElasticBuffer, full: ElasticBuffer, sent_dtypes: list[torch.dtype]
    ) -> None:
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        for segment, piece in layout.copy_out():
            dtype = sent_dtypes[segment.members[0]]
            size = dtype.itemsize
            self._targets.append(full.tensor(dtype, piece.full_start * size, piece.shape, piece.full_strides))
            self._sources.append(
                rows.tensor(dtype, piece.packed_start * size, piece.shape, piece.packed_strides)
            )

    def run(self) -> None:
        if self._targets:
            copy_all(self._targets, self._sources)


class CopySharedRows:
    """The same from rows that lie each in its rank's own memory, where all others can read it."""

    def __init__(self, layout: Layout, full: ElasticBuffer, sent_dtypes: list[torch.dtype]) -> None:
        self._targets: list[torch.Tensor] = []
        self._pieces: list[tuple[int, torch.dtype, Piece]] = []
        for segment, piece in layout.copy_out():
            dtype = sent_dtypes[segment.members[0]]
            for rank, part in pieces_by_rank(piece, layout.sent_bytes // dtype.itemsize):
                start_bytes = part.full_start * dtype.itemsize
                self._targets.append(full.tensor(dtype, start_bytes, part.shape, part.full_strides))
                self._pieces.append((rank, dtype, part))

    def run(self, lent: LentRows) -> None:
        rows: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        sources = []
        for rank, dtype, piece in self._pieces:
            if (rank, dtype) not in rows:
                rows[rank, dtype] = lent.row(rank).view(dtype)
            row = rows[rank, dtype]
            start = row.storage_offset() + piece.packed_start
            sources.append(row.as_strided(piece.shape, piece.packed_strides, start))
        if sources:
            copy_all(self._targets, sources)
        lent.release_rows()


class UnitGather:
    """The gather of one unit, with everything but the collective itself decided beforehand."""

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
    ) -> None:
        self.calls = calls
        self._part_calls = part_calls
        self._full = full
        # Where the rows of all ranks are the full buffer, they are received there and nothing is copied out.
        self._rows = full if layout.is_in_place else ElasticBuffer(layout.world * layout.sent_bytes, device)
        self._all_rows = self._rows.tensor(torch.uint8, 0, (layout.world * layout.sent_bytes,))
        self._work: Work | None = None

        self._own = shards
        self._shards = shards
        self._device_row: ElasticBuffer | None = None
        if shards.device != device:
            # Shards that live on the host: one transfer brings the row over, casts happen on the device.
            self._device_row = ElasticBuffer(layout.stored_bytes, device)
            self._own = self._device_row.tensor(torch.uint8, 0, (layout.stored_bytes,))
        self._on_device = self._own
        self._casts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._cast_row: ElasticBuffer | None = None
        if sent_dtypes != stored_dtypes:
            if self._rows is full and device.type == "cuda" and part_calls is None:
                # Right to where this rank's row is received: NCCL knows that it is there already.
                row, start = full, calls.rank * layout.sent_bytes
            else:
                row, start = ElasticBuffer(layout.sent_bytes, device), 0
                self._cast_row = row
            self._own = row.tensor(torch.uint8, start, (layout.sent_bytes,))
            for segment in layout.segments:
                stored_dtype, sent_dtype = stored_dtypes[segment.members[0]], sent_dtypes[segment.members[0]]
                stored_bytes = segment.numel * segment.stored_itemsize
                target = row.tensor(sent_dtype, start + segment.sent_start_bytes, (segment.numel,))
                if self._device_row is not None:
                    source = self._device_row.tensor(
                        stored_dtype, segment.stored_start_bytes, (segment.numel,)
                    )
                else:
                    stored = shards[segment.stored_start_bytes : segment.stored_start_bytes + stored_bytes]
                    source = stored.view(stored_dtype)
                self._casts.append((target, source))

        self._copy_out = None if self._rows is full else _plan_copy_out(layout, self._rows, full, sent_dtypes)
        self._copy_shared_rows: CopySharedRows | None = None
        if self._rows is not full and device.type == "cpu" and part_calls is None:
            self._copy_shared_rows = CopySharedRows(layout, full, sent_dtypes)
        self._lent: LentRows | None = None
        self._in_place = _plan_in_place(layout, full, self._cast_row or self._device_row or shards)
        self._part: ElasticBuffer | None = None
        if part_calls is not None:
            # A part is a run of rows.
            self._in_place = None
            part_bytes = layout.sent_bytes * layout.world // part_calls.world
            self._part = ElasticBuffer(part_bytes, device)
            self._part_row = self._part.tensor(torch.uint8, 0, (part_bytes,))
            self._part_source = self._rows.tensor(torch.uint8, part_calls.rank * part_bytes, (part_bytes,))

    def issue(self, code: int, from_parts: bool) -> None:
        """Starts the gather, from every rank's shards or from the runs of rows kept after forward."""
        if from_parts:
            assert self._part_calls is not None
            self._full.grow()
            self._rows.grow()
            self._work = self._part_calls.issue_all_gather(self._all_rows, self._part_row, code)
            return
        if self._part is not None:
            self._part.shrink()
        self._full.grow()
        if self._device_row is not None:
            self._device_row.grow()
            self._on_device.copy_(self._shards, non_blocking=True)
        if self._cast_row is not None:
            self._cast_row.grow()
        for target, source in self._casts:
            target.copy_(source)
        if self._in_place is not None and self.calls.gathers_each:
            self._work = self.calls.issue_all_gather_each(*self._in_place, code)
        elif self._copy_shared_rows is not None and self.calls.lends_rows:
            self._work = self._lent = self.calls.issue_all_gather_lent(self._all_rows, self._own, code)
        else:
            if self._rows is not self._full:
                self._rows.grow()
            self._work = self.calls.issue_all_gather(self._all_rows, self._own, code)

    def finish(self, keep_part: bool) -> None:
        """Waits for the rows and copies them out; with ``keep_part``, this rank's run of rows stays behind."""
        assert self._work is not None
        self._work.wait()
        self._work = None
        if self._lent is not None:
            assert self._copy_shared_rows is not None
            self._copy_shared_rows.run(self._lent)
            self._lent = None
        elif self._copy_out is not None and self._rows.is_grown:
            self._copy_out.run()
        if keep_part:
            assert self._part is not None
            self._part.grow()
            self._part_row.copy_(self._part_source)
        elif self._part is not None:
            self._part.shrink()
        if self._rows is not self._full:
            self._rows.shrink()
        if self._cast_row is not None:
            self._cast_row.shrink()
        if self._device_row is not None:
            self._device_row.shrink()

    def abandon(self) -> bool:
        """Lets a gather that nobody waits for land, and drops it; False if it may still land later."""
        work, self._work, self._lent = self._work, None, None
        if work is not None and not drain(work):
            return False
        self.drop_part()
        for buffer in (self._rows, self._cast_row, self._device_row):
            if buffer is not None:
                buffer.shrink()
        return True

    def drop_part(self) -> None:
        if self._part is not None:
            self._part.shrink()
