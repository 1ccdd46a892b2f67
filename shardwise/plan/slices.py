"""Slices of a unit's rows: the same columns of all of them, for units whose rows are too large to pack at once.

    rank 0   | A0 A1 . A2 | B0 . B1 |
    rank 1   | A3 A4 . .. | B2 . B3 |
               slice 0      ↑ slice 1 begins in the middle of B

A slice is packed and reduced as rows are, only shorter; its sums are a part of the own row.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.plan.layout import Pad, Piece
from shardwise.plan.rows import RowsPacking
from shardwise.plan.spans import Span

# Slices begin where any element begins that kernels like to load at once.
_COLUMNS = 32


def cut_into_slices(packing: RowsPacking, most_numel: int) -> list[RowsSlice]:
    """As few slices as can be of which all ranks' parts together have at most ``most_numel`` elements, or nearly so."""
    width = max(1, most_numel // packing.world // _COLUMNS) * _COLUMNS
    return [
        RowsSlice(packing, Span(start, min(start + width, packing.row_numel)))
        for start in range(0, packing.row_numel, width)
    ]


class RowsSlice:
    """Some columns of rows whose parameters are all cut along dim 0: a part of one is a run of its elements."""

    def __init__(self, packing: RowsPacking, columns: Span) -> None:
        assert all(cut.dim == 0 for cut in packing.cuts)
        self.world = packing.world
        self.columns = columns
        self.row_numel = columns.numel
        self._packing = packing

    def pieces(self, index: int) -> list[Piece]:
        found = []
        cut, part = self._packing.cuts[index], self._part(index)
        if part.numel:
            start, whole = self._place(index, part), self._num_whole(index, part)
            strides = (self.row_numel, 1)
            if whole:
                found.append(Piece((whole, part.numel), part.start, (cut.padded_numel, 1), start, strides))
            if left := self._left(index, part):
                first = whole * cut.padded_numel + part.start
                start += whole * self.row_numel
                found.append(Piece((1, left), first, (cut.padded_numel, 1), start, strides))
        return found

    def pads(self) -> list[Pad]:
        strides = (self.row_numel, 1)
        pads = [Pad((self.world, gap.numel), gap.start, strides) for gap in self._gaps()]
        for index in range(len(self._packing.cuts)):
            part = self._part(index)
            if not part.numel:
                continue
            start, whole, left = (
                self._place(index, part),
                self._num_whole(index, part),
                self._left(index, part),
            )
            if left:
                pads.append(Pad((1, part.numel - left), start + whole * self.row_numel + left, strides))
                whole += 1
            if whole < self.world:
                pads.append(Pad((self.world - whole, part.numel), start + whole * self.row_numel, strides))
        return pads

    def _part(self, index: int) -> Span:
        """Which elements of a rank's part of a parameter stand in these columns."""
        start, numel = self._packing.starts[index], self._packing.cuts[index].padded_numel
        first = min(max(0, self.columns.start - start), numel)
        return Span(first, max(first, min(numel, self.columns.stop - start)))

    def _place(self, index: int, part: Span) -> int:
        return self._packing.starts[index] + part.start - self.columns.start

    def _num_whole(self, index: int, part: Span) -> int:
        """How many ranks have all of these elements: padding comes last."""
        cut = self._packing.cuts[index]
        return 0 if cut.numel < part.stop else (cut.numel - part.stop) // cut.padded_numel + 1

    def _left(self, index: int, part: Span) -> int:
        """How many of them the next rank has."""
        cut = self._packing.cuts[index]
        return max(0, cut.numel - self._num_whole(index, part) * cut.padded_numel - part.start)

    def _gaps(self) -> Iterator[Span]:
        """Columns of no parameter."""
        end = 0
        parts = [
            (self._place(index, part), part.numel)
            for index in range(len(self._packing.cuts))
            if (part := self._part(index)).numel
        ]
        for start, numel in sorted(parts):
            if start > end:
                yield Span(end, start)
            end = start + numel
        if end < self.row_numel:
            yield Span(end, self.row_numel)
