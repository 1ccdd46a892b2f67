"""Slices of a unit's rows: the same columns of all rows, for units whose rows are too large to pack at once.

    rank 0   | A0 A1 . A2 | B0 . B1 |
    rank 1   | A3 A4 . .. | B2 . B3 |
               slice 0      ↑ slice 1 begins in the middle of B

A slice is packed and reduced like shorter rows; its sums are a span of the rank's own row.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.planning.layout import Block, PaddingBlock, Span
from shardwise.planning.rows import RowsPacking

# Slices begin at multiples of this many columns, so that kernels can use vector loads.
_COLUMNS = 32


def cut_into_slices(packing: RowsPacking, most_numel: int) -> list[RowsSlice]:
    """Cuts the rows into as few slices as possible of at most about ``most_numel`` elements over all ranks."""
    width = max(1, most_numel // packing.world // _COLUMNS) * _COLUMNS
    return [
        RowsSlice(packing, Span(start, min(start + width, packing.row_numel)))
        for start in range(0, packing.row_numel, width)
    ]


class RowsSlice:
    """Some columns of rows whose parameters are all cut along dim 0, so that a shard is contiguous in its parameter."""

    def __init__(self, packing: RowsPacking, columns: Span) -> None:
        assert all(cut.dim == 0 for cut in packing.cuts)
        self.world = packing.world
        self.columns = columns
        self.row_numel = columns.numel
        self._packing = packing

    def blocks(self, index: int) -> list[Block]:
        found = []
        cut, span = self._packing.cuts[index], self._shard_span(index)
        if span.numel:
            start, num_full = self._start(index, span), self._num_full_ranks(index, span)
            strides = (self.row_numel, 1)
            if num_full:
                found.append(Block((num_full, span.numel), span.start, (cut.padded_numel, 1), start, strides))
            if rest := self._rest(index, span):
                first = num_full * cut.padded_numel + span.start
                start += num_full * self.row_numel
                found.append(Block((1, rest), first, (cut.padded_numel, 1), start, strides))
        return found

    def padding(self) -> list[PaddingBlock]:
        width = self.row_numel
        found = [PaddingBlock((self.world, gap.numel), gap.start, (width, 1)) for gap in self._gaps()]
        for index in range(len(self._packing.cuts)):
            span = self._shard_span(index)
            if not span.numel:
                continue
            start, rank = self._start(index, span), self._num_full_ranks(index, span)
            rest = self._rest(index, span)
            if rest:
                found.append(PaddingBlock((1, span.numel - rest), start + rank * width + rest, (width, 1)))
                rank += 1
            if rank < self.world:
                found.append(PaddingBlock((self.world - rank, span.numel), start + rank * width, (width, 1)))
        return found

    def _shard_span(self, index: int) -> Span:
        """The elements of each rank's shard of a parameter that lie in these columns."""
        start, numel = self._packing.starts[index], self._packing.cuts[index].padded_numel
        first = min(max(0, self.columns.start - start), numel)
        return Span(first, max(first, min(numel, self.columns.stop - start)))

    def _start(self, index: int, span: Span) -> int:
        """The column of the slice where those elements begin."""
        return self._packing.starts[index] + span.start - self.columns.start

    def _num_full_ranks(self, index: int, span: Span) -> int:
        """How many ranks have all of these elements; padding comes last."""
        cut = self._packing.cuts[index]
        return 0 if cut.numel < span.stop else (cut.numel - span.stop) // cut.padded_numel + 1

    def _rest(self, index: int, span: Span) -> int:
        """How many of these elements the rank after those has."""
        cut = self._packing.cuts[index]
        return max(0, cut.numel - self._num_full_ranks(index, span) * cut.padded_numel - span.start)

    def _gaps(self) -> Iterator[Span]:
        """The columns that belong to no parameter."""
        end = 0
        used = [
            (self._start(index, span), span.numel)
            for index in range(len(self._packing.cuts))
            if (span := self._shard_span(index)).numel
        ]
        for start, numel in sorted(used):
            if start > end:
                yield Span(end, start)
            end = start + numel
        if end < self.row_numel:
            yield Span(end, self.row_numel)
