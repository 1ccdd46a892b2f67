"""Stops a run between two steps: on SIGTERM, and on the first Ctrl-C."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["Interrupt"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupt:
    """Turns SIGTERM and Ctrl-C, while it is entered, into a request to stop between two steps.

    SIGTERM may arrive many times, from a scheduler and from processes that forward it; a second Ctrl-C goes to the
    previous handler.

    Args:
        on_request: called once, when the first signal arrives, by a thread: a signal handler must not print.
    """

    def __init__(self, on_request: Callable[[], None] = lambda: None) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}
        self._on_request = on_request
        # A handler may put into it at any time, even while it puts.
        self._requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._teller: threading.Thread | None = None

    def __enter__(self) -> Interrupt:
        # Only the main thread may set handlers; ranks that are threads are stopped by their caller.
        if threading.current_thread() is threading.main_thread():
            self._teller = threading.Thread(target=self._tell, name="stop requests", daemon=True)
            self._teller.start()
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._request_stop)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        if self._teller is not None:
            self._requests.put(False)
            self._teller.join()

    def _tell(self) -> None:
        if self._requests.get():
            self._on_request()

    def _request_stop(self, number: int, _frame: FrameType | None) -> None:
        if not self.requested:
            self.requested = True
            self._requests.put(True)
        if number == signal.SIGINT:
            signal.signal(number, self._before.pop(number, signal.SIG_DFL))
