"""Spans: half-open ranges of elements, and how a range is cut over ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """The elements ``start <= i < stop``."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def aligned(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return ceil_div(value, multiple) * multiple


def cut_evenly(size: int, world: int, rank: int) -> Span:
    """The part of ``size`` that falls to ``rank`` when every rank but the last ones takes the same ceiling share.

    This is what ``Shard`` means to a DTensor: 5 over 4 ranks is 2, 2, 1, 0.
    """
    share = ceil_div(size, world)
    start = min(rank * share, size)
    return Span(start, min(start + share, size))
