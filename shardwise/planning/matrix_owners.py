"""Owners of whole matrices: which rank steps which, when, and which bytes travel for it.

An optimizer that needs whole matrices steps each on one rank, its *owner*. Owners are chosen so that ranks have equal
work, not equal bytes. Matrices are stepped in rounds; in a round every owner steps a few, so that only a few whole
gradients exist at a time:

    round 0    rank 0  [ up.0   ]    rank 1  [ up.1   ]    rank 2  [ down.0 ]
    round 1    rank 0  [ query.0]    rank 1  [ query.1]    rank 2  [ key.0  ][ key.1 ]

In a round, each rank sends every owner its shards of that owner's matrices: one row per owner, all equally long.

Matrices are given by index. No torch: integers in, integers out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.planning.layout import SHARD_ALIGNMENT_BYTES, aligned, ceil_div

Shape = tuple[int, ...]


@dataclass(frozen=True)
class HeldBlock:
    """What a rank holds of a tensor: a rectangle of it, or with ``is_flat`` a span of its elements in order."""

    offsets: Shape
    sizes: Shape
    is_flat: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


# By rank, what it holds; None for a rank that does not have the parameter.
Held = Sequence[HeldBlock | None]


def matrix_work(shape: Shape) -> int:
    """The work of a step that multiplies a matrix with its own square, such as Newton-Schulz.

    A tensor of more than two dims counts as the matrix of its first dim and all others. One of fewer is element-wise.
    """
    if len(shape) < 2:
        return math.prod(shape)
    rows, columns = shape[0], math.prod(shape[1:])
    short, long = sorted((rows, columns))
    return short * short * (short + 2 * long) + rows * columns


def plan_owners(works: Sequence[int], held: Sequence[Held], loads: Sequence[int]) -> list[int]:
    """Assigns matrices, most work first, each to the rank with the least.

    Args:
        works: the work of each matrix.
        held: for each matrix what the ranks hold. Of equally loaded ranks, the one that holds most of it gets it.
        loads: the work that each rank has already.

    Returns:
        The owner of each matrix: one of the ranks that have the parameter. Every rank computes the same.
    """
    running = list(loads)
    owners = [0] * len(works)
    for index in sorted(range(len(works)), key=lambda index: -works[index]):
        holders = [
            (running[rank], -block.numel, rank) for rank, block in enumerate(held[index]) if block is not None
        ]
        owner = min(holders)[2]
        owners[index] = owner
        running[owner] += works[index]
    return owners


def plan_rounds(
    owners: Sequence[int], numels: Sequence[int], world: int, matrices_a_round: int
) -> list[list[int]]:
    """Divides matrices into rounds, in each at most ``matrices_a_round`` of each owner; large ones meet large ones.

    If one round is shorter, it is the first: nothing is stepped before that has arrived.
    """
    queues: list[list[int]] = [[] for _ in range(world)]
    for index in sorted(range(len(owners)), key=lambda index: -numels[index]):
        queues[owners[index]].append(index)
    longest = max(map(len, queues), default=0)
    ends = range(longest % matrices_a_round or matrices_a_round, longest + 1, matrices_a_round)
    return [
        [index for queue in queues for index in queue[max(0, end - matrices_a_round) : end]] for end in ends
    ]


def padding(owners: Sequence[int], numels: Sequence[int], world: int) -> float:
    """How much longer rows of equal length, one for each owner, are than the matrices in them; 1 if none is padded."""
    ends = [0] * world
    for owner, numel in zip(owners, numels, strict=True):
        ends[owner] += numel
    return world * max(ends) / max(1, sum(ends))


def senders(held: Held, owner: int) -> list[int]:
    """The ranks that send the owner their block: one for each block, the owner itself or else the nearest rank."""
    nearest: dict[tuple[Shape, Shape], int] = {}
    for rank, block in enumerate(held):
        if block is None or not block.numel:
            continue
        key = (block.offsets, block.sizes)
        if key not in nearest or abs(rank - owner) < abs(nearest[key] - owner):
            nearest[key] = rank
    return sorted(nearest.values())


def is_complete(shape: Shape, held: Held) -> bool:
    """Whether the ranks hold every element of a tensor, in blocks that are equal or do not overlap."""
    sent = [block for rank in senders(held, 0) if (block := held[rank]) is not None]
    return sum(block.numel for block in sent) == math.prod(shape)


def rows_fit(num_rows: int, world: int, rows_together: int) -> bool:
    """Whether ranks that hold equal shares of a matrix's rows each have whole bands of ``rows_together`` rows.

    Every rank has some; and what is kept once a band is cut at the same places as the rows.
    """
    share = ceil_div(num_rows, world)
    share_of_bands = ceil_div(ceil_div(num_rows, rows_together), world)
    return (world - 1) * share < num_rows and (world == 1 or share == share_of_bands * rows_together)


class Message(NamedTuple):
    """A block that travels: of which matrix, from and to which rank, and where it starts in the row, in bytes."""

    matrix: int
    source: int
    target: int
    start_bytes: int


@dataclass(frozen=True)
class RowsPlan:
    """Rows that every rank sends to every rank, all of ``row_bytes``, and what is in them."""

    row_bytes: int
    messages: tuple[Message, ...]


def plan_messages(routes: Iterable[tuple[int, int, int, int]], world: int) -> RowsPlan:
    """Lays out what ranks send each other; a block that its own rank needs does not travel.

    Args:
        routes: matrix, source, target and bytes of each block.
        world: how many ranks.
    """
    ends = [[0] * world for _ in range(world)]
    messages = []
    for index, source, target, num_bytes in routes:
        if source == target or not num_bytes:
            continue
        start = aligned(ends[source][target], SHARD_ALIGNMENT_BYTES)
        messages.append(Message(index, source, target, start))
        ends[source][target] = start + num_bytes
    longest = max((end for row in ends for end in row), default=0)
    return RowsPlan(aligned(longest, SHARD_ALIGNMENT_BYTES), tuple(messages))
