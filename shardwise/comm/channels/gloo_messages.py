"""What is under way in a collective on gloo: messages of the group's, and what neighbours have lent.

Messages are works of gloo's, one each way; a wait for them that the watch has ended is let out with the help of peers.
Of what neighbours have lent a word comes through a pipe; who waits for it looks for a verdict itself, and then reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardwise.comm.shared_memory.arena import Lent
from shardwise.comm.shared_memory.peers import PAYLOAD, LocalPeers

if TYPE_CHECKING:
    from shardwise.comm.channels.gloo import GlooChannel

# Above what people use for tags of their own on the same group.
OUR_TAGS = 1 << 30


class GlooWork:
    """Messages under way: what this rank sends and what it is to receive."""

    # Whether the wait ends by itself when there is a verdict.
    polls_failure = False

    def __init__(self, channel: GlooChannel, code: int, digest: int, message_bytes: int) -> None:
        self.code = code
        # Made of the path and the size; as much of it as gloo has room for is the tag of messages.
        self.digest = digest
        self.tag = OUR_TAGS | (digest >> 31)
        self.message_bytes = message_bytes
        self.channel = channel
        self.works: list[Any] = []
        self.alive: tuple[torch.Tensor, ...] = ()  # alive: until the messages have landed
        # Whose word this rank waits for, and what it was told that they, and this rank itself, have lent.
        self.near: LocalPeers | None = None
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
        channel = self.channel
        channel.waiting = self
        try:
            if self.near is not None:
                self.polls_failure = True
                for peer in self.awaited:
                    if self.what == PAYLOAD:
                        self.lent[peer] = self.near.receive(peer, self.digest)
                    else:
                        self.near.hear(peer, self.digest, self.what)
                self.polls_failure = False
            for work in self.works:
                work.wait(*channel.patience)
        except Exception as error:  # noqa: BLE001  it is raised again, once peers know
            channel.leave_behind(self)
            channel.fail(error)
        finally:
            channel.waiting = None
        self.works = []
        if channel.failure is not None:
            # What has landed may be a peer's help to get out of here.
            channel.raise_failure()

    def take(self) -> None:
        """Copies what neighbours have lent."""
        for peer in self.awaited:
            self.arriving[peer].copy_(self.part(peer).view(self.arriving[peer].dtype))
        self.release_rows()

    def part(self, rank: int) -> torch.Tensor:
        """What a neighbour sent to this rank, where it lies: to be read before it is let go."""
        return self.lent[rank].payload(self.offset, self.message_bytes)

    def release_rows(self) -> None:
        if self.lent:
            for lent in self.lent.values():
                lent.mark_read()
            self.lent = {}
            self.channel.bytes_read += self.message_bytes * len(self.awaited)


class GlooRows(GlooWork):
    """Rows that all ranks have lent, to be read where they lie."""

    def take(self) -> None:
        pass

    def row(self, rank: int) -> torch.Tensor:
        return self.part(rank)


class GlooSum(GlooWork):
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
        self.release_rows()
