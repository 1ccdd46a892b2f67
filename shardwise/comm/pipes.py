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
from collections.abc import Iterable, Mapping, Sequence

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
        self._listening = {peer: _listening_to([ear]) for peer, ear in ears.items()}
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
        return self.hear_first((peer,), key, timeout_seconds)[1]

    def hear_first(
        self, peers: Sequence[int], key: Key, timeout_seconds: float | None = None
    ) -> tuple[int, int]:
        """The same of several peers: which of them was the first to tell something under the key, and what."""
        until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            for peer in peers:
                if key in self._heard[peer]:
                    return peer, self._heard[peer].pop(key)
            self._listen(peers, until)

    def _listen(self, peers: Sequence[int], until: float | None) -> None:
        """Takes in a message of each peer that has something to say; waits until one has."""
        speakers = {self._ears[peer]: peer for peer in peers}
        listening = self._listening[peers[0]] if len(peers) == 1 else _listening_to(speakers)
        while not (ready := listening.poll(_LOOK_SECONDS * 1000)):
            names = ", ".join(map(str, sorted(peers)))
            if isinstance(self._wire, WatchedWire) and self._wire.verdict is not None:
                raise RuntimeError(f"rank {names} of the group does not come")
            if until is not None and time.monotonic() > until:
                raise RuntimeError(f"rank {names} of the group did not come in the time that is set")
        for ear, _ in ready:
            # Written in one go, and so short that it is there as a whole or not at all.
            message = os.read(ear, _MESSAGE.size)
            if not message:
                raise PipeClosed(f"rank {speakers[ear]} of the group has ended")
            *key, value = _MESSAGE.unpack(message)
            self._heard[speakers[ear]][key[0], key[1]] = value


def _listening_to(ears: Iterable[int]) -> select.poll:
    # Not select(): its descriptors end at 1023.
    listening = select.poll()
    for ear in ears:
        listening.register(ear, select.POLLIN)
    return listening


def close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
