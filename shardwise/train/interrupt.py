"""Turns SIGTERM and Ctrl-C into a request, at which the training loop stops between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["Interrupt"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupt:
    """Handles SIGTERM and SIGINT while it is entered.

    SIGTERM may arrive many times, from a scheduler and from processes that forward it; a second Ctrl-C goes to the
    previous handler.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        # Only the main thread may set handlers; ranks that are threads are stopped by their caller.
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
