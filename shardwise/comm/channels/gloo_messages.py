"""What is under way in a collective on gloo: messages of the group's, and what neighbours have lent.

Messages are works of gloo's, one each way; a wait for them that the watch has ended is let out with the help of peers.
Of what neighbours have lent a word comes through a pipe; who waits for it looks for a verdict itself, and then reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardwise.comm.shared_memory.arena import Lent
from shardwise.comm.shared_memory.peers import PAYLOAD, Vicinity

if TYPE_CHECKING:
    from shardwise.comm.channels.gloo import TaggedWire

# Above what people use for tags of their own on the same group.
OUR_TAGS = 1 << 30


class Posted:
    """Messages under way: what this rank sends and what it is to receive."""

    # Whether the wait ends by itself when there is a verdict.
    looks_itself = False

    def __init__(self, wire: TaggedWire, code: int, mark: int, message_bytes: int) -> None:
        self.code = code
        # Made of the path and the size; as much of it as gloo has room for is the tag of messages.
        self.mark = mark
        self.tag = OUR_TAGS | (mark >> 31)
        self.message_bytes = message_bytes
        self.wire = wire
        self.works: list[Any] = []
        self.alive: tuple[torch.Tensor, ...] = ()  # alive: until the messages have landed
        # Whose word this rank waits for, and what it was told that they, and this rank itself, have lent.
        self.near: Vicinity | None = None
        self.awaited: Sequence[int] = ()
        self.what = PAYLOAD
        self.lent: dict[int, Lent] = {}
        # Where in what others send this rank's part is.
        self.offset = 0
        self.arriving: Sequence[torch.Tensor] = ()

    def wait(self) -> None:
        self.arrive()
        self.take()

    def arrive(self) -> None:
        """Returns when all that was sent to this rank is here, or can be read."""
        wire = self.wire
        wire.waiting = self
        try:
            if self.near is not None:
                self.looks_itself = True
                for peer in self.awaited:
                    if self.what == PAYLOAD:
                        self.lent[peer] = self.near.receive(peer, self.mark)
                    else:
                        self.near.hear(peer, self.mark, self.what)
                self.looks_itself = False
            for work in self.works:
                work.wait(*wire.patience)
        except Exception as error:  # noqa: BLE001  it is raised again, once peers know
            wire.leave_behind(self)
            wire.fail(error)
        finally:
            wire.waiting = None
        self.works = []
        if wire.verdict is not None:
            # What has landed may be a peer's help to get out of here.
            wire.heed_verdict()

    def take(self) -> None:
        """Copies what neighbours have lent."""
        for peer in self.awaited:
            self.arriving[peer].copy_(self.part(peer).view(self.arriving[peer].dtype))
        self.let_go()

    def part(self, rank: int) -> torch.Tensor:
        """What a neighbour sent to this rank, where it lies: to be read before it is let go."""
        return self.lent[rank].payload(self.offset, self.message_bytes)

    def let_go(self) -> None:
        if self.lent:
            for lent in self.lent.values():
                lent.mark_read()
            self.lent = {}
            self.wire.bytes_read += self.message_bytes * len(self.awaited)


class PostedRows(Posted):
    """Rows that all ranks have lent, to be read where they lie."""

    def take(self) -> None:
        pass

    def row(self, rank: int) -> torch.Tensor:
        return self.part(rank)


class PostedSum(Posted):
    """Rows under way: ``wait`` sums what has arrived, in rank order."""

    terms: list[torch.Tensor]
    output: torch.Tensor

    def take(self) -> None:
        for peer in self.awaited:
            self.terms[peer] = self.part(peer).view(self.output.dtype)
        first, *others = self.terms
        if not others:
            self.output.copy_(first)
            return
        torch.add(first, others[0], out=self.output)
        for term in others[1:]:
            self.output.add_(term)
        self.let_go()
