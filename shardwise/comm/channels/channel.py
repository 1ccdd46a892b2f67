"""The collective log: what this rank has issued on one group, as a digest and as the last events.

Each collective is an event, identified by a code that is made once from its name. The digest mixes the codes of all
events in order: ranks with equal digests have issued the same events. An *epoch* lasts from one failure to the next:
after a failure that was caught, all ranks start a new log, whose digests differ from those of the old one.

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
_MAX_EVENTS = 4096
# Longer lists of names are abbreviated to the first two.
_LONGEST_LIST = 4

# Of the whole process, and never removed from: a name has the same code everywhere.
_names: dict[int, str] = {}


def collective_code(name: str) -> int:
    """Returns the code of an event with this name."""
    code = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") & _MASK
    _names[code] = name
    return code


def listed(names: Sequence[object]) -> str:
    """Returns a list as part of an event's name: short, and different for every list."""
    if len(names) <= _LONGEST_LIST:
        return repr([*names])
    first = ", ".join(map(repr, names[:2]))
    checksum = hashlib.blake2b(repr([*names]).encode(), digest_size=4).hexdigest()
    return f"[{first} and {len(names) - 2} more; checksum {checksum}]"


def collective_name(code: int) -> str:
    return _names[code]


class LogExcerpt(NamedTuple):
    """A log as it is posted: the number of its events, and the names of the last ones."""

    epoch: int
    num_events: int
    names: list[str]


class CollectiveLog:
    """What this rank has issued on one group since the last failure."""

    __slots__ = ("digest", "epoch", "events", "num_events")

    def __init__(self) -> None:
        self.epoch = -1
        self.restart()

    def restart(self) -> None:
        # The epoch last: another thread that reads the new one then finds no events of the old one.
        self.events: deque[tuple[int, int, int]] = deque(maxlen=_MAX_EVENTS)
        self.num_events = 0
        self.digest = self.epoch + 1
        self.epoch += 1

    def record(self, code: int) -> int:
        """Adds an event and returns the new digest."""
        self.digest = digest = (self.digest * _MIX + code) & _MASK
        self.num_events = number = self.num_events + 1
        self.events.append((number, code, time.perf_counter_ns()))
        return digest

    def excerpt(self, num_shown: int = _MAX_EVENTS) -> LogExcerpt:
        """Returns a consistent excerpt, for another thread, while this one may go on recording."""
        while True:
            epoch, events = self.epoch, tuple(self.events)
            if epoch == self.epoch:
                shown = [_names[code] for _, code, _ in events[-num_shown:]]
                return LogExcerpt(epoch, events[-1][0] if events else 0, shown)


def first_divergence(logs: Sequence[tuple[int, list[str]]]) -> int | None:
    """Returns the number of the first event in which logs differ, or None.

    A log is the number of its events and the names of the last ones. One that is merely shorter does not differ.
    """
    start = max(num_events - len(names) for num_events, names in logs)
    stop = max(num_events for num_events, _ in logs)
    for number in range(start, stop):
        known = {names[number - num_events] for num_events, names in logs if number < num_events}
        if len(known) > 1:
            return number
    return None
