"""Decides which sample is used when: every rank computes the same shuffled order, at any position, without a list.

    position ──▶ epoch, index ──Feistel network keyed by seed and epoch──▶ sample

A step's batch is a range of positions, divided among ranks and micro-batches. So one number is enough to resume at
the exact sample, the order does not depend on the number of ranks, and a billion samples take no memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.planning.sums import is_power_of_two
from shardwise.train.config import Training
from shardwise.train.records import counted

__all__ = ["Mix", "SampleOrder", "plan_order", "shuffled"]

_MASK = (1 << 64) - 1


def _hash64(value: int) -> int:
    """Hashes 64 bits with splitmix64."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def shuffled(index: int, length: int, key: int) -> int:
    """Returns where ``index`` goes in the permutation of ``range(length)`` that belongs to ``key``."""
    if length < 2:
        return index
    half_bits = max(1, ((length - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    keys = [_hash64(key + number) for number in range(4)]
    while True:
        left, right = index >> half_bits, index & mask
        for round_key in keys:
            left, right = right, left ^ (_hash64(right ^ round_key) & mask)
        index = (left << half_bits) | right
        # The network permutes a power of 4; repeating it until the index is in range permutes the range.
        if index < length:
            return index


_BLOCK = 4096


@dataclass(frozen=True)
class Mix:
    """Draws from several sources by weight: every block of 4096 draws has each source's exact part, in shuffled order.

    Which source a draw is from, and which of that source's draws it is, follows from its position alone.

    Args:
        sizes: the number of training samples of each source.
        counts: the draws of each source in a block.
    """

    sizes: tuple[int, ...]
    counts: tuple[int, ...]

    @staticmethod
    def of(sizes: Sequence[int], weights: Sequence[float]) -> Mix:
        """Returns the mix whose counts are nearest to the weights.

        Raises:
            ConfigError: a weight is so small that its source would never be drawn from.
        """
        exact = [weight / sum(weights) * _BLOCK for weight in weights]
        counts = [math.floor(part) for part in exact]
        largest_remainders = sorted(range(len(exact)), key=lambda number: counts[number] - exact[number])
        for number in largest_remainders[: _BLOCK - sum(counts)]:
            counts[number] += 1
        if 0 in counts:
            raise ConfigError(
                f"source {counts.index(0) + 1} has less than 1/{_BLOCK} of the weight",
                where="data.sources",
                fix="raise its weight, or leave it out",
            )
        return Mix(tuple(sizes), tuple(counts))

    def draw(self, position: int, seed: int) -> tuple[int, int]:
        """Returns the source of a draw, and which of its draws it is."""
        block, offset = divmod(position, _BLOCK)
        place = shuffled(offset, _BLOCK, _hash64(seed * 0x20003 + block))
        for source, count in enumerate(self.counts):
            if place < count:
                return source, block * count + place
            place -= count
        raise AssertionError("counts sum to the block's length")


@dataclass(frozen=True)
class SampleOrder:
    """The samples of each micro-batch on each rank.

    Args:
        num_samples: the number of samples in an epoch.
        batch_size: sequences per step, over all ranks.
        world_size: the number of ranks.
        accumulate: micro-batches per rank and step.
        seed: the seed of the shuffle; None keeps the order of the data.
        is_round_robin: ranks take micro-batches in turn, as exact sums need; otherwise each takes consecutive ones.
        mix: how to draw from several sources, whose samples are numbered one after the other.
    """

    num_samples: int
    batch_size: int
    world_size: int = 1
    accumulate: int = 1
    seed: int | None = 0
    is_round_robin: bool = False
    mix: Mix | None = None

    def __post_init__(self) -> None:
        pieces = self.world_size * self.accumulate
        if self.batch_size % pieces:
            near = max(1, round(self.batch_size / pieces)) * pieces
            raise ConfigError(
                f"a batch of {counted(self.batch_size, 'sequence')} cannot be divided among "
                f"{counted(self.world_size, 'rank')} with "
                f"{counted(self.accumulate, 'micro-batch', 'micro-batches')} each",
                where="train.batch_size",
                fix=f"use a multiple of {pieces}, such as {near}",
            )

    @property
    def micro_batch_size(self) -> int:
        return self.batch_size // (self.world_size * self.accumulate)

    def micro_batch_index(self, rank: int, micro_batch: int) -> int:
        """Returns the index, among all micro-batches of a step, of one micro-batch of a rank."""
        if self.is_round_robin:
            return micro_batch * self.world_size + rank
        return rank * self.accumulate + micro_batch

    def samples(self, samples_seen: int, rank: int, micro_batch: int) -> Sequence[int]:
        """Returns the samples of one micro-batch of the step that begins after ``samples_seen``."""
        start = samples_seen + self.micro_batch_index(rank, micro_batch) * self.micro_batch_size
        return [self.sample(position) for position in range(start, start + self.micro_batch_size)]

    def sample(self, position: int) -> int:
        """Returns the sample at a position of the run."""
        if self.mix is None:
            return self._shuffled(position, self.num_samples, 0)
        source, number = self.mix.draw(position, self.seed or 0)
        return sum(self.mix.sizes[:source]) + self._shuffled(number, self.mix.sizes[source], source)

    def _shuffled(self, position: int, num_samples: int, source: int) -> int:
        epoch, index = divmod(position, num_samples)
        if self.seed is None:
            return index
        return shuffled(index, num_samples, _hash64(self.seed * 0x10001 + epoch + (source << 32)))


def plan_order(
    num_samples: int, train: Training, world_size: int, seed: int | None, mix: Mix | None = None
) -> SampleOrder:
    """Returns the sample order of a run; with exact sums, ranks divide a fixed number of micro-batches."""
    exact = train.exact_micro_batches
    if not exact:
        return SampleOrder(num_samples, train.batch_size, world_size, train.accumulate, seed, mix=mix)
    if not is_power_of_two(world_size) or exact % world_size:
        raise ConfigError(
            f"{counted(exact, 'micro-batch', 'micro-batches')} cannot be summed exactly on "
            f"{counted(world_size, 'rank')}",
            where="train.exact_micro_batches",
            fix="use 1, 2, 4, 8, ... ranks, and a number of micro-batches that they divide",
        )
    return SampleOrder(
        num_samples, train.batch_size, world_size, exact // world_size, seed, is_round_robin=True, mix=mix
    )
