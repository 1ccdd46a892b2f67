"""Strips: what kernels of our own are told about rows whose parameters are all cut along dim 0.

A rank's share of such a parameter is one run of its elements, so a few numbers say where all shares of it stand:

    rank 0   | a0 a1 | b0 . |        A: start 0, span 2, width 2, own 2, numel 4
    rank 1   | a2 a3 | b1 . |        B: start 2, span 2, width 1, own 1, numel 2        '.' is padding, always zero

In a slice of rows (``plan/slices``) the first ``skip`` elements of each share stand elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from shardwise.plan.flat import FlatPacking
from shardwise.plan.rows import RowCut, RowsLayout, RowsPacking
from shardwise.plan.spans import Span


@dataclasses.dataclass(frozen=True)
class Strip:
    """One parameter's place in rows; all numbers in elements, or all in bytes.

    ``span`` columns from ``start`` on are the strip's: up to ``width`` of them the parameter's, zeros the rest.
    Rank r's share begins at ``r * own`` of the parameter's ``numel`` elements, which begin at ``whole_start``.
    """

    member: int
    start: int
    span: int
    width: int
    own: int
    numel: int
    skip: int = 0
    whole_start: int = 0

    def scaled(self, itemsize: int) -> Strip:
        """The same in bytes."""
        places = {
            name: value * itemsize for name, value in dataclasses.asdict(self).items() if name != "member"
        }
        return Strip(self.member, **places)


def _are_cut_in_runs(cuts: Sequence[RowCut]) -> bool:
    return all(cut.shape and cut.dim == 0 for cut in cuts)


def strips_of_packing(packing: RowsPacking, columns: Span | None = None) -> list[Strip] | None:
    """Strips that cover these columns of the rows, by default all; None if not all parameters are cut along dim 0."""
    if not _are_cut_in_runs(packing.cuts):
        return None
    columns = columns or Span(0, packing.row_numel)
    order = sorted(
        (index for index in range(len(packing.cuts)) if packing.cuts[index].padded_numel),
        key=packing.starts.__getitem__,
    )
    ends = [packing.starts[index] for index in order[1:]] + [packing.row_numel]
    strips = []
    # One end too many where no parameter has elements.
    for index, end in zip(order, ends, strict=False):
        cut, begin = packing.cuts[index], packing.starts[index]
        start, stop = max(begin, columns.start), min(end, columns.stop)
        if start >= stop:
            continue
        skip = min(start - begin, cut.padded_numel)
        strips.append(
            Strip(
                member=index,
                start=start - columns.start,
                span=stop - start,
                width=min(cut.padded_numel - skip, stop - start),
                own=cut.padded_numel,
                numel=cut.numel,
                skip=skip,
            )
        )
    return strips


def strips_of_line(packing: FlatPacking, numels: Sequence[int]) -> list[Strip]:
    """Strips of rows that are the gradients end to end: one rank's share is all of it."""
    order = sorted((index for index in range(len(numels)) if numels[index]), key=packing.start)
    ends = [packing.start(index) for index in order[1:]] + [packing.world * packing.row_numel]
    strips = []
    # One end too many where no parameter has elements.
    for index, end in zip(order, ends, strict=False):
        start, numel = packing.start(index), numels[index]
        strips.append(Strip(index, start, end - start, width=numel, own=numel, numel=numel))
    return strips


def strips_of_layout(layout: RowsLayout) -> list[Strip] | None:
    """Strips of a gather's rows as they are sent, in bytes; None if not all parameters are cut along dim 0."""
    if not _are_cut_in_runs(layout.cuts):
        return None
    strips = []
    for segment in layout.segments:
        for index in segment.members:
            cut, size = layout.cuts[index], segment.sent_itemsize
            own = cut.padded_numel * size
            if own:
                strips.append(
                    Strip(
                        member=index,
                        start=layout.sent_starts_bytes[index],
                        span=own,
                        width=own,
                        own=own,
                        numel=cut.numel * size,
                        whole_start=layout.full_starts_bytes[index],
                    )
                )
    return strips
