"""A collective in flight on gloo: messages between hosts, and shared memory that local peers have lent.

Messages are gloo's works, one each way; a failed wait for them ends with the help of peers. What local peers have lent
is announced through a pipe; a wait for that polls for a failure by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardwise.comm.shared_memory.arena import Lent
from shardwise.comm.shared_memory.peers import PAYLOAD, LocalPeers

if TYPE_CHECKING:
    from shardwise.comm.channels.gloo import GlooChannel

# Above the tags that users choose on the same group.
OUR_TAGS = 1 << 30


class GlooWork:
    """A collective in flight: what this rank sends and what it is to receive."""

    # Whether the present wait polls for a failure by itself.
    polls_failure = False

    def __init__(self, channel: GlooChannel, code: int, digest: int, message_bytes: int) -> None:
        self.code = code
        # Made of the log and the size; the tag of messages is as much of it as gloo has bits for.
        self.digest = digest
        self.tag = OUR_TAGS | (digest >> 31)
        self.message_bytes = message_bytes
        self.channel = channel
        self.works: list[Any] = []
        self.alive: tuple[torch.Tensor, ...] = ()  # alive: until the messages have landed
        # The local peers to wait for, and what they and this rank itself have lent.
        self.local: LocalPeers | None = None
        self.awaited: Sequence[int] = ()
        self.topic = PAYLOAD
        self.lent: dict[int, Lent] = {}
        # Where this rank's row starts in what others send.
        self.offset = 0
        self.arriving: Sequence[torch.Tensor] = ()

    def wait(self) -> None:
        self.wait_for_arrival()
        self.collect()

    def wait_for_arrival(self) -> None:
        """Waits until everything sent to this rank has arrived, or can be read."""
        channel = self.channel
        channel.waiting = self
        try:
            if self.local is not None:
                self.polls_failure = True
                for peer in self.awaited:
                    if self.topic == PAYLOAD:
                        self.lent[peer] = self.local.receive(peer, self.digest)
                    else:
                        self.local.wait_for(peer, self.digest, self.topic)
                self.polls_failure = False
            for work in self.works:
                work.wait(*channel.wait_timeout)
        except Exception as error:  # noqa: BLE001  raised again, once peers know
            channel.abandon(self)
            channel.fail(error)
        finally:
            channel.waiting = None
        self.works = []
        if channel.failure is not None:
            # What has arrived may be a peer's help to end this wait.
            channel.raise_failure()

    def collect(self) -> None:
        """Copies what local peers have lent."""
        for peer in self.awaited:
            self.arriving[peer].copy_(self.row(peer).view(self.arriving[peer].dtype))
        self.release_rows()

    def row(self, rank: int) -> torch.Tensor:
        """Returns the row that a peer has lent to this rank, in shared memory: valid until ``release_rows``."""
        return self.lent[rank].payload(self.offset, self.message_bytes)

    def release_rows(self) -> None:
        if self.lent:
            for lent in self.lent.values():
                lent.mark_read()
            self.lent = {}
            self.channel.bytes_read += self.message_bytes * len(self.awaited)


class GlooRows(GlooWork):
    """Rows that all ranks have lent, to be read in place."""

    def collect(self) -> None:
        pass


class GlooSum(GlooWork):
    """Rows in flight: ``wait`` sums what has arrived, in rank order."""

    terms: list[torch.Tensor]
    output: torch.Tensor

    def collect(self) -> None:
        for peer in self.awaited:
            self.terms[peer] = self.row(peer).view(self.output.dtype)
        first, *others = self.terms
        if not others:
            self.output.copy_(first)
            return
        torch.add(first, others[0], out=self.output)
        for term in others[1:]:
            self.output.add_(term)
        self.release_rows()
