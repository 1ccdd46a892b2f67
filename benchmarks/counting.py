"""How calls of methods are counted: each one's own time, without what it calls and without what counting costs."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable
from functools import wraps
from time import perf_counter_ns
from typing import Any, NamedTuple


class _Stack(threading.local):
    """Counted calls under way on this thread, each as the time and the number of counted calls inside it."""

    def __init__(self) -> None:
        self.open: list[list[int]] = []


_stack = _Stack()


class Counts(NamedTuple):
    """Calls of a method, counted calls that it made itself, and its own time without those."""

    calls: int
    inner_calls: int
    own_ns: int


class Counted:
    """A method, with its calls counted while it is open."""

    def __init__(self, kind: str, owner: type, name: str) -> None:
        self.kind, self.owner, self.name = kind, owner, name
        self._inherits = name not in vars(owner)
        self._function = getattr(owner, name)
        # Models bind methods when they are made, and hold some weakly: this one is theirs for good.
        self._call = self._counting(self._function)
        self.calls = self.inner_calls = self.own_ns = 0

    def open(self) -> None:
        self.calls = self.inner_calls = self.own_ns = 0
        setattr(self.owner, self.name, self._call)

    def counts(self) -> Counts:
        return Counts(self.calls, self.inner_calls, self.own_ns)

    def close(self) -> None:
        if self._inherits:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self._function)

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
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
    """What counting adds to a call, in ns: to its own time, and to that of whoever calls it."""

    inside: float
    outside: float

    def own_ns(self, counts: Counts) -> float:
        """A method's own time as it would have been without counting."""
        return counts.own_ns - counts.calls * self.inside - counts.inner_calls * self.outside


class _Nothing:
    def bare(self) -> None:
        pass

    def counted(self) -> None:
        pass


def counting_cost(batches: int = 200, calls: int = 100) -> Cost:
    """Measured on a method that does nothing, called by one that is counted itself."""
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
