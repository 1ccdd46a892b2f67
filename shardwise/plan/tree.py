"""The order in which exact sums are made: a binary tree over terms that come one after another.

    terms    0   1   2   3   4   5   6
              ╲ ╱     ╲ ╱     ╲ ╱    │        blocks of 2
                ╲     ╱        │     │        blocks of 4
                   ╲───────────┴──╱──╯        the rest, smallest block first

Blocks are aligned: terms 2k and 2k+1 meet, then their sum meets its neighbour's. So whoever sums an aligned block of
terms elsewhere (the ranks of a job, each with one term) and hands in the block as one term comes to the same sum, in
the same order: with 8 terms it does not matter whether 1, 2, 4 or 8 ranks hold them. As in a binary counter, at most
one block of each size waits for its neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Term = TypeVar("Term")
Add = Callable[[Term, Term], Term]


def is_power_of_two(number: float) -> bool:
    """Whether multiplying and dividing by it rounds nothing."""
    if not 0.0 < number < float("inf"):
        return False
    numerator, denominator = float(number).as_integer_ratio()
    return (numerator & (numerator - 1)) == 0 and (denominator & (denominator - 1)) == 0


def with_term(blocks: Sequence[Term], count: int, term: Term, add: Add[Term]) -> tuple[Term, ...]:
    """The blocks, largest first, of the first ``count`` terms and one more."""
    waiting = list(blocks)
    # Each low bit of the count that is set is a block as large as the one that has just become complete.
    while count & 1:
        term = add(waiting.pop(), term)
        count >>= 1
    return (*waiting, term)


def total(blocks: Sequence[Term], add: Add[Term]) -> Term:
    """The sum of all blocks, the smallest two first."""
    *waiting, result = blocks
    while waiting:
        result = add(waiting.pop(), result)
    return result


def tree_sum(terms: Iterable[Term], add: Add[Term]) -> Term:
    """The sum of all terms; no more of them are held at once than the tree is high."""
    blocks: tuple[Term, ...] = ()
    for count, term in enumerate(terms):
        blocks = with_term(blocks, count, term, add)
    return total(blocks, add)
