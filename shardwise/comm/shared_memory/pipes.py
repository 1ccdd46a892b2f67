"""Pipes between processes of one host, for short announcements.

    rank 0   pipe 0→1 ──▶ rank 1        opened through /proc, so the ranks need no common parent
    rank 0 ◀── pipe 1→0   rank 1

A reader sleeps until there is something to read, or until the watchdog ends its wait. (A message of gloo's goes through
a thread on either side, which spins while the connection is in use.)
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence

from shardwise.comm.channels.channel import Channel
from shardwise.comm.channels.watched import LostConnection, WatchedChannel
from shardwise.errors import PeerFailure, StateError

_MESSAGE = struct.Struct("<qqq")
# How often a waiting reader checks whether the watchdog has ended the wait.
_POLL_SECONDS = 0.1

Key = tuple[int, int]


class Pipes:
    """A pipe from and to each of some ranks. What arrives under a key is kept until it is asked for."""

    def __init__(self, channel: Channel, read_ends: Mapping[int, int], write_ends: Mapping[int, int]) -> None:
        self._channel = channel
        self._read_ends, self._write_ends = read_ends, write_ends
        self._received: dict[int, dict[Key, int]] = {peer: {} for peer in read_ends}
        self._polls = {peer: _poll_for([end]) for peer, end in read_ends.items()}
        weakref.finalize(self, close, [*read_ends.values(), *write_ends.values()])

    def send(self, peer: int, key: Key, value: int = 0) -> None:
        """Sends a number under a key.

        Raises:
            LostConnection: the peer has ended, or closed the pipe.
        """
        try:
            os.write(self._write_ends[peer], _MESSAGE.pack(*key, value))
        except BrokenPipeError:
            raise LostConnection(f"rank {peer} of the group has ended") from None
        except BlockingIOError:
            raise StateError(
                f"the pipe to rank {peer} of the group is full: too many collectives are in flight",
                where="announcing shared memory to a rank of the same host",
                fix="wait for collectives before issuing so many more",
            ) from None

    def receive(self, peer: int, key: Key) -> int:
        """Waits for the number that a peer sends under a key.

        Raises:
            LostConnection: the peer has ended, or a failure has ended the wait.
            PeerFailure: it did not arrive in time.
        """
        return self.receive_first((peer,), key)[1]

    def receive_first(self, peers: Sequence[int], key: Key) -> tuple[int, int]:
        """Does the same for several peers: returns the first that sends something under the key, and what."""
        seconds = self._channel.wait_timeout_seconds
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            for peer in peers:
                if key in self._received[peer]:
                    return peer, self._received[peer].pop(key)
            self._listen(peers, until)

    def _listen(self, peers: Sequence[int], until: float | None) -> None:
        """Waits until a peer has sent something, and reads one message from each that has."""
        peer_of = {self._read_ends[peer]: peer for peer in peers}
        poll = self._polls[peers[0]] if len(peers) == 1 else _poll_for(peer_of)
        while not (ready := poll.poll(_POLL_SECONDS * 1000)):
            names = ", ".join(map(str, sorted(peers)))
            if isinstance(self._channel, WatchedChannel) and self._channel.failure is not None:
                raise LostConnection(f"rank {names} of the group does not answer")
            if until is not None and time.monotonic() > until:
                raise PeerFailure(
                    f"rank {names} of the group did not answer within the group's timeout",
                    fix="find out what that rank is doing",
                )
        for end, _ in ready:
            # Short enough to be written atomically: it is there as a whole or not at all.
            message = os.read(end, _MESSAGE.size)
            if not message:
                raise LostConnection(f"rank {peer_of[end]} of the group has ended")
            *key, value = _MESSAGE.unpack(message)
            self._received[peer_of[end]][key[0], key[1]] = value


def _poll_for(read_ends: Iterable[int]) -> select.poll:
    # Not select(), which is limited to descriptors below 1024.
    poll = select.poll()
    for end in read_ends:
        poll.register(end, select.POLLIN)
    return poll


def open_pipes(peers: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Opens a pipe from each peer: all of them, or none if descriptors run out, with an ``OSError``."""
    pipes: dict[int, tuple[int, int]] = {}
    try:
        for peer in peers:
            pipes[peer] = os.pipe()
    except OSError:
        close([end for ends in pipes.values() for end in ends])
        raise
    return pipes


def close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
