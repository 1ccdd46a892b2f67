"""Column blocks: one parameter's columns in the rows of all ranks, in the few numbers that our CUDA kernels take.

Only for parameters cut along dim 0, whose shards are contiguous. '.' is padding, always zero:

    rank 0   | a0 a1 | b0 . |        A: start 0, length 2, filled 2, shard 2, numel 4
    rank 1   | a2 a3 | b1 . |        B: start 2, length 2, filled 1, shard 1, numel 2

In a slice (``planning/slices``) the first ``skip`` elements of each shard lie in earlier columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from shardwise.planning.flat import FlatPacking
from shardwise.planning.layout import Span
from shardwise.planning.rows import RowCut, RowsLayout, RowsPacking


@dataclasses.dataclass(frozen=True)
class ColumnBlock:
    """One parameter's columns in the rows; all numbers in elements, or all in bytes.

    The block has ``length`` columns from ``start`` on: the parameter fills at most ``filled`` of them, zeros the rest.
    Rank r's shard begins at ``r * shard`` of the parameter's ``numel`` elements, which begin at ``full_start``.
    """

    member: int
    start: int
    length: int
    filled: int
    shard: int
    numel: int
    skip: int = 0
    full_start: int = 0

    def scaled(self, itemsize: int) -> ColumnBlock:
        """The same block in bytes."""
        numbers = {
            name: value * itemsize for name, value in dataclasses.asdict(self).items() if name != "member"
        }
        return ColumnBlock(self.member, **numbers)


def _are_cut_along_dim_0(cuts: Sequence[RowCut]) -> bool:
    return all(cut.shape and cut.dim == 0 for cut in cuts)


def column_blocks_of_packing(packing: RowsPacking, columns: Span | None = None) -> list[ColumnBlock] | None:
    """The blocks that cover these columns, by default all; None if not all parameters are cut along dim 0."""
    if not _are_cut_along_dim_0(packing.cuts):
        return None
    columns = columns or Span(0, packing.row_numel)
    order = sorted(
        (index for index in range(len(packing.cuts)) if packing.cuts[index].padded_numel),
        key=packing.starts.__getitem__,
    )
    ends = [packing.starts[index] for index in order[1:]] + [packing.row_numel]
    blocks = []
    # One end too many where no parameter has elements.
    for index, end in zip(order, ends, strict=False):
        cut, begin = packing.cuts[index], packing.starts[index]
        start, stop = max(begin, columns.start), min(end, columns.stop)
        if start >= stop:
            continue
        skip = min(start - begin, cut.padded_numel)
        blocks.append(
            ColumnBlock(
                member=index,
                start=start - columns.start,
                length=stop - start,
                filled=min(cut.padded_numel - skip, stop - start),
                shard=cut.padded_numel,
                numel=cut.numel,
                skip=skip,
            )
        )
    return blocks


def column_blocks_of_flat_packing(packing: FlatPacking, numels: Sequence[int]) -> list[ColumnBlock]:
    """The blocks of a contiguous packing, taken as one row that holds every gradient whole."""
    order = sorted((index for index in range(len(numels)) if numels[index]), key=packing.start)
    ends = [packing.start(index) for index in order[1:]] + [packing.world * packing.row_numel]
    blocks = []
    # One end too many where no parameter has elements.
    for index, end in zip(order, ends, strict=False):
        start, numel = packing.start(index), numels[index]
        blocks.append(ColumnBlock(index, start, end - start, filled=numel, shard=numel, numel=numel))
    return blocks


def column_blocks_of_layout(layout: RowsLayout) -> list[ColumnBlock] | None:
    """The blocks of a gather's rows as sent, in bytes; None if not all parameters are cut along dim 0."""
    if not _are_cut_along_dim_0(layout.cuts):
        return None
    blocks = []
    for segment in layout.segments:
        for index in segment.members:
            cut, size = layout.cuts[index], segment.sent_itemsize
            shard_bytes = cut.padded_numel * size
            if shard_bytes:
                blocks.append(
                    ColumnBlock(
                        member=index,
                        start=layout.sent_starts_bytes[index],
                        length=shard_bytes,
                        filled=shard_bytes,
                        shard=shard_bytes,
                        numel=cut.numel * size,
                        full_start=layout.full_starts_bytes[index],
                    )
                )
    return blocks
