"""The ranks near this one: processes of its host, which read what they send each other where it lies.

Loopback sockets copy every byte through the kernel, twice, and gloo's thread spins on them. Ranks of one host need none
of that: a rank writes what it sends into its arena and tells its neighbours, through a pipe, where; each reads it there
when it comes by the same path, and says so in a flag beside it.

    rank 0   arena | rows |  ─ pipe: "mark 7a3 lies here" ─▶  rank 1   adds them up where they lie, sets its flag

Nobody waits for a reader: what is lent stays as it is until all have read it. Ranks that leave a path leave all of this
behind and find each other anew on the next one. So what was told on a path that ended is never read as anything else,
and a neighbour that is late on it reads what it was told it would.

Who is near is tried out, pair by pair, and agreed on by both. All others are sent messages.
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

from shardwise.comm.channels.channel import LostConnection, WatchedChannel
from shardwise.comm.shared_memory.arena import (
    MAGIC_BYTES,
    Arena,
    Borrower,
    Lent,
    Loan,
    is_possible,
    map_arena,
)
from shardwise.comm.shared_memory.pipes import Pipes, close
from shardwise.torch_internals import unseen_by_modes

_LOGGER = logging.getLogger("shardwise")
_DIGEST_BYTES = 16
# Process table, process, descriptors of the arena and of the pipe to this rank, the arena's size and first bytes.
_CARD = struct.Struct(f"<{_DIGEST_BYTES}sqqqq{MAGIC_BYTES}s")
_NO_CARD = bytes(_CARD.size)
_PIPE_BYTES = 1 << 20
_YES, _NO = b"\1\1", b"\0\0"
# What is told under a mark: where a payload lies; anything else, that a rank is there.
PAYLOAD = 0

# Sends each peer its message, and receives theirs, all of one length.
Swap = Callable[[Mapping[int, bytes]], Mapping[int, bytes]]


class LocalPeers:
    """The neighbours of one rank, on one path of its wire."""

    def __init__(
        self, rank: int, world: int, arena: Arena | None, arenas: Mapping[int, Tensor], pipes: Pipes
    ) -> None:
        self.peers = tuple(arenas)
        self._rank = rank
        self._arena, self._pipes = arena, pipes
        self._borrowers = {peer: Borrower(memory, world, rank) for peer, memory in arenas.items()}
        if arena is not None:
            self._borrowers[rank] = Borrower(arena.memory, world, rank)
        # A rank reads its own, too: what it sent and what it takes for its own part are then the same.
        self._readers = tuple(self._borrowers)
        self._unsent: dict[int, Loan] = {}

    def lend(self, num_bytes: int) -> Tensor:
        """Memory to write what is sent next: neighbours read it there."""
        assert self._arena is not None
        loan = self._arena.lend(num_bytes, self._readers)
        self._unsent[loan.payload.data_ptr()] = loan
        return loan.payload

    def send(self, sent: Tensor, digest: int) -> Lent:
        """Lets all neighbours read ``sent`` as it is now, and this rank too."""
        loan = self._unsent.pop(sent.data_ptr(), None)
        if loan is None:
            payload = self.lend(sent.nbytes)
            payload.view(sent.dtype).copy_(sent.detach().view(-1))
            loan = self._unsent.pop(payload.data_ptr())
        loan.is_sent = True
        for peer in self.peers:
            self.tell(peer, digest, PAYLOAD, loan.slot)
        return self._borrowers[self._rank].find(loan.slot)

    def receive(self, peer: int, digest: int) -> Lent:
        """Waits until a neighbour has sent what the mark is from."""
        return self._borrowers[peer].find(self._pipes.hear(peer, (digest, PAYLOAD)))

    def tell(self, peer: int, digest: int, what: int, value: int = 0) -> None:
        # One that has left this path listens no more: whoever waits for it finds out why.
        with contextlib.suppress(LostConnection):
            self._pipes.tell(peer, (digest, what), value)

    def hear(self, peer: int, digest: int, what: int) -> int:
        """Waits until a neighbour has come to where the mark is from."""
        return self._pipes.hear(peer, (digest, what))


def find_local_peers(channel: WatchedChannel, swap: Swap) -> LocalPeers:
    """Tries out which ranks of a group are near. Called by all of them."""
    # Each rank begins with the one after it, so that not all of them read from the same one.
    peers = [(channel.rank + step) % channel.world for step in range(1, channel.world)]
    table = hashlib.blake2b(channel.store.namespace.encode(), digest_size=_DIGEST_BYTES).digest()
    with unseen_by_modes(), contextlib.ExitStack() as until_all_have_tried:
        arena, pipes = _open(channel.world, peers)
        if arena is not None:
            until_all_have_tried.callback(arena.close)
        until_all_have_tried.callback(close, [end for _, end in pipes.values()])
        ears = {peer: ear for peer, (ear, _) in pipes.items()}
        arenas: dict[int, Tensor] = {}
        mouths: dict[int, int] = {}
        try:
            for peer, card in swap({peer: _card(table, arena, pipes.get(peer)) for peer in peers}).items():
                if arena is not None and card != _NO_CARD and (near := _visit(card, table)) is not None:
                    arenas[peer], mouths[peer] = near
            answers = swap({peer: _YES if peer in arenas else _NO for peer in peers})
        except BaseException:
            close([*ears.values(), *mouths.values()])
            raise
    far = [peer for peer in peers if peer not in arenas or answers[peer] != _YES]
    close([ends.pop(peer) for peer in far for ends in (ears, mouths) if peer in ends])
    near_arenas = {peer: arenas[peer] for peer in peers if peer not in far}
    return LocalPeers(
        channel.rank, channel.world, arena if near_arenas else None, near_arenas, Pipes(channel, ears, mouths)
    )


def _open(world: int, peers: list[int]) -> tuple[Arena | None, dict[int, tuple[int, int]]]:
    """An arena and a pipe from each peer, if this machine has such things to give."""
    pipes: dict[int, tuple[int, int]] = {}
    if not is_possible() or not hasattr(os, "memfd_create"):
        return None, {}
    try:
        for peer in peers:
            pipes[peer] = os.pipe()
            with contextlib.suppress(OSError):
                # Room for the word of tens of thousands of collectives that nobody has waited for yet.
                fcntl.fcntl(pipes[peer][0], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        return Arena(world), pipes
    except (OSError, RuntimeError) as error:
        # No descriptors left, or no address space: messages need neither.
        close([end for ends in pipes.values() for end in ends])
        _LOGGER.warning(
            "ranks of this host are sent messages, because no memory can be lent to them: %s", error
        )
        return None, {}


def _card(table: bytes, arena: Arena | None, pipe: tuple[int, int] | None) -> bytes:
    if arena is None or pipe is None:
        return _NO_CARD
    return _CARD.pack(table, os.getpid(), arena.descriptor, pipe[1], arena.num_bytes, arena.magic)


def _visit(card: bytes, table: bytes) -> tuple[Tensor, int] | None:
    """The arena of whoever gave this card, and the pipe to it; None if it is not near."""
    processes, pid, descriptor, end, num_bytes, magic = _CARD.unpack(card)
    # In another table of processes the number would mean some other process here.
    if processes != table:
        return None
    try:
        memory = map_arena(pid, descriptor, num_bytes)
        if bytes(memory[:MAGIC_BYTES].tolist()) != magic:
            return None
        # A full pipe means a reader that is in no state to be waited for.
        return memory, os.open(f"/proc/{pid}/fd/{end}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        # Another user's, or in a container of its own.
        return None
    except (OSError, RuntimeError) as error:
        _LOGGER.warning("a rank of this host is sent messages, because its memory cannot be read: %s", error)
        return None
