"""A path: what this rank did on one group, as one number and as its last events.

Each collective is an event with a code, made once from its words. The digest mixes the codes of all events in their
order: ranks with equal digests did the same things. An *epoch* is the time between two failures: after one that was
caught, all ranks begin a new path, and nothing of the old one can be taken for the new one's.

    digest   d0 ──code a──▶ d1 ──code b──▶ d2        ring   [..., (1, a, t), (2, b, t)]
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_MASK = (1 << 61) - 1
_MIX = 0x9E3779B97F4A7C1
_LENGTH = 4096
# How many names of a list are told; the first two of a longer one.
_LISTED = 4

# Of the whole process, and only ever added to: the same words have the same code everywhere.
_words: dict[int, str] = {}


def collective_code(words: str) -> int:
    """The code of an event; ``words`` tell it to people."""
    code = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little") & _MASK
    _words[code] = words
    return code


def listed(names: Sequence[object]) -> str:
    """A list in the words of an event: short enough to be read, and another for every other list."""
    if len(names) <= _LISTED:
        return repr([*names])
    first = ", ".join(map(repr, names[:2]))
    checksum = hashlib.blake2b(repr([*names]).encode(), digest_size=4).hexdigest()
    return f"[{first} and {len(names) - 2} more; checksum {checksum}]"


def collective_name(code: int) -> str:
    return _words[code]


class LogExcerpt(NamedTuple):
    """A path as it is told: how many events it has, and the last of them in words."""

    epoch: int
    num_events: int
    words: list[str]


class CollectiveLog:
    """What this rank did on one group since the last failure."""

    __slots__ = ("digest", "epoch", "events", "num_events")

    def __init__(self) -> None:
        self.epoch = -1
        self.restart()

    def restart(self) -> None:
        # The epoch last: whoever reads the new one on another thread finds no events of the old one with it.
        self.events: deque[tuple[int, int, int]] = deque(maxlen=_LENGTH)
        self.num_events = 0
        self.digest = self.epoch + 1
        self.epoch += 1

    def record(self, code: int) -> int:
        """Adds an event; the digest with it."""
        self.digest = digest = (self.digest * _MIX + code) & _MASK
        self.num_events = number = self.num_events + 1
        self.events.append((number, code, time.perf_counter_ns()))
        return digest

    def excerpt(self, num_told: int = _LENGTH) -> LogExcerpt:
        """The path up to now, for another thread: whole, though the path may be going on meanwhile."""
        while True:
            epoch, events = self.epoch, tuple(self.events)
            if epoch == self.epoch:
                told = [_words[code] for _, code, _ in events[-num_told:]]
                return LogExcerpt(epoch, events[-1][0] if events else 0, told)


def first_divergence(logs: Sequence[tuple[int, list[str]]]) -> int | None:
    """The number of the first event in which paths differ, if they do.

    A path is the number of events and the words of the last of them. One that is merely shorter does not differ.
    """
    start = max(num_events - len(words) for num_events, words in logs)
    stop = max(num_events for num_events, _ in logs)
    for number in range(start, stop):
        known = {words[number - num_events] for num_events, words in logs if number < num_events}
        if len(known) > 1:
            return number
    return None
