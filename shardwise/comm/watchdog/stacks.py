"""Where a thread is, told while it runs or waits.

Not by its frames as objects: the thread goes on, and has crashed the interpreter by leaving a frame that was just
looked at. Nor by a dump of all threads, which follows them without a lock: threads of torch's own that begin and end
meanwhile have crashed it, too. Here the thread itself is interrupted and writes down where it is. It cannot move while
it does, and it needs no lock and no memory for it, so it can do so wherever it waits.

The signal is one that hardly anybody uses, and ignored where nothing handles it: one that arrives late does no harm.
System calls that it interrupts are taken up again, and ``errno`` stays what it was: code that is about to read it, as
NCCL's does whenever it looks for what other ranks have sent, must not find a failure without a reason.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import signal
import tempfile
import threading
import time

_SIGNAL = getattr(signal, "SIGURG", None)
_LONGEST_SECONDS = 1.0
_LOOKS_SECONDS = 0.001
_HEADER = "Stack (most recent call first):\n"
_CALL = re.compile(r'  File "(.*)", line (\d+) in (.*)')
# The outermost calls of threads; what is deeper than can be told ends in dots.
_ENDS = (" in <module>\n", " in _run_module_as_main\n", " in _bootstrap\n", "  ...\n")
UNKNOWN = "  a place that cannot be told"


class _Notebook:
    """The file that threads of one process write to. It stays open: one that was late would write to another's."""

    def __init__(self) -> None:
        assert _SIGNAL is not None
        self.process = os.getpid()
        self._file = tempfile.TemporaryFile("a+")  # noqa: SIM115
        # ``chain``: only then does the handler put ``errno`` back.
        faulthandler.register(_SIGNAL, self._file, all_threads=False, chain=True)

    def ask(self, thread: int) -> str:
        """What the thread writes down, or nothing if it does not come to it."""
        assert _SIGNAL is not None
        os.ftruncate(self._file.fileno(), 0)
        # For this once: when it chains, the handler registers itself anew, to interrupt system calls.
        signal.siginterrupt(_SIGNAL, False)
        signal.pthread_kill(thread, _SIGNAL)
        until = time.monotonic() + _LONGEST_SECONDS
        seen = ""
        while time.monotonic() < until:
            text = self._read()
            if text.endswith(_ENDS) and text == seen:
                break
            seen = text
            time.sleep(_LOOKS_SECONDS)
        return seen.rpartition(_HEADER)[2]

    def _read(self) -> str:
        size = os.fstat(self._file.fileno()).st_size
        return os.pread(self._file.fileno(), size, 0).decode(errors="replace")


_lock = threading.Lock()
_notebook: _Notebook | None = None


def stack_of(thread: int) -> list[str]:
    """Where a thread is, innermost call last."""
    global _notebook
    if _SIGNAL is None or not any(alive.ident == thread for alive in threading.enumerate()):
        return [UNKNOWN]
    with _lock:
        try:
            if _notebook is None or _notebook.process != os.getpid():
                _notebook = _Notebook()
            written = _notebook.ask(thread)
        except OSError as error:
            # No room for a file, or no descriptor for one; or the thread has ended just now.
            return [f"{UNKNOWN}: {error.strerror}"]
    calls: list[str] = []
    for path, number, function in _CALL.findall(written):
        source = linecache.getline(path, int(number)).strip()
        calls.append(f'  File "{path}", line {number}, in {function}' + (f"\n    {source}" if source else ""))
    return calls[::-1] or [UNKNOWN]
