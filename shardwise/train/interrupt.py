"""A wish to stop, from outside: SIGTERM or Ctrl-C asks, the loop stops between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["Interrupt"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupt:
    """Takes the signals over for a while.

    SIGTERM may come many times, from a scheduler and from whoever passes it on; a second Ctrl-C acts as if nobody had
    taken it over.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        # Only a process's main thread may; ranks that are threads are stopped by their caller.
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.requested = True
        if number == signal.SIGINT:
            signal.signal(number, self._before.pop(number, signal.SIG_DFL))
