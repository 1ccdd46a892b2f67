"""The ``flat`` layout: a unit's parameters end to end, cut evenly over ranks wherever the cuts may fall.

Take parameters A (5 elements) and B (4) over 2 ranks. They stand in one line, and each rank holds its share of it:

    full     | A0 A1 A2 A3 A4 | B0 B1 B2 B3 | . |        '.' is padding, always zero
    rank 0   | A0 A1 A2 A3 A4 |
    rank 1                    | B0 B1 B2 B3 . |

So a rank may hold all of one parameter and nothing of another, and the rows of all ranks, end to end, are the full
parameters: a gather has nothing to copy out. Parameters of one kind make one line, a *segment*. With several segments a
row holds a share of each, and one block a segment is copied out.

A reduce takes whole segments, cut alike. Where only some parameters of a segment are trained, rows hold what each rank
has of those and nothing else.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod

from shardwise.plan.layout import ALIGNMENT_BYTES, Pad, Piece, RowParam, Section, Segment
from shardwise.plan.spans import Span, aligned, ceil_div

# In elements: every cut is a multiple of it, so that a part is aligned to at least 16 bytes, whatever its dtype.
GRID = 16


@dataclass(frozen=True)
class FlatLayout:
    """A segment's ``starts`` are places in its line, its ``numel`` is the share of one rank."""

    world: int
    numels: tuple[int, ...]
    segments: tuple[Segment, ...]
    stored_bytes: int
    sent_bytes: int
    full_starts_bytes: tuple[int, ...]
    full_bytes: int
    places: tuple[tuple[int, int], ...]

    @property
    def is_in_place(self) -> bool:
        return len(self.segments) == 1

    def own_span(self, index: int, rank: int) -> Span:
        """What a rank holds of a parameter, in the parameter's own elements; it may be nothing."""
        number, start = self.places[index]
        share, numel = self.segments[number].numel, self.numels[index]
        first = min(max(rank * share - start, 0), numel)
        return Span(first, max(first, min((rank + 1) * share - start, numel)))

    def own_start(self, index: int, rank: int) -> int:
        """Where that part stands in the rank's share of the segment."""
        number, start = self.places[index]
        share = self.segments[number].numel
        return min(max(start - rank * share, 0), share)

    def own_shape(self, index: int, rank: int) -> tuple[int, ...]:
        return (self.own_span(index, rank).numel,)

    def own_start_bytes(self, index: int, rank: int) -> int:
        segment = self.segments[self.places[index][0]]
        return segment.stored_start_bytes + self.own_start(index, rank) * segment.stored_itemsize

    def shares(self) -> None:
        return None

    def copy_out(self) -> list[tuple[Segment, Piece]]:
        if self.is_in_place:
            return []
        found = []
        full_start_bytes = 0
        for segment in self.segments:
            share, size = segment.numel, segment.sent_itemsize
            piece = Piece(
                (self.world, share),
                full_start_bytes // size,
                (share, 1),
                segment.sent_start_bytes // size,
                (self.sent_bytes // size, 1),
            )
            found.append((segment, piece))
            full_start_bytes += self.world * share * size
        return found


def plan_flat(params: Sequence[RowParam], world: int) -> FlatLayout:
    """Lines up a unit's parameters, those of one kind together, in the order in which they come."""
    numels = tuple(prod(param.shape) for param in params)
    members_by_kind: dict[Hashable, list[int]] = {}
    for index, param in enumerate(params):
        members_by_kind.setdefault(param.kind, []).append(index)

    segments: list[Segment] = []
    places = [(0, 0)] * len(params)
    full_starts = [0] * len(params)
    stored_end = sent_end = full_end = 0
    for kind, members in members_by_kind.items():
        stored_itemsize, sent_itemsize = params[members[0]].stored_itemsize, params[members[0]].sent_itemsize
        # Modules use whole parameters where they stand in the line, so each is aligned there.
        grid = max(GRID, ALIGNMENT_BYTES // sent_itemsize)
        starts: list[int] = []
        end = 0
        for index in members:
            starts.append(end)
            places[index] = (len(segments), end)
            full_starts[index] = full_end + end * sent_itemsize
            end = aligned(end + numels[index], grid)
        share = max(grid, aligned(ceil_div(end, world), grid))
        segments.append(
            Segment(
                kind,
                tuple(members),
                tuple(starts),
                share,
                stored_itemsize,
                sent_itemsize,
                stored_end,
                sent_end,
            )
        )
        stored_end += share * stored_itemsize
        sent_end += share * sent_itemsize
        full_end += world * share * sent_itemsize
    return FlatLayout(
        world, numels, tuple(segments), stored_end, sent_end, tuple(full_starts), full_end, tuple(places)
    )


class FlatPacking:
    """Gradients of some parameters of a flat layout, in rows that are cut where the parameters are cut."""

    def __init__(self, layout: FlatLayout, indices: Sequence[int]) -> None:
        self.world = layout.world
        self._layout = layout
        self._indices = tuple(indices)
        numbers = {index: number for number, index in enumerate(indices)}
        sections: list[Section] = []
        self._section_of: dict[int, Section] = {}
        # Where a rank's part of a parameter stands in its section, for sections that lack some parameters.
        self._moved: dict[int, dict[int, int]] = {}
        self._gaps: list[tuple[Section, Segment]] = []
        end = 0
        for segment in layout.segments:
            members = [index for index in segment.members if index in numbers]
            if not members:
                continue
            is_whole = len(members) == len(segment.members)
            numel = segment.numel if is_whole else self._move_together(members)
            section = Section(end, numel, tuple(numbers[index] for index in members))
            sections.append(section)
            self._section_of.update(dict.fromkeys(section.members, section))
            if is_whole:
                self._gaps.append((section, segment))
            end += numel
        self.sections = tuple(sections)
        self.row_numel = end

    def _move_together(self, members: list[int]) -> int:
        """Lines up what each rank has of these parameters; returns the length that suffices for every rank."""
        ends: dict[int, int] = {}
        for index in members:
            starts = self._moved[index] = {}
            for rank in self._holders(*self._extent(index)):
                starts[rank] = ends.get(rank, 0)
                ends[rank] = starts[rank] + aligned(self._layout.own_span(index, rank).numel, GRID)
        return max(ends.values(), default=GRID)

    def _extent(self, index: int) -> tuple[int, int, int]:
        """A parameter's place and length in its line, and a rank's share of that line."""
        number, start = self._layout.places[index]
        return start, self._layout.numels[index], self._layout.segments[number].numel

    @staticmethod
    def _holders(start: int, numel: int, share: int) -> range:
        """The ranks that hold elements of a part of a line."""
        return range(start // share, ceil_div(start + numel, share)) if numel else range(0)

    @property
    def is_line(self) -> bool:
        """Whether the rows of all ranks, end to end, are all gradients end to end."""
        return len(self.sections) == 1 and not self._moved

    def start(self, index: int) -> int:
        """Where a gradient stands in the line."""
        return self._layout.places[self._indices[index]][1]

    def own_shape(self, index: int, rank: int) -> tuple[int, ...]:
        return self._layout.own_shape(self._indices[index], rank)

    def own_start(self, index: int, rank: int) -> int:
        param = self._indices[index]
        if param in self._moved:
            return self._moved[param].get(rank, 0)
        return self._layout.own_start(param, rank)

    def pieces(self, index: int) -> list[Piece]:
        """At most three: on the first rank that has some, on those that have nothing else, and on the last."""
        param, section = self._indices[index], self._section_of[index]
        if self.is_line:
            start, numel, _ = self._extent(param)
            return [Piece((numel,), 0, (1,), start, (1,))] if numel else []
        return self._blocks(*self._extent(param), section, self._moved.get(param))

    def _blocks(
        self, start: int, numel: int, share: int, section: Section, moved: dict[int, int] | None
    ) -> list[Piece]:
        ranks = self._holders(start, numel, share)
        blocks = []
        for rank in sorted({ranks[0], ranks[-1]}) if ranks else ():
            first, stop = max(start, rank * share), min(start + numel, (rank + 1) * share)
            own = first - rank * share if moved is None else moved[rank]
            packed_start = rank * self.row_numel + section.start + own
            blocks.append(Piece((stop - first,), first - start, (1,), packed_start, (1,)))
        if len(ranks) > 2:
            first_rank = ranks[1]
            packed_start = first_rank * self.row_numel + section.start
            blocks.append(
                Piece(
                    (len(ranks) - 2, share),
                    first_rank * share - start,
                    (share, 1),
                    packed_start,
                    (self.row_numel, 1),
                )
            )
        return blocks

    def pads(self) -> list[Pad]:
        pads = []
        for section, segment in self._gaps:
            ends = [*segment.starts[1:], self.world * segment.numel]
            for index, start, end in zip(segment.members, segment.starts, ends, strict=True):
                gap = start + self._layout.numels[index]
                if gap == end:
                    continue
                if self.is_line:
                    pads.append(Pad((end - gap,), gap, (1,)))
                    continue
                pads += [
                    Pad(piece.shape, piece.packed_start, piece.packed_strides)
                    for piece in self._blocks(gap, end - gap, segment.numel, section, None)
                ]
        # Ranks differ in what they have of a section that lacks some: all of it is blank before parts are copied in.
        for section in self.sections:
            if any(self._indices[index] in self._moved for index in section.members):
                pads.append(Pad((self.world, section.numel), section.start, (self.row_numel, 1)))
        return pads
