"""Pipes between processes of one host, for the little that they have to say to each other.

    rank 0   pipe 0→1 ──▶ rank 1        opened through /proc, so the ranks need no common parent
    rank 0 ◀── pipe 1→0   rank 1

Whoever listens sleeps until something is there, or until the watch ends the wait. (A message of gloo's passes a thread
of its own on either side, which spins while the connection is in use.)
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import time
import weakref
from collections.abc import Mapping, Sequence

from shardwise.comm.wire import WatchedWire, Wire

_MESSAGE = struct.Struct("<qqq")
# How often whoever listens looks whether the watch has ended the wait.
_LOOK_SECONDS = 0.1

Key = tuple[int, int]


class PipeClosed(RuntimeError):
    """Nobody is at the other end."""


class Pipes:
    """A pipe from and to each of some ranks. What is said under a key waits there until somebody asks for it."""

    def __init__(self, wire: Wire, ears: Mapping[int, int], mouths: Mapping[int, int]) -> None:
        self._wire = wire
        self._ears, self._mouths = ears, mouths
        self._heard: dict[int, dict[Key, int]] = {peer: {} for peer in ears}
        weakref.finalize(self, close, [*ears.values(), *mouths.values()])

    def tell(self, peer: int, key: Key, value: int = 0) -> None:
        """Sends a number under a key; it waits at the peer until that asks for it.

        Raises:
            PipeClosed: it has ended, or listens no more.
        """
        try:
            os.write(self._mouths[peer], _MESSAGE.pack(*key, value))
        except BrokenPipeError:
            raise PipeClosed(f"rank {peer} of the group has ended") from None
        except OSError as error:
            raise RuntimeError(f"rank {peer} of the group cannot be told: {error.strerror}") from None

    def hear(self, peer: int, key: Key, timeout_seconds: float | None = None) -> int:
        """Waits for what a peer tells under a key.

        Raises:
            RuntimeError: it has ended, or a verdict or the time that is set has ended the wait.
        """
        heard = self._heard[peer]
        until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while key not in heard:
            *told, value = _MESSAGE.unpack(self._receive(peer, until))
            heard[told[0], told[1]] = value
        return heard.pop(key)

    def _receive(self, peer: int, until: float | None) -> bytes:
        ear, message = self._ears[peer], b""
        # Not select(): its descriptors end at 1023.
        listening = select.poll()
        listening.register(ear, select.POLLIN)
        while len(message) < _MESSAGE.size:
            if listening.poll(_LOOK_SECONDS * 1000):
                more = os.read(ear, _MESSAGE.size - len(message))
                if not more:
                    raise PipeClosed(f"rank {peer} of the group has ended")
                message += more
            elif isinstance(self._wire, WatchedWire) and self._wire.verdict is not None:
                raise RuntimeError(f"rank {peer} of the group does not come")
            elif until is not None and time.monotonic() > until:
                raise RuntimeError(f"rank {peer} of the group did not come in the time that is set")
        return message


def close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
