"""Reproducible random choices: the same for a seed on any version of Python, in any process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_MASK = (1 << 64) - 1


class Dice:
    """A splitmix64 generator. `random.Random` does not promise the same choices in every version of Python."""

    def __init__(self, *seeds: int) -> None:
        self._state = 0
        for seed in seeds:
            self._state = self._mixed(self._state ^ (seed & _MASK))

    @staticmethod
    def _mixed(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        return value ^ (value >> 31)

    def below(self, count: int) -> int:
        """Returns an integer from 0 to `count - 1`."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        return self._mixed(self._state) % count

    def between(self, low: int, high: int) -> int:
        """Returns an integer from `low` to `high`, both included."""
        return low + self.below(high - low + 1)

    def chance(self, percent: int) -> bool:
        return self.below(100) < percent

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def weighted(self, options: Sequence[tuple[int, T]]) -> T:
        """Returns one of the options, with a probability proportional to its weight."""
        rest = self.below(sum(weight for weight, _ in options))
        for weight, option in options:
            rest -= weight
            if rest < 0:
                return option
        raise AssertionError("the weights do not add up")

    def some(self, options: Sequence[T], percent: int) -> list[T]:
        """Returns a random subset, in order, that contains each option with this probability."""
        return [option for option in options if self.chance(percent)]

    def split(self, number: int) -> Dice:
        """Returns separate dice for one part, so that one part's choices do not change those of others."""
        return Dice(self._state, number)
