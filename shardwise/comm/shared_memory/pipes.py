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

from shardwise.comm.channels.channel import Channel, LostConnection, WatchedChannel
from shardwise.errors import PeerFailure, StateError

_MESSAGE = struct.Struct("<qqq")
# How often whoever listens looks whether the watch has ended the wait.
_LOOK_SECONDS = 0.1

Key = tuple[int, int]


class Pipes:
    """A pipe from and to each of some ranks. What is said under a key waits there until somebody asks for it."""

    def __init__(self, channel: Channel, ears: Mapping[int, int], mouths: Mapping[int, int]) -> None:
        self._channel = channel
        self._ears, self._mouths = ears, mouths
        self._heard: dict[int, dict[Key, int]] = {peer: {} for peer in ears}
        self._listening = {peer: _listening_to([ear]) for peer, ear in ears.items()}
        weakref.finalize(self, close, [*ears.values(), *mouths.values()])

    def tell(self, peer: int, key: Key, value: int = 0) -> None:
        """Sends a number under a key; it waits at the peer until that asks for it.

        Raises:
            LostConnection: it has ended, or listens no more.
        """
        try:
            os.write(self._mouths[peer], _MESSAGE.pack(*key, value))
        except BrokenPipeError:
            raise LostConnection(f"rank {peer} of the group has ended") from None
        except BlockingIOError:
            raise StateError(
                f"rank {peer} of the group was told of more collectives than the pipe to it has room for",
                where="telling a rank of the same host where to read",
                fix="wait for collectives before so many of them are under way",
            ) from None

    def hear(self, peer: int, key: Key) -> int:
        """Waits for what a peer tells under a key.

        Raises:
            LostConnection: it has ended, or a verdict has ended the wait.
            PeerFailure: it did not come in time.
        """
        return self.hear_first((peer,), key)[1]

    def hear_first(self, peers: Sequence[int], key: Key) -> tuple[int, int]:
        """The same of several peers: which of them was the first to tell something under the key, and what."""
        seconds = self._channel.patience_seconds
        until = None if seconds is None else time.monotonic() + seconds
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
            if isinstance(self._channel, WatchedChannel) and self._channel.failure is not None:
                raise LostConnection(f"rank {names} of the group does not come")
            if until is not None and time.monotonic() > until:
                raise PeerFailure(
                    f"rank {names} of the group did not come within the group's timeout",
                    fix="look at what that rank is doing",
                )
        for ear, _ in ready:
            # Written in one go, and so short that it is there as a whole or not at all.
            message = os.read(ear, _MESSAGE.size)
            if not message:
                raise LostConnection(f"rank {speakers[ear]} of the group has ended")
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
