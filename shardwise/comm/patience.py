"""Work that one rank does alone, and for which the others are to wait longer than usual.

    with patience(600):
        if rank == 0:
            evaluate(model)

From outside, a rank that works and one that is stuck look the same; only the program knows. What it says here goes to
the ranks that wait, with all else that the watch of this one says of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.errors import ConfigError

# What each thread asks for: ranks may be threads.
_asked: dict[int, float] = {}


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """While this rank is inside, those that wait for it do so for ``seconds`` more than ``timeout_seconds``.

    Whether it lives they still see: a rank that dies in here is named at once.
    """
    if not seconds > 0:
        raise ConfigError(
            f"patience of {seconds!r} seconds is none",
            where="patience(seconds)",
            fix="pass how long this rank may work alone, in seconds",
        )
    thread = threading.get_ident()
    outer = _asked.get(thread, 0.0)
    _asked[thread] = max(outer, seconds)
    try:
        yield
    finally:
        if outer:
            _asked[thread] = outer
        else:
            del _asked[thread]


def asked_by(thread: int) -> float:
    """How many seconds of patience the rank on this thread asks for now."""
    return _asked.get(thread, 0.0)
