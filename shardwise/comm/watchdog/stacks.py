"""Reads the stack of another thread of this process while it runs or waits.

Reading frame objects from outside is not safe: the interpreter has crashed when the thread left such a frame. Nor is
faulthandler's dump of all threads, which takes no lock: it has crashed when one of torch's threads started or ended
meanwhile. So the thread itself is interrupted by a signal and writes its stack to a file. It cannot move meanwhile, and
needs neither a lock nor memory, so this works wherever it waits.

The signal is SIGURG, which hardly anybody uses and which is ignored by default, so a late one does no harm.
Interrupted system calls are restarted, and ``errno`` is restored: code that is about to read it, such as NCCL polling
its sockets, must not see an error that is not there.
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
_POLL_SECONDS = 0.001
_HEADER = "Stack (most recent call first):\n"
_CALL = re.compile(r'  File "(.*)", line (\d+) in (.*)')
# Outermost calls of threads; faulthandler ends a stack that is too deep with dots.
_OUTERMOST_CALLS = (" in <module>\n", " in _run_module_as_main\n", " in _bootstrap\n", "  ...\n")
UNKNOWN = "  its stack cannot be read"


class _StackFile:
    """The file that threads write their stacks to. It stays open: a late one must not write to a reused descriptor."""

    def __init__(self) -> None:
        assert _SIGNAL is not None
        self.process = os.getpid()
        self._file = tempfile.TemporaryFile("a+")  # noqa: SIM115
        # With ``chain`` the handler restores ``errno``.
        faulthandler.register(_SIGNAL, self._file, all_threads=False, chain=True)

    def ask(self, thread: int) -> str:
        """Returns what the thread writes, or "" if it does not get round to it."""
        assert _SIGNAL is not None
        os.ftruncate(self._file.fileno(), 0)
        # Every time: when the handler chains, it registers itself again, and then interrupts system calls.
        signal.siginterrupt(_SIGNAL, False)
        signal.pthread_kill(thread, _SIGNAL)
        until = time.monotonic() + _LONGEST_SECONDS
        last = ""
        while time.monotonic() < until:
            text = self._read()
            if text.endswith(_OUTERMOST_CALLS) and text == last:
                break
            last = text
            time.sleep(_POLL_SECONDS)
        return last.rpartition(_HEADER)[2]

    def _read(self) -> str:
        size = os.fstat(self._file.fileno()).st_size
        return os.pread(self._file.fileno(), size, 0).decode(errors="replace")


_lock = threading.Lock()
_stack_file: _StackFile | None = None


def stack_of(thread: int) -> list[str]:
    """Returns the calls of a thread, innermost last."""
    global _stack_file
    if _SIGNAL is None or not any(alive.ident == thread for alive in threading.enumerate()):
        return [UNKNOWN]
    with _lock:
        try:
            if _stack_file is None or _stack_file.process != os.getpid():
                _stack_file = _StackFile()
            written = _stack_file.ask(thread)
        except OSError as error:
            # No space or descriptor for the file; or the thread has just ended.
            return [f"{UNKNOWN}: {error.strerror}"]
    calls: list[str] = []
    for path, number, function in _CALL.findall(written):
        source = linecache.getline(path, int(number)).strip()
        calls.append(f'  File "{path}", line {number}, in {function}' + (f"\n    {source}" if source else ""))
    return calls[::-1] or [UNKNOWN]
