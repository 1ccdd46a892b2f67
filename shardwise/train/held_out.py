"""Chooses which samples are held out for evaluation, which depends on their number alone, never on a seed.

    everywhere   │······██·····│·██··········│···········██│ …    a block of each of up to 256 equal parts
    end          │····································█████│

A part of the data that stands for all of it, as the end of a text does not: it may be another kind of text. Blocks,
not single samples, because neighbours of a sample that is trained on are easier to predict than new text.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, pairwise

from shardwise.train.config import Place
from shardwise.train.sample_order import shuffled

__all__ = ["HeldOut"]

_MOST_BLOCKS = 256
_KEY = 0x5EED


class HeldOut:
    """Where the samples to train on and those held out lie in the data.

    Args:
        num_samples: the number of all samples.
        num_held_out: how many of them are held out, fewer than all.
        place: where they are held out.
    """

    def __init__(self, num_samples: int, num_held_out: int, place: Place) -> None:
        self._num_held_out, self._is_spread = num_held_out, place == "everywhere"
        num_blocks = min(_MOST_BLOCKS, num_held_out) if self._is_spread else 1
        # Rounded up: a part for each block has at least one held-out sample.
        ends = (
            [-(-num_samples * number // num_blocks) for number in range(num_blocks + 1)]
            if num_blocks
            else [0]
        )
        counts = [end * num_held_out // num_samples for end in ends]
        self._sizes = [end - begin for begin, end in pairwise(counts)]
        self._starts = [
            end - size - (shuffled(0, end - begin - size + 1, _KEY + number) if self._is_spread else 0)
            for number, (begin, end, size) in enumerate(zip(ends, ends[1:], self._sizes, strict=False))
        ]
        self._held_out_before = [0, *accumulate(self._sizes)]
        self._training_before = [
            start - before for start, before in zip(self._starts, self._held_out_before, strict=False)
        ]

    def training_place(self, number: int) -> int:
        """Returns which of all samples is the so many-th to train on."""
        return number + self._held_out_before[bisect_right(self._training_before, number)]

    def held_out_place(self, number: int) -> int:
        """Returns which of all samples is the so many-th held out; the first few are from all over the data, too."""
        if self._is_spread:
            number = shuffled(number, self._num_held_out, _KEY)
        block = bisect_right(self._held_out_before, number) - 1
        return self._starts[block] + number - self._held_out_before[block]
