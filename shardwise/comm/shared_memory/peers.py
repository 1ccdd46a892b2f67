"""Local peers: processes of this host, which read each other's messages in shared memory.

Loopback sockets copy every byte through the kernel, twice, and gloo's thread spins on them. Between ranks of one host a
rank writes what it sends into its arena and announces it through a pipe; each peer reads it there when it reaches the
same event of its log, and sets a flag beside it.

    rank 0   arena | rows |  ─ pipe: "digest 7a3 is in slot 5" ─▶  rank 1   sums rows in place, sets its flag

The sender does not wait for readers: what it has lent stays unchanged until all have read it. When ranks start a new
log they abandon all of this and find each other again, so nothing announced for the old log is ever read as the new
one's, and a late peer still finds what was announced to it.

Which ranks are local is found by trying, pair by pair, and both must agree. All others are sent messages.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import struct
from collections.abc import Callable, Mapping

from torch import Tensor

from shardwise.comm.channels.watched import LostConnection, WatchedChannel
from shardwise.comm.shared_memory.arena import (
    MAGIC_BYTES,
    Arena,
    Borrower,
    Lent,
    Loan,
    is_possible,
    map_arena,
)
from shardwise.comm.shared_memory.pipes import Pipes, close, open_pipes
from shardwise.torch_internals import unseen_by_modes

_LOGGER = logging.getLogger("shardwise")
_DIGEST_BYTES = 16
# PID namespace, PID, descriptors of the arena and of the pipe to this rank, the arena's size and first bytes.
_HANDLE = struct.Struct(f"<{_DIGEST_BYTES}sqqqq{MAGIC_BYTES}s")
_NO_HANDLE = bytes(_HANDLE.size)
_PIPE_BYTES = 1 << 20
_YES, _NO = b"\1\1", b"\0\0"
# Topic of an announcement: a payload in shared memory. Any other number says that a rank has arrived.
PAYLOAD = 0

# Sends each peer its message and returns theirs, all of the same length.
Swap = Callable[[Mapping[int, bytes]], Mapping[int, bytes]]


class LocalPeers:
    """The local peers of one rank, for one log of its channel."""

    def __init__(
        self, rank: int, world: int, arena: Arena | None, arenas: Mapping[int, Tensor], pipes: Pipes
    ) -> None:
        self.peers = tuple(arenas)
        self._rank = rank
        self._arena, self._pipes = arena, pipes
        self._borrowers = {peer: Borrower(memory, world, rank) for peer, memory in arenas.items()}
        if arena is not None:
            self._borrowers[rank] = Borrower(arena.memory, world, rank)
        # A rank reads its own rows there as well, so that its own part is what it has sent.
        self._readers = tuple(self._borrowers)
        self._unsent: dict[int, Loan] = {}

    def lend(self, num_bytes: int) -> Tensor:
        """Returns memory for what is sent next, readable by peers."""
        assert self._arena is not None
        loan = self._arena.lend(num_bytes, self._readers)
        self._unsent[loan.payload.data_ptr()] = loan
        return loan.payload

    def send(self, sent: Tensor, digest: int) -> Lent:
        """Lets all local peers, and this rank, read ``sent`` as it is now."""
        loan = self._unsent.pop(sent.data_ptr(), None)
        if loan is None:
            payload = self.lend(sent.nbytes)
            payload.view(sent.dtype).copy_(sent.detach().view(-1))
            loan = self._unsent.pop(payload.data_ptr())
        loan.is_sent = True
        for peer in self.peers:
            self.notify(peer, digest, PAYLOAD, loan.slot)
        return self._borrowers[self._rank].find(loan.slot)

    def receive(self, peer: int, digest: int) -> Lent:
        """Waits until a peer has announced the payload of this digest."""
        return self._borrowers[peer].find(self._pipes.receive(peer, (digest, PAYLOAD)))

    def notify(self, peer: int, digest: int, what: int, value: int = 0) -> None:
        # A peer that has abandoned this log no longer reads: the wait for it finds out why.
        with contextlib.suppress(LostConnection):
            self._pipes.send(peer, (digest, what), value)

    def wait_for(self, peer: int, digest: int, what: int) -> int:
        """Waits until a peer has arrived at this digest."""
        return self._pipes.receive(peer, (digest, what))


def find_local_peers(channel: WatchedChannel, swap: Swap) -> LocalPeers:
    """Finds by trying which ranks of a group are local. Called by all of them."""
    # Each rank starts with the next one, so that not all of them read from the same rank.
    peers = [(channel.rank + step) % channel.world for step in range(1, channel.world)]
    namespace = hashlib.blake2b(channel.store.namespace.encode(), digest_size=_DIGEST_BYTES).digest()
    with unseen_by_modes(), contextlib.ExitStack() as until_all_have_tried:
        arena, pipes = _open_arena_and_pipes(channel.world, peers)
        if arena is not None:
            until_all_have_tried.callback(arena.close)
        until_all_have_tried.callback(close, [end for _, end in pipes.values()])
        read_ends = {peer: end for peer, (end, _) in pipes.items()}
        arenas: dict[int, Tensor] = {}
        write_ends: dict[int, int] = {}
        try:
            handles = swap({peer: _pack_handle(namespace, arena, pipes.get(peer)) for peer in peers})
            for peer, handle in handles.items():
                opened = _open_peer(handle, namespace) if arena is not None and handle != _NO_HANDLE else None
                if opened is not None:
                    arenas[peer], write_ends[peer] = opened
            answers = swap({peer: _YES if peer in arenas else _NO for peer in peers})
        except BaseException:
            close([*read_ends.values(), *write_ends.values()])
            raise
    remote = [peer for peer in peers if peer not in arenas or answers[peer] != _YES]
    close([ends.pop(peer) for peer in remote for ends in (read_ends, write_ends) if peer in ends])
    agreed = {peer: arenas[peer] for peer in peers if peer not in remote}
    connected = Pipes(channel, read_ends, write_ends)
    return LocalPeers(channel.rank, channel.world, arena if agreed else None, agreed, connected)


def _open_arena_and_pipes(world: int, peers: list[int]) -> tuple[Arena | None, dict[int, tuple[int, int]]]:
    """Returns an arena and a pipe from each peer, or nothing if this machine cannot provide them."""
    pipes: dict[int, tuple[int, int]] = {}
    if not is_possible() or not hasattr(os, "memfd_create"):
        return None, {}
    try:
        pipes = open_pipes(peers)
        for end, _ in pipes.values():
            with contextlib.suppress(OSError):
                # Enough for announcements of tens of thousands of collectives that nobody has waited for yet.
                fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        return Arena(world), pipes
    except (OSError, RuntimeError) as error:
        # Out of descriptors or address space: messages need neither.
        close([end for ends in pipes.values() for end in ends])
        _LOGGER.warning(
            "this rank uses messages on its own host, because it cannot create shared memory: %s", error
        )
        return None, {}


def _pack_handle(namespace: bytes, arena: Arena | None, pipe: tuple[int, int] | None) -> bytes:
    if arena is None or pipe is None:
        return _NO_HANDLE
    return _HANDLE.pack(namespace, os.getpid(), arena.descriptor, pipe[1], arena.num_bytes, arena.magic)


def _open_peer(handle: bytes, namespace: bytes) -> tuple[Tensor, int] | None:
    """Returns the arena behind a handle and the pipe to its rank, or None if it is not local."""
    processes, pid, descriptor, end, num_bytes, magic = _HANDLE.unpack(handle)
    # In another PID namespace the number would mean some other process here.
    if processes != namespace:
        return None
    try:
        memory = map_arena(pid, descriptor, num_bytes)
        if bytes(memory[:MAGIC_BYTES].tolist()) != magic:
            return None
        # Non-blocking: a full pipe means a reader that must not be waited for.
        return memory, os.open(f"/proc/{pid}/fd/{end}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        # Another user's process, or one in a container.
        return None
    except (OSError, RuntimeError) as error:
        _LOGGER.warning(
            "this rank uses messages for a rank of its host, because its memory cannot be read: %s", error
        )
        return None
