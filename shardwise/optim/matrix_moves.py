"""Moves matrices between the ranks that hold their shards and the ranks that step them whole.

    shards      rank 0 [a0 b0 c0]   rank 1 [a1 b1 c1]   rank 2 [a2 b2 c2]
                     ╲ one all-to-all each way ╱
    whole       rank 0 [a0 a1 a2]   rank 1 [b0 b1 b2]   rank 2 [c0 c1 c2]

Bytes travel, so matrices of several dtypes share a message. On CUDA an exchange runs on a side stream, beside whatever
is computed until it is waited for; so does packing and copying out, if asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from shardwise.comm.channels.channel import collective_code
from shardwise.comm.collectives.agreement import gather_bytes
from shardwise.comm.collectives.group import DONE, GroupCollectives, drain
from shardwise.planning.matrix_owners import Held, HeldBlock, RowsPlan, Shape, plan_messages, senders
from shardwise.torch_internals import copy_all, unseen_by_modes

_TO_OWNERS = collective_code("send shards to the owners of matrices")
_FROM_OWNERS = collective_code("send stepped matrices back to their shards")
_NO_ROWS = torch.empty(0, dtype=torch.uint8, device="cpu")
_CURRENT = nullcontext()


class Route(NamedTuple):
    """A tensor that is moved: what each rank holds of it, who owns it, and its dtype while it travels."""

    held: tuple[HeldBlock | None, ...]
    owner: int
    shape: Shape
    dtype: torch.dtype


def route(held: Held, owner: int, shape: Shape, dtype: torch.dtype) -> Route:
    return Route(tuple(held), owner, shape, dtype)


class Batch:
    """Tensors that travel together; how they do is planned once. ``members`` are their numbers, for the caller."""

    def __init__(self, routes: Sequence[Route], members: Sequence[int] = ()) -> None:
        self.routes, self.members = routes, members
        # By direction: True to the owners, False from them.
        self.plans: dict[bool, _Plan] = {}


class Movement:
    """A batch on its way. ``send`` starts it; ``wait`` returns once the values are in place.

    Packing and copying out are the current stream's. *Beside* compute, they run on the side stream: what was computed
    until now is sent, and what is computed from now on need not end first, even if ``send`` comes later.
    """

    def __init__(
        self,
        moves: MatrixMoves,
        plan: _Plan,
        sources: Sequence[torch.Tensor | None],
        targets: Sequence[torch.Tensor | None],
        *,
        is_beside: bool,
    ) -> None:
        self._moves, self._plan = moves, plan
        self._sources, self._targets = sources, targets
        self._beside = moves.stream if is_beside else None
        self._work: Any = None
        self._event: torch.cuda.Event | None = None
        self._is_sent = self._is_over = False
        with unseen_by_modes():
            # Allocated by the current stream, which waits for the movement before it frees them: memory of the side
            # stream would be lost to compute.
            self._rows = torch.empty(moves.world * plan.row_bytes, dtype=torch.uint8, device=moves.device)
            self._arrived = torch.empty_like(self._rows)
        if self._beside is not None:
            # order: compute before packing, because it wrote what is sent, and used the memory that is written
            self._beside.wait_stream(torch.cuda.current_stream())

    def send(self) -> None:
        """Starts it, unless it has started."""
        if self._is_sent:
            return
        self._is_sent = True
        stream = self._moves.stream
        with unseen_by_modes(), _on(self._beside):
            self._plan.pack(self._rows, self._sources, self._targets)
            if self._beside is None:
                # Gradients that are sent in backward may be dropped before the movement is over.
                self._sources = ()
            if self._plan.row_bytes and stream is not None and self._beside is None:
                # order: packing before the exchange, because it sends what was packed
                stream.wait_stream(torch.cuda.current_stream())
            with _on(stream):
                self._work = self._moves.exchange(self._arrived, self._rows, self._plan)
                if self._beside is not None:
                    self._work.wait()
                    self._plan.unpack(self._arrived, self._targets)
                if stream is not None:
                    self._event = stream.record_event()

    def wait(self) -> None:
        if self._is_over:
            return
        self.send()
        with unseen_by_modes():
            if self._beside is None:
                self._work.wait()
            if self._event is not None:
                # order: the movement before compute, because compute reads what it received
                torch.cuda.current_stream().wait_event(self._event)
            if self._beside is None:
                self._plan.unpack(self._arrived, self._targets)
        self._end()

    def abandon(self) -> None:
        """Drops the movement after its group has failed."""
        if self._moves.stream is not None:
            # order: the movement before compute, because compute's allocator reuses its memory
            torch.cuda.current_stream().wait_stream(self._moves.stream)
        if self._work is None or drain(self._work):
            self._end()

    def _end(self) -> None:
        self._is_sent = self._is_over = True
        # alive: what is sent, until it has been sent; and what the side stream packs, which compute may have allocated
        self._rows = self._arrived = _NO_ROWS
        self._sources = self._targets = ()
        self._work = None


class MatrixMoves:
    """The movements of one group. ``bytes_sent`` counts what this rank has sent, padding included."""

    def __init__(self, calls: GroupCollectives) -> None:
        self._calls = calls
        self.world, self.device = calls.world, calls.device
        self.stream = torch.cuda.Stream() if calls.device.type == "cuda" and calls.world > 1 else None
        self.bytes_sent = 0

    def to_owners(
        self,
        batch: Batch,
        shards: Sequence[torch.Tensor | None],
        wholes: Sequence[torch.Tensor | None],
        *,
        is_beside: bool = False,
    ) -> Movement:
        """Fills ``wholes``, given on their owners, from all ranks' ``shards``; values are cast to their dtype.

        It has started, unless ``is_beside`` on a GPU: then it starts when it is sent.
        """
        plan = self._plan(batch, is_to_owners=True)
        movement = Movement(self, plan, shards, wholes, is_beside=is_beside)
        if not is_beside or self.stream is None:
            movement.send()
        return movement

    def from_owners(
        self,
        batch: Batch,
        wholes: Sequence[torch.Tensor | None],
        shards: Sequence[torch.Tensor | None],
    ) -> Movement:
        """Fills every rank's ``shards`` from ``wholes``, which their owners pass."""
        movement = Movement(self, self._plan(batch, is_to_owners=False), wholes, shards, is_beside=False)
        movement.send()
        return movement

    def exchange(self, arrived: torch.Tensor, rows: torch.Tensor, plan: _Plan) -> Any:
        """Issues the exchange of rows on the current stream."""
        if not plan.row_bytes:
            return DONE
        work = self._calls.issue_exchange(arrived, rows, plan.code)
        self._calls.channel.after_backend_collective()
        self.bytes_sent += plan.row_bytes * (self.world - 1)
        return work

    def gather(self, own: bytes, code: int) -> list[bytes]:
        """Returns every rank's bytes, all of the same length; on CUDA it does not wait for compute."""
        calls = self._calls
        if calls.world == 1:
            return [own]
        with unseen_by_modes(), torch.inference_mode(False), _on(self.stream):
            return gather_bytes(own, calls, calls.device, code)

    def _plan(self, batch: Batch, *, is_to_owners: bool) -> _Plan:
        known = batch.plans.get(is_to_owners)
        if known is None:
            calls, routes = self._calls, batch.routes
            planned = plan_messages(_journeys(routes, is_to_owners), calls.world)
            known = batch.plans[is_to_owners] = _Plan(
                _TO_OWNERS if is_to_owners else _FROM_OWNERS,
                planned.row_bytes,
                _cut(planned, routes, calls, is_to_owners, sends=True),
                _cut(planned, routes, calls, is_to_owners, sends=False),
                [
                    (position, block, route.dtype)
                    for position, route in enumerate(routes)
                    if route.owner == calls.rank
                    and (block := route.held[calls.rank]) is not None
                    and block.numel
                ],
            )
        return known


class _Piece(NamedTuple):
    """A block that travels: its dtype, and its positions among the parts of the rows and among those of the tensors."""

    dtype: torch.dtype
    in_rows: int
    in_tensors: int


class _Tensor(NamedTuple):
    """A tensor of a batch as it is cut into blocks: a shard is one, a whole matrix has several.

    If those follow each other in memory, one split into ``lengths`` has them, at ``picks``: a step makes many views.
    """

    position: int
    blocks: list[HeldBlock]
    is_shard: bool
    lengths: list[int]
    picks: list[int]

    def cut(self, tensor: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        if tensor is None:
            # Nothing to send: what arrives means nothing.
            return [None] * len(self.blocks)
        is_plain = tensor.is_contiguous()
        if self.is_shard:
            return (tensor.view(-1) if is_plain else tensor,)
        if is_plain and self.lengths:
            parts = tensor.view(-1).split_with_sizes(self.lengths)
            return [parts[pick] for pick in self.picks]
        return [view_of(tensor, block) for block in self.blocks]


@dataclass(frozen=True)
class _Cuts:
    """How the rows that a rank sends, or receives, are cut into blocks: in ``lengths`` elements of ``dtype``."""

    lengths: list[int]
    # Bytes if blocks have several.
    dtype: torch.dtype
    tensors: list[_Tensor]
    pieces: list[_Piece]

    def pair(
        self, rows: torch.Tensor, tensors: Sequence[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Blocks in the rows, and the same in ``tensors``: shards or whole matrices. What is not given is left out."""
        in_rows, given = [], []
        parts = rows.view(self.dtype).split_with_sizes(self.lengths)
        blocks = [block for each in self.tensors for block in each.cut(tensors[each.position])]
        for dtype, row, position in self.pieces:
            part, block = parts[row], blocks[position]
            if block is None:
                continue
            if dtype is not self.dtype:
                part = part.view(dtype)
            in_rows.append(part if block.dim() == 1 else part.view(block.shape))
            given.append(block)
        return in_rows, given


class _Plan(NamedTuple):
    """How a batch moves one way.

    ``kept``: the matrices that this rank owns, by position, the blocks of them that it holds itself, and the dtype in
    which others' travel.
    """

    code: int
    row_bytes: int
    sent: _Cuts
    received: _Cuts
    kept: list[tuple[int, HeldBlock, torch.dtype]]

    def pack(
        self,
        rows: torch.Tensor,
        sources: Sequence[torch.Tensor | None],
        targets: Sequence[torch.Tensor | None],
    ) -> None:
        """Fills the rows; and copies what does not travel."""
        ours, theirs = [], []
        for position, block, dtype in self.kept:
            source, target = sources[position], targets[position]
            if source is None or target is None:
                continue
            if self.code == _TO_OWNERS:
                # Cast like what travels, so that results do not depend on who the owner is.
                source, target = source.to(dtype).view(block.sizes), view_of(target, block)
            else:
                source = view_of(source, block).view(target.shape)
            ours.append(target)
            theirs.append(source)
        _copy(ours, theirs)
        if self.row_bytes:
            _copy(*self.sent.pair(rows, sources))

    def unpack(self, arrived: torch.Tensor, targets: Sequence[torch.Tensor | None]) -> None:
        if self.row_bytes:
            in_arrived, received = self.received.pair(arrived, targets)
            _copy(received, in_arrived)


def _cut(
    plan: RowsPlan, routes: Sequence[Route], calls: GroupCollectives, is_to_owners: bool, *, sends: bool
) -> _Cuts:
    """Cuts the rows that this rank sends, or those that it receives."""
    placed: list[tuple[int, int, HeldBlock]] = []
    for message in plan.messages:
        if (message.source if sends else message.target) == calls.rank:
            # The block that travels is what the rank that is not the owner holds.
            block = routes[message.matrix].held[message.source if is_to_owners else message.target]
            assert block is not None
            row = message.target if sends else message.source
            placed.append((row * plan.row_bytes + message.start_bytes, message.matrix, block))
    placed.sort(key=itemgetter(0))
    tensors: list[_Tensor] = []
    numbers: dict[tuple[int, HeldBlock], int] = {}
    for position in sorted({matrix for _, matrix, _ in placed}):
        found = {block for _, matrix, block in placed if matrix == position}
        each = _cut_tensor(position, routes[position].shape, found, is_shard=is_to_owners == sends)
        tensors.append(each)
        for block in each.blocks:
            numbers[position, block] = len(numbers)
    dtypes = {each.dtype for each in routes}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    spans = [
        (start // dtype.itemsize, block.numel * routes[matrix].dtype.itemsize // dtype.itemsize)
        for start, matrix, block in placed
    ]
    lengths, picks = _split(spans, calls.world * plan.row_bytes // dtype.itemsize)
    pieces = [
        _Piece(routes[matrix].dtype, pick, numbers[matrix, block])
        for pick, (_, matrix, block) in zip(picks, placed, strict=True)
    ]
    return _Cuts(lengths, dtype, tensors, pieces)


def _cut_tensor(position: int, shape: Shape, found: set[HeldBlock], *, is_shard: bool) -> _Tensor:
    blocks = sorted(found, key=lambda block: block.offsets)
    spans = [span for block in blocks if (span := _span_in(shape, block)) is not None]
    lengths, picks = _split(spans, prod(shape)) if len(spans) == len(blocks) else ([], [])
    return _Tensor(position, blocks, is_shard, lengths, picks)


def _split(spans: Sequence[tuple[int, int]], total: int) -> tuple[list[int], list[int]]:
    """Lengths of all parts if spans, given in order by start and length, are cut out of ``total``, and which are spans.

    Nothing if spans overlap.
    """
    lengths: list[int] = []
    picks, end = [], 0
    for start, length in spans:
        if start < end:
            return [], []
        if start > end:
            lengths.append(start - end)
        picks.append(len(lengths))
        lengths.append(length)
        end = start + length
    if total > end:
        lengths.append(total - end)
    return lengths, picks


def _span_in(shape: Shape, block: HeldBlock) -> tuple[int, int] | None:
    """Where a block starts in a contiguous matrix, and its length, if its elements follow each other there."""
    if block.is_flat:
        return block.offsets[0], block.numel
    if block.sizes[1:] != tuple(shape[1:]):
        return None
    return block.offsets[0] * prod(shape[1:]), block.numel


def _journeys(routes: Sequence[Route], is_to_owners: bool) -> list[tuple[int, int, int, int]]:
    found = []
    for index, (held, owner, _, dtype) in enumerate(routes):
        others = senders(held, owner) if is_to_owners else range(len(held))
        for rank in others:
            block = held[rank]
            if block is not None:
                ends = (rank, owner) if is_to_owners else (owner, rank)
                found.append((index, *ends, block.numel * dtype.itemsize))
    return found


def view_of(whole: torch.Tensor, block: HeldBlock) -> torch.Tensor:
    """The block of a whole tensor, as a view of it."""
    if block.is_flat:
        return whole.view(-1)[block.offsets[0] : block.offsets[0] + block.sizes[0]]
    strides = whole.stride()
    start = sum(offset * stride for offset, stride in zip(block.offsets, strides, strict=True))
    return whole.as_strided(block.sizes, strides, whole.storage_offset() + start)


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return _CURRENT if stream is None else torch.cuda.stream(stream)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        copy_all(targets, sources)
