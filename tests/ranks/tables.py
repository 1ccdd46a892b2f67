"""Tables of cases: one call of ranks for all of a kind, since starting ranks can take longer than a case.

Not every row is in `make test`: it has each behaviour once, and what is `slow` here combines them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, TypeVar

import pytest

from shardwise.testing import run_ranks

Result = TypeVar("Result")
Case = Mapping[str, Any]


def slow(*values: Any) -> Any:
    """Values of a parametrized test that `make test-slow` runs: others hold the same behaviour in `make test`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def cases_of(**choices: Sequence[Any]) -> list[Case]:
    """Every combination of the choices, as keyword arguments."""
    return [dict(zip(choices, chosen, strict=True)) for chosen in product(*choices.values())]


def run_cases(
    fn: Callable[..., Result], world_size: int, cases: Sequence[Case], **options: Any
) -> list[list[Result]]:
    """Calls ``fn(**case)`` for one case after another, on ranks that stay; results by rank and case.

    A failure says which case it was, and ends the call: what came after it was not judged.
    """
    return run_ranks(_in_turn, world_size, fn, cases, **options)


def _in_turn(fn: Callable[..., Result], cases: Sequence[Case]) -> list[Result]:
    results = []
    for case in cases:
        try:
            results.append(fn(**case))
        except Exception as error:
            given = ", ".join(f"{name}={value!r}" for name, value in case.items())
            # As a RuntimeError, because by that the loss of a peer, which is no fault of this rank, is known.
            raise RuntimeError(f"with {given or 'no arguments'}: {type(error).__name__}: {error}") from error
    return results
