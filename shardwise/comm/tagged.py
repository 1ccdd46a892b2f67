"""Collectives on gloo, out of messages that carry a tag made of the path.

gloo's own collectives pair the n-th call of one rank with the n-th call of another, whatever they are: data is mixed,
or, where sizes differ, the process ends. Here a message is for whoever comes by the same path. Ranks that part wait
for each other, with their data unharmed, until the watch explains it; ranks that do not part pay nothing for it.

    rank 0  gather 'layers.1'   tag 7a3 ──▶          ◀── tag 51c   gather 'layers.2'  rank 1

Reduce-scatter is an exchange of rows, summed here in rank order: bitwise that of a loop over ranks. (gloo's own is an
all-reduce and a slice: twice the bytes, in an order of its own.)

A wait in gloo cannot be called off. A rank that a verdict has ended asks its peers to take part in the collective it
is stuck in, with bytes that nobody reads; a peer that cannot answer costs the connections.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.counting import count_as
from shardwise.comm.wire import Foreign, Waiting, WatchedWire
from shardwise.torch_internals import all_gather_call, backend_of, modes_are_watching, reduce_scatter_call

# Above what people use for tags of their own on the same group.
_OUR_TAGS = 1 << 30
_MASK = (1 << 61) - 1
_MIX = 0xBF58476D1CE4E5B
# The watch ends a wait, not gloo: a timeout of gloo's own closes all connections.
_UNTIL_THE_WATCH_ENDS_IT = timedelta(days=7)
_PEERS_ANSWER_SECONDS = 1.0
_LANDING_SECONDS = 0.2


class Posted:
    """Messages under way: what this rank sends and what it is to receive."""

    def __init__(self, wire: TaggedWire, code: int, tag: int, message_bytes: int) -> None:
        self.code = code
        self.tag = tag
        self.message_bytes = message_bytes
        self.wire = wire
        self.works: list[Any] = []
        self.alive: tuple[torch.Tensor, ...] = ()  # alive: until the messages have landed

    def wait(self) -> None:
        wire = self.wire
        wire.waiting = self
        try:
            for work in self.works:
                work.wait(*wire.patience)
        except RuntimeError as error:
            wire.fail(error)
        finally:
            wire.waiting = None
        self.works = []
        if wire.verdict is not None:
            # What has landed may be a peer's help to get out of here.
            wire.heed_verdict()


class PostedSum(Posted):
    """Rows under way: ``wait`` sums what has arrived, in rank order."""

    terms: list[torch.Tensor]
    output: torch.Tensor

    def wait(self) -> None:
        super().wait()
        first, *others = self.terms
        if not others:
            self.output.copy_(first)
            return
        torch.add(first, others[0], out=self.output)
        for term in others[1:]:
            self.output.add_(term)


class TaggedWire(WatchedWire):
    """A gloo group on CPUs."""

    carries = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        backend = backend_of(group, device)
        self._send, self._receive = backend.send, backend.recv
        # Each rank begins with its neighbour, so that not all of them send to the same one.
        self._peers = [(self.rank + step) % self.world for step in range(1, self.world)]
        self._rounds = [1 << power for power in range((self.world - 1).bit_length())]
        # Unwatched, a wait ends with the group's own timeout.
        self.patience = (_UNTIL_THE_WATCH_ENDS_IT,) if self.checks else ()
        self._asked: Waiting | None = None
        self._served: set[tuple[int, int]] = set()
        # alive: for good, because messages to and from ranks that have left may still land
        self._left_behind: list[Any] = []

    def _tag(self, code: int, message_bytes: int) -> int:
        """The path and the size: gloo ends a process that receives more than it asked for."""
        return _OUR_TAGS | ((self.note(code) + message_bytes * _MIX & _MASK) >> 31)

    # --- collectives ----------------------------------------------------------------------------------------------

    def admit(self, code: int) -> None:
        self.agree(code)

    def gather(self, output: torch.Tensor, own: torch.Tensor, code: int) -> Posted:
        """Every rank's ``own`` into ``output``, in rank order."""
        size = own.nbytes
        posted = Posted(self, code, self._tag(code, size), size)
        posted.alive = (output, own)
        self._begin(posted, all_gather_call, self._post_gather)
        return posted

    def _post_gather(self, posted: Posted) -> None:
        output, own = posted.alive
        rows = output.split(own.numel())
        rows[self.rank].copy_(own)
        self._post(posted, rows, [own] * self.world)

    def reduce_scatter(self, output: torch.Tensor, rows: torch.Tensor, code: int) -> Posted:
        """The sum over ranks of their rows for this one, in ``output``."""
        size = output.nbytes
        posted = PostedSum(self, code, self._tag(code, size), size)
        posted.output, posted.terms = output, [rows]
        posted.alive = (output, rows)
        self._begin(posted, reduce_scatter_call, self._post_rows)
        return posted

    def _post_rows(self, posted: Posted) -> None:
        assert isinstance(posted, PostedSum)
        output, rows = posted.alive
        received = torch.empty_like(rows)
        posted.alive = (received, rows)
        sent, arriving = rows.split(output.numel()), received.split(output.numel())
        posted.terms = [*arriving]
        posted.terms[self.rank] = sent[self.rank]
        self._post(posted, arriving, sent)

    def exchange(self, output: torch.Tensor, rows: torch.Tensor, code: int) -> Posted:
        """Every rank's row for this one, in rank order, in ``output``: a reduce-scatter whose sum is the caller's."""
        size = rows.nbytes // self.world
        posted = Posted(self, code, self._tag(code, size), size)
        posted.alive = (output, rows)
        self._begin(posted, reduce_scatter_call, self._post_exchange)
        return posted

    def _post_exchange(self, posted: Posted) -> None:
        output, rows = posted.alive
        row_numel = rows.numel() // self.world
        sent, arriving = rows.split(row_numel), output.split(row_numel)
        arriving[self.rank].copy_(sent[self.rank])
        self._post(posted, arriving, sent)

    def agree(self, code: int) -> None:
        """Each round doubles the number of ranks that this one knows to have come here."""
        if not self.checks:
            return
        tag = self._tag(code, 1)
        for distance in self._rounds:
            posted = Posted(self, code, tag, 1)
            posted.alive = (torch.zeros(1, dtype=torch.uint8), torch.empty(1, dtype=torch.uint8))
            sent, received = posted.alive
            try:
                posted.works = [
                    self._receive([received], (self.rank - distance) % self.world, tag),
                    self._send([sent], (self.rank + distance) % self.world, tag),
                ]
            except RuntimeError as error:
                self.fail(error)
            posted.wait()

    def _post(self, posted: Posted, arriving: Any, sent: Any) -> None:
        tag, works = posted.tag, posted.works
        try:
            for peer in self._peers:
                works.append(self._receive([arriving[peer]], peer, tag))
            for peer in self._peers:
                works.append(self._send([sent[peer]], peer, tag))
        except RuntimeError as error:
            self.fail(error)

    def _begin(
        self,
        posted: Posted,
        counts_as: Callable[[dist.ProcessGroup], Callable[..., Any]],
        post: Callable[[Posted], None],
    ) -> None:
        if not posted.message_bytes:
            return
        if not modes_are_watching():
            post(posted)
            return
        # Somebody may be counting collectives: ours count as the ones that they are.
        group = self.group()
        assert group is not None
        count_as(counts_as(group), posted.alive, partial(post, posted), posted.works)

    # --- the end of a path ----------------------------------------------------------------------------------------

    def land(self, work: Any) -> bool:
        if not work.works:
            return True
        landing = threading.Thread(target=_wait_for_all, args=(work.works, work.alive), daemon=True)
        landing.start()
        landing.join(_LANDING_SECONDS)
        work.works = []
        return not landing.is_alive()

    def let_out(self, waiting: Waiting, seconds_since_verdict: float) -> None:
        if isinstance(waiting, Foreign) and waiting.looks_itself:
            return
        if not isinstance(waiting, Posted):
            # Nobody can take part in a collective that is not ours.
            self._close_connections()
        elif self._asked is not waiting:
            self._asked = waiting
            self.board.ask_for_release({"tag": waiting.tag, "bytes": waiting.message_bytes})
        elif seconds_since_verdict > _PEERS_ANSWER_SECONDS:
            self._close_connections()

    def let_out_alone(self, waiting: Waiting) -> None:
        self._close_connections()

    def serve_peers(self) -> None:
        for peer, asked in self.board.releases().items():
            if (peer, asked["tag"]) in self._served:
                continue
            self._served.add((peer, asked["tag"]))
            unread = [torch.zeros(asked["bytes"], dtype=torch.uint8) for _ in range(2)]
            works = [
                self._receive([unread[0]], peer, asked["tag"]),
                self._send([unread[1]], peer, asked["tag"]),
            ]
            self._left_behind.append((works, unread))

    def _close_connections(self) -> None:
        """A wait that runs into gloo's own timeout ends all others on the group with it."""
        for peer in self._peers:
            # Connections that a peer has closed already have nothing to wait for; that to a stopped one is open.
            with contextlib.suppress(RuntimeError):
                self._receive([torch.empty(1, dtype=torch.uint8)], peer, 0).wait(timedelta(milliseconds=1))


def _wait_for_all(works: list[Any], alive: Any) -> None:
    try:
        for work in works:
            work.wait(_UNTIL_THE_WATCH_ENDS_IT)
    except RuntimeError:
        # The connections are gone: nothing more will land.
        return
