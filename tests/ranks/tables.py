"""Tables of cases: runs many cases in one call of ranks, since starting ranks can take longer than a case.

Not every row is in `make test`, which tests each behaviour once; rows marked `slow` here test combinations.
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
    """Marks values of a parametrized test for `make test-slow`: other values test the same behaviour in `make test`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def cases_of(**choices: Sequence[Any]) -> list[Case]:
    """Returns all combinations of the choices, as keyword arguments."""
    return [dict(zip(choices, chosen, strict=True)) for chosen in product(*choices.values())]


def run_cases(
    fn: Callable[..., Result], world_size: int, cases: Sequence[Case], **options: Any
) -> list[list[Result]]:
    """Calls ``fn(**case)`` for one case after another on the same ranks; returns results by rank and case.

    A failure names its case and ends the call: later cases do not run.
    """
    return run_ranks(_in_turn, world_size, fn, cases, **options)


def _in_turn(fn: Callable[..., Result], cases: Sequence[Case]) -> list[Result]:
    results = []
    for case in cases:
        try:
            results.append(fn(**case))
        except Exception as error:
            given = ", ".join(f"{name}={value!r}" for name, value in case.items())
            # A RuntimeError, because that is how the loss of a peer, no error of this rank, is recognized.
            raise RuntimeError(f"with {given or 'no arguments'}: {type(error).__name__}: {error}") from error
    return results
