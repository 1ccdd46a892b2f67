"""Collectives on gloo, made of messages whose tags come from the collective log.

gloo's own collectives pair the n-th call of one rank with the n-th call of another, whatever they are: data is mixed,
or, if sizes differ, the process is aborted. Here a message only reaches a rank with the same log. Ranks that diverge
wait for each other, their data unharmed, until the watchdog explains it; ranks that do not diverge pay nothing.

    rank 0  gather 'layers.1'   tag 7a3 ──▶          ◀── tag 51c   gather 'layers.2'  rank 1

Reduce-scatter is an exchange of rows, summed here in rank order: bitwise the same as a loop over ranks. (gloo's own is
an all-reduce and a slice: twice the bytes, in an order of its own.)

Ranks of one host do not send each other the data, only where it is in shared memory (``comm/shared_memory/peers``).

A wait in gloo cannot be cancelled. A rank whose epoch has failed asks its peers to take part in the collective in which
it is stuck, with bytes that nobody reads; if a peer does not answer, the connections are closed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.channels.channel import UNNAMED, collective_code, collective_name
from shardwise.comm.channels.dispatcher_visibility import dispatch_as
from shardwise.comm.channels.watched import BackendWait, Waiting, WatchedChannel
from shardwise.comm.shared_memory.arena import Lent
from shardwise.comm.shared_memory.peers import PAYLOAD, LocalPeers, find_local_peers
from shardwise.torch_internals import (
    backend_of,
    num_dispatch_modes,
    timeout_seconds_of,
)

_MASK = (1 << 61) - 1
_MIX = 0xBF58476D1CE4E5B
# The watchdog ends waits, not gloo: a timeout of gloo's own closes all connections.
_UNTIL_THE_WATCHDOG_ENDS_IT = timedelta(days=7)
_PEERS_ANSWER_SECONDS = 1.0
_DRAIN_SECONDS = 0.2
# Above the tags that users choose on the same group.
_OUR_TAGS = 1 << 30


class GlooChannel(WatchedChannel):
    """A gloo group on CPUs."""

    carries_data = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        backend = backend_of(group, device)
        self._send, self._receive = backend.send, backend.recv
        # Each rank starts with the next one, so that not all of them send to the same rank.
        self._peers = [(self.rank + step) % self.world for step in range(1, self.world)]
        self._rounds = [1 << power for power in range((self.world - 1).bit_length())]
        # Without checks, a wait ends with the group's own timeout.
        self.wait_timeout = (_UNTIL_THE_WATCHDOG_ENDS_IT,) if self.checks else ()
        self.wait_timeout_seconds = None if self.checks else timeout_seconds_of(group, device)
        self._asked: Waiting | None = None
        self._served: set[tuple[int, int]] = set()
        # alive: for good, because messages to and from ranks that have left may still arrive
        self._abandoned: list[Any] = []
        # Found again for every log, so that nothing of the last one can be mistaken for this one's.
        self._local_peers: LocalPeers | None = None
        self._remote_peers = self._peers
        # Read from shared memory, in addition to what the group has sent and received.
        self.bytes_read = 0

    def _next_digest(self, code: int, message_bytes: int) -> int:
        """Records an event; returns a digest of log and size: gloo aborts a process that receives too many bytes."""
        if self._local_peers is None:
            self._find_local_peers(code)
        return _message_digest(self.log.record(code), message_bytes)

    def _find_local_peers(self, code: int) -> None:
        """Finds the ranks of this host, before the first collective of a log."""
        self._local_peers = find_local_peers(self, partial(self._exchange_messages, code))
        self._remote_peers = [peer for peer in self._peers if peer not in self._local_peers.peers]
        self.lends_rows = not self._remote_peers

    def _exchange_messages(self, code: int, messages: Mapping[int, bytes]) -> Mapping[int, bytes]:
        """Sends each peer its message and returns theirs, all of the same length."""
        size = len(next(iter(messages.values())))
        # An event of its own: a rank in it is not yet waiting in the collective that follows.
        code = collective_code(f"find the ranks of this host, to {collective_name(code)}")
        posted = GlooWork(self, code, _message_digest(self.log.record(code), size), size)
        received = {peer: torch.empty(size, dtype=torch.uint8, device="cpu") for peer in messages}
        sent = {
            peer: torch.tensor([*message], dtype=torch.uint8, device="cpu")
            for peer, message in messages.items()
        }
        posted.alive = (*received.values(), *sent.values())
        self._post(posted, received, sent, messages)
        posted.wait()
        return {peer: bytes(message.tolist()) for peer, message in received.items()}

    # --- collectives ----------------------------------------------------------------------------------------------

    def before_backend_collective(self, code: int) -> None:
        self.agree(code)

    def issue_all_gather(self, output: torch.Tensor, own: torch.Tensor, code: int = UNNAMED) -> GlooWork:
        return self._begin(GlooWork, code, own.nbytes, (output, own), self._all_gather, self._post_gather)

    def _post_gather(self, posted: GlooWork) -> None:
        output, own = posted.alive
        rows = output.split(own.numel())
        rows[self.rank].copy_(own)
        self._lend(posted, own, rows)
        self._post(posted, rows, [own] * self.world, self._remote_peers)

    def issue_all_gather_lent(self, output: torch.Tensor, own: torch.Tensor, code: int = UNNAMED) -> GlooWork:
        return self._begin(GlooRows, code, own.nbytes, (output, own), self._all_gather, self._post_row)

    def _post_row(self, posted: GlooWork) -> None:
        _, own = posted.alive
        self._lend(posted, own, ())

    def issue_reduce_scatter(
        self, output: torch.Tensor, rows: torch.Tensor, average: bool, code: int = UNNAMED
    ) -> GlooWork:
        size = output.nbytes
        return self._begin(GlooSum, code, size, (output, rows), self._reduce_scatter, self._post_rows)

    def _post_rows(self, posted: GlooWork) -> None:
        assert isinstance(posted, GlooSum)
        output, rows = posted.alive
        sent = rows.split(output.numel())
        posted.output, posted.terms = output, [*sent]
        posted.offset = self.rank * posted.message_bytes
        self._lend(posted, rows, posted.terms)
        for peer in self._remote_peers:
            posted.terms[peer] = torch.empty_like(output)
        posted.alive = (*posted.terms, rows)
        self._post(posted, posted.terms, sent, self._remote_peers)

    def lend(self, num_bytes: int) -> torch.Tensor | None:
        local = self._local_peers
        return local.lend(num_bytes) if local is not None and local.peers and num_bytes else None

    def issue_exchange(self, output: torch.Tensor, rows: torch.Tensor, code: int = UNNAMED) -> GlooWork:
        """A reduce-scatter without the sum."""
        size = rows.nbytes // self.world
        return self._begin(GlooWork, code, size, (output, rows), self._reduce_scatter, self._post_exchange)

    def _post_exchange(self, posted: GlooWork) -> None:
        output, rows = posted.alive
        row_numel = rows.numel() // self.world
        sent, arriving = rows.split(row_numel), output.split(row_numel)
        arriving[self.rank].copy_(sent[self.rank])
        posted.offset = self.rank * posted.message_bytes
        self._lend(posted, rows, arriving)
        self._post(posted, arriving, sent, self._remote_peers)

    def agree(self, code: int) -> None:
        """Each round doubles the number of ranks that are known to be here."""
        if not self.checks:
            return
        digest = self._next_digest(code, 1)
        local = self._local_peers
        assert local is not None
        for distance in self._rounds:
            before, after = (self.rank - distance) % self.world, (self.rank + distance) % self.world
            posted = GlooWork(self, code, digest, 1)
            posted.local, posted.topic = local, distance
            try:
                if after in local.peers:
                    local.notify(after, digest, distance)
                else:
                    posted.alive = (torch.zeros(1, dtype=torch.uint8, device="cpu"),)
                    posted.works.append(self._send([posted.alive[0]], after, posted.tag))
                if before in local.peers:
                    posted.awaited = (before,)
                else:
                    posted.alive = (*posted.alive, torch.empty(1, dtype=torch.uint8, device="cpu"))
                    posted.works.append(self._receive([posted.alive[-1]], before, posted.tag))
            except Exception as error:  # noqa: BLE001  raised again, once peers know
                self.fail(error)
            posted.wait_for_arrival()

    def _lend(self, posted: GlooWork, sent: torch.Tensor, arriving: Sequence[torch.Tensor]) -> None:
        local = posted.local
        assert local is not None
        if not local.peers:
            return
        try:
            posted.lent[self.rank] = local.send(sent, posted.digest)
        except Exception as error:  # noqa: BLE001  raised again, once peers know
            self.fail(error)
        posted.awaited, posted.arriving = local.peers, arriving

    def _post(self, posted: GlooWork, arriving: Any, sent: Any, peers: Iterable[int]) -> None:
        tag, works = posted.tag, posted.works
        try:
            for peer in peers:
                works.append(self._receive([arriving[peer]], peer, tag))
            for peer in peers:
                works.append(self._send([sent[peer]], peer, tag))
        except Exception as error:  # noqa: BLE001  raised again, once peers know
            self.fail(error)

    def _begin(
        self,
        kind: type[GlooWork],
        code: int,
        message_bytes: int,
        tensors: tuple[torch.Tensor, ...],
        counts_as: Callable[..., Any],
        post: Callable[[GlooWork], None],
    ) -> GlooWork:
        posted = kind(self, code, self._next_digest(code, message_bytes), message_bytes)
        posted.alive = tensors
        if not message_bytes:
            return posted
        posted.local = self._local_peers
        if not num_dispatch_modes():
            post(posted)
            return posted
        # A dispatch mode may be counting collectives: show it the one that this is.
        dispatch_as(partial(counts_as, self.group), tensors, partial(post, posted), posted.works)
        return posted

    # --- failures -------------------------------------------------------------------------------------------------

    def _restart_log(self) -> None:
        super()._restart_log()
        self._local_peers, self.lends_rows = None, False

    def abandon(self, posted: GlooWork) -> None:
        """Keeps the buffers of unfinished messages alive."""
        if posted.works:
            self._abandoned.append((posted.works, posted.alive))

    def drain(self, work: Any) -> bool:
        # With shared memory only, this rank itself writes the result.
        if not work.works:
            return True
        landing = threading.Thread(target=_wait_for_all, args=(work.works, work.alive), daemon=True)
        landing.start()
        landing.join(_DRAIN_SECONDS)
        work.works = []
        return not landing.is_alive()

    def release_wait(self, waiting: Waiting, seconds_since_failure: float) -> None:
        if isinstance(waiting, (BackendWait, GlooWork)) and waiting.polls_failure:
            return
        if not isinstance(waiting, GlooWork):
            # Peers can only help out of collectives of ours.
            self._close_connections()
        elif self._asked is not waiting:
            self._asked = waiting
            self.store.ask_for_release({"tag": waiting.tag, "bytes": waiting.message_bytes})
        elif seconds_since_failure > _PEERS_ANSWER_SECONDS:
            self._close_connections()

    def release_wait_without_store(self, waiting: Waiting) -> None:
        if isinstance(waiting, GlooWork) and waiting.polls_failure:
            return
        self._close_connections()

    def help_peers(self) -> None:
        for peer, asked in self.store.releases().items():
            if (peer, asked["tag"]) in self._served:
                continue
            self._served.add((peer, asked["tag"]))
            unread = [torch.zeros(asked["bytes"], dtype=torch.uint8, device="cpu") for _ in range(2)]
            works = [
                self._receive([unread[0]], peer, asked["tag"]),
                self._send([unread[1]], peer, asked["tag"]),
            ]
            self._abandoned.append((works, unread))

    def _close_connections(self) -> None:
        """Ends all waits on this group by letting one run into gloo's own timeout."""
        for peer in self._peers:
            # A connection that its peer has closed raises at once; one to a stopped process is still open.
            with contextlib.suppress(RuntimeError):
                self._receive([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, 0).wait(
                    timedelta(milliseconds=1)
                )


# --- collectives in flight -----------------------------------------------------------------------------------


class GlooWork:
    """A collective in flight: messages between hosts, and shared memory that local peers have lent.

    Messages are gloo's works, one each way; a failed wait for them ends with the help of peers. What local peers have
    lent is announced through a pipe; a wait for that polls for a failure by itself.
    """

    # Whether the present wait polls for a failure by itself.
    polls_failure = False

    def __init__(self, channel: GlooChannel, code: int, digest: int, message_bytes: int) -> None:
        self.code = code
        # Made of the log and the size; the tag of messages is as much of it as gloo has bits for.
        self.digest = digest
        self.tag = _OUR_TAGS | (digest >> 31)
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

    output: torch.Tensor
    terms: list[torch.Tensor]

    def collect(self) -> None:
        if not self.message_bytes:
            return
        for peer in self.awaited:
            self.terms[peer] = self.row(peer).view(self.output.dtype)
        first, *others = self.terms
        torch.add(first, others[0], out=self.output)
        for term in others[1:]:
            self.output.add_(term)
        self.release_rows()


def _message_digest(digest: int, message_bytes: int) -> int:
    return digest + message_bytes * _MIX & _MASK


def _wait_for_all(works: list[Any], alive: Any) -> None:
    for work in works:
        # A message that fails is over too; those of other peers may still arrive.
        with contextlib.suppress(RuntimeError):
            work.wait(_UNTIL_THE_WATCHDOG_ENDS_IT)
