"""Which roots begin a forward on this thread, while somebody asks: a recorded step must know every root in it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Collecting(threading.local):
    roots: list[Any] | None = None


_collecting = _Collecting()


@contextmanager
def collect_roots(roots: list[Any]) -> Iterator[None]:
    """Within it, adds each root whose forward begins on this thread to ``roots``, in order."""
    outer, _collecting.roots = _collecting.roots, roots
    try:
        yield
    finally:
        _collecting.roots = outer


def note_begun(root: Any) -> None:
    """A forward of ``root`` begins."""
    roots = _collecting.roots
    if roots is not None and root not in roots:
        roots.append(root)
