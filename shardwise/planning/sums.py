"""How gradients are summed: the order of exact sums, and how a sum becomes an average in a dtype of limited range.

Exact sums are a binary tree over terms that arrive one after another:

    terms    0   1   2   3   4   5   6
              ╲ ╱     ╲ ╱     ╲ ╱    │        subtrees of 2
                ╲     ╱        │     │        subtrees of 4
                   ╲───────────┴──╱──╯        the rest, smallest subtree first

Subtrees are aligned: terms 2k and 2k+1 are added, then their sum and its neighbour's. So if an aligned subtree is
summed elsewhere (over the ranks of a job, each with one term) and handed in as one term, the additions and their order
are the same: with 8 terms it does not matter whether 1, 2, 4 or 8 ranks hold them. As in a binary counter, at most one
subtree of each size waits for its neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Term = TypeVar("Term")
Add = Callable[[Term, Term], Term]


def is_power_of_two(number: float) -> bool:
    """Whether multiplying and dividing by ``number`` never rounds."""
    if not 0.0 < number < float("inf"):
        return False
    numerator, denominator = float(number).as_integer_ratio()
    return (numerator & (numerator - 1)) == 0 and (denominator & (denominator - 1)) == 0


def with_term(subtrees: Sequence[Term], count: int, term: Term, add: Add[Term]) -> tuple[Term, ...]:
    """Adds a term to the subtrees of the first ``count`` terms; returns the new subtrees, largest first."""
    waiting = list(subtrees)
    # Each low bit of the count that is set is a subtree as large as the one that has just become complete.
    while count & 1:
        term = add(waiting.pop(), term)
        count >>= 1
    return (*waiting, term)


def total(subtrees: Sequence[Term], add: Add[Term]) -> Term:
    """The sum of all subtrees, the smallest two first."""
    *waiting, result = subtrees
    while waiting:
        result = add(waiting.pop(), result)
    return result


def tree_sum(terms: Iterable[Term], add: Add[Term]) -> Term:
    """The sum of all terms; holds no more of them at once than the tree is high."""
    subtrees: tuple[Term, ...] = ()
    for count, term in enumerate(terms):
        subtrees = with_term(subtrees, count, term, add)
    return total(subtrees, add)


@dataclass(frozen=True)
class Division:
    """Divide by ``before``, reduce (averaging if the group does it), divide by ``after``."""

    before: float
    after: float
    group_averages: bool


def plan_division(
    world: int, narrow_range: bool, group_averages: bool, factor: float | None = None
) -> Division:
    """Splits the division by ``factor`` (by default the world size) into one before and one after the sum.

    In a dtype of wide range all of it comes after the sum, on a shard instead of the full gradient. In fp16 the sum
    over many ranks could overflow, and dividing by the whole world first could underflow: half goes to each side.
    """
    if narrow_range:
        divisor = float(world) if factor is None else factor
        before = 1.0
        while divisor / (before * 2) >= before * 2:
            before *= 2
        return Division(before, divisor / before, group_averages=False)
    if factor is None and group_averages:
        return Division(1.0, 1.0, group_averages=True)
    return Division(1.0, float(world) if factor is None else factor, group_averages=False)
