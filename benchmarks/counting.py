"""Temporarily replaces methods, to find out what they cost.

A counted method's own time is measured, without the counted methods it calls and without the cost of counting. A
stilled method does nothing; the time a step saves is the method's own time and that of its side effects.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable
from functools import wraps
from time import perf_counter_ns
from typing import Any, NamedTuple


class _Stack(threading.local):
    """Counted calls in progress on this thread: for each, the time and the number of counted calls inside it."""

    def __init__(self) -> None:
        self.open: list[list[int]] = []


_stack = _Stack()


class Counts(NamedTuple):
    """The calls of a method, the counted calls it made itself, and its own time without those."""

    calls: int
    inner_calls: int
    own_ns: int


class Replaced:
    """A method and its replacement, which is called instead between ``open`` and ``close``."""

    def __init__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name
        self._inherits = name not in vars(owner)
        self._function = getattr(owner, name)
        # Models bind methods when they are built, and hold some by weak references: keep this one alive.
        self._call = self._replacement(self._function)

    def open(self) -> None:
        setattr(self.owner, self.name, self._call)

    def close(self) -> None:
        if self._inherits:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self._function)

    def _replacement(self, function: Callable[..., Any]) -> Callable[..., Any]:
        raise NotImplementedError


class Stilled(Replaced):
    """A method that does nothing and returns ``result`` while ``is_still`` is true."""

    def __init__(self, owner: type, name: str, result: object) -> None:
        self.is_still = False
        self._result = result
        super().__init__(owner, name)

    def _replacement(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._result if self.is_still else function(*args, **kwargs)

        return call


class Counted(Replaced):
    """A method whose calls are counted and timed while it is open."""

    def __init__(self, kind: str, owner: type, name: str) -> None:
        self.kind = kind
        self.calls = self.inner_calls = self.own_ns = 0
        super().__init__(owner, name)

    def open(self) -> None:
        self.calls = self.inner_calls = self.own_ns = 0
        super().open()

    def counts(self) -> Counts:
        return Counts(self.calls, self.inner_calls, self.own_ns)

    def _replacement(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            inner = [0, 0]
            calls = _stack.open
            calls.append(inner)
            start = perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                taken = perf_counter_ns() - start
                calls.pop()
                if calls:
                    outer = calls[-1]
                    outer[0] += taken
                    outer[1] += 1
                self.calls += 1
                self.inner_calls += inner[1]
                self.own_ns += taken - inner[0]

        return call


class Cost(NamedTuple):
    """What counting adds to a call, in ns: to the method's own time, and to its caller's."""

    inside: float
    outside: float

    def own_ns(self, counts: Counts) -> float:
        """Returns a method's own time minus the cost of counting."""
        return counts.own_ns - counts.calls * self.inside - counts.inner_calls * self.outside


class _Nothing:
    def bare(self) -> None:
        pass

    def counted(self) -> None:
        pass


def counting_cost(batches: int = 200, calls: int = 100) -> Cost:
    """Measures the cost of counting on a method that does nothing, as if called from a counted method."""
    method, nothing, costs = Counted("", _Nothing, "counted"), _Nothing(), []
    _stack.open.append([0, 0])
    for _ in range(batches):
        method.open()
        begin = perf_counter_ns()
        for _ in range(calls):
            nothing.bare()
        middle = perf_counter_ns()
        for _ in range(calls):
            nothing.counted()
        bare, whole = middle - begin, perf_counter_ns() - middle
        method.close()
        costs.append(Cost((method.own_ns - bare) / calls, (whole - method.own_ns) / calls))
    _stack.open.pop()
    return Cost(*(statistics.median(column) for column in zip(*costs, strict=True)))
