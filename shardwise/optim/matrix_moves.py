"""Moves matrices between the ranks that hold their shards and the ranks that step them whole.

    shards      rank 0 [a0 b0 c0]   rank 1 [a1 b1 c1]   rank 2 [a2 b2 c2]
                     ╲ one all-to-all each way ╱
    whole       rank 0 [a0 a1 a2]   rank 1 [b0 b1 b2]   rank 2 [c0 c1 c2]

Bytes travel, so matrices of several dtypes share a message. On CUDA a movement runs on a side stream, beside whatever
is computed until it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from shardwise.comm.channels.channel import collective_code
from shardwise.comm.collectives.agreement import gather_bytes
from shardwise.comm.collectives.group import GroupCollectives, drain
from shardwise.planning.matrix_owners import Held, HeldBlock, RowsPlan, Shape, plan_messages, senders
from shardwise.torch_internals import copy_all, unseen_by_modes

_TO_OWNERS = collective_code("send shards to the owners of matrices")
_FROM_OWNERS = collective_code("send stepped matrices back to their shards")


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
    """A movement that has been issued; ``wait`` returns once the values are in place."""

    def __init__(
        self, work: Any, event: torch.cuda.Event | None, finish: Callable[[], None], alive: object
    ) -> None:
        self._work, self._event, self._finish = work, event, finish
        self._is_over = False
        self._alive = alive  # alive: what is sent, until it has been sent

    def wait(self) -> None:
        if self._is_over:
            return
        with unseen_by_modes():
            if self._work is not None:
                self._work.wait()
            if self._event is not None:
                # order: the exchange before compute, because compute reads what it received
                torch.cuda.current_stream().wait_event(self._event)
            self._finish()
        self._end()

    def abandon(self) -> None:
        """Drops the movement after its group has failed."""
        if self._event is not None:
            # order: the exchange before compute, because compute's allocator reuses its memory
            torch.cuda.current_stream().wait_event(self._event)
        if self._work is None or drain(self._work):
            self._end()

    def _end(self) -> None:
        self._is_over = True
        self._alive = self._work = None
        self._finish = _nothing


class MatrixMoves:
    """The movements of one group. ``bytes_sent`` counts what this rank has sent, padding included."""

    def __init__(self, calls: GroupCollectives) -> None:
        self._calls = calls
        self._stream = torch.cuda.Stream() if calls.device.type == "cuda" and calls.world > 1 else None
        self.bytes_sent = 0

    def to_owners(
        self,
        batch: Batch,
        shards: Sequence[torch.Tensor | None],
        wholes: Sequence[torch.Tensor | None],
    ) -> Movement:
        """Fills ``wholes``, given on their owners, from all ranks' ``shards``; values are cast to their dtype."""
        plan = self._plan(batch, is_to_owners=True)
        targets, sources = [], []
        for position, block in plan.kept:
            whole, shard = wholes[position], shards[position]
            if whole is not None and shard is not None:
                targets.append(view_of(whole, block))
                # Cast like what travels, so that results do not depend on who the owner is.
                sources.append(shard.to(batch.routes[position].dtype).view(block.sizes))
        _copy(targets, sources)
        return self._issue(plan, shards, wholes, _TO_OWNERS)

    def from_owners(
        self,
        batch: Batch,
        wholes: Sequence[torch.Tensor | None],
        shards: Sequence[torch.Tensor | None],
    ) -> Movement:
        """Fills every rank's ``shards`` from ``wholes``, which their owners pass."""
        plan = self._plan(batch, is_to_owners=False)
        targets, sources = [], []
        for position, block in plan.kept:
            whole, shard = wholes[position], shards[position]
            if whole is not None and shard is not None:
                targets.append(shard)
                sources.append(view_of(whole, block).view(shard.shape))
        _copy(targets, sources)
        return self._issue(plan, wholes, shards, _FROM_OWNERS)

    def _issue(
        self,
        plan: _Plan,
        sources: Sequence[torch.Tensor | None],
        targets: Sequence[torch.Tensor | None],
        code: int,
    ) -> Movement:
        calls = self._calls
        if not plan.row_bytes:
            return Movement(None, None, _nothing, None)
        with unseen_by_modes():
            rows = torch.empty(calls.world * plan.row_bytes, dtype=torch.uint8, device=calls.device)
            arrived = torch.empty_like(rows)
            in_rows, sent = plan.sent.pair(rows, sources)
            _copy(in_rows, sent)
            work, event = self._exchange(arrived, rows, code)
        self.bytes_sent += plan.row_bytes * (calls.world - 1)
        return Movement(work, event, partial(_unpack, plan.received, arrived, targets), (rows, arrived))

    def gather(self, own: bytes, code: int) -> list[bytes]:
        """Returns every rank's bytes, all of the same length; on CUDA it does not wait for compute."""
        calls = self._calls
        if calls.world == 1:
            return [own]
        with unseen_by_modes(), torch.inference_mode(False), torch.cuda.stream(self._stream):
            return gather_bytes(own, calls, calls.device, code)

    def _exchange(self, arrived: torch.Tensor, rows: torch.Tensor, code: int) -> tuple[Any, Any]:
        if self._stream is None:
            return self._calls.issue_exchange(arrived, rows, code), None
        # order: packing before the exchange, because it sends what was packed
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work = self._calls.issue_exchange(arrived, rows, code)
            self._calls.channel.after_backend_collective()
            return work, self._stream.record_event()

    def _plan(self, batch: Batch, *, is_to_owners: bool) -> _Plan:
        known = batch.plans.get(is_to_owners)
        if known is None:
            calls, routes = self._calls, batch.routes
            planned = plan_messages(_journeys(routes, is_to_owners), calls.world)
            own = [
                (position, route.held[calls.rank])
                for position, route in enumerate(routes)
                if route.owner == calls.rank
            ]
            known = batch.plans[is_to_owners] = _Plan(
                planned.row_bytes,
                _cut(planned, routes, calls, is_to_owners, sends=True),
                _cut(planned, routes, calls, is_to_owners, sends=False),
                [(position, block) for position, block in own if block is not None and block.numel],
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
    """``kept``: positions of the matrices that this rank owns, and the blocks of them that it holds itself."""

    row_bytes: int
    sent: _Cuts
    received: _Cuts
    kept: list[tuple[int, HeldBlock]]


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


def _unpack(cuts: _Cuts, arrived: torch.Tensor, targets: Sequence[torch.Tensor | None]) -> None:
    in_arrived, received = cuts.pair(arrived, targets)
    _copy(received, in_arrived)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        copy_all(targets, sources)


def _nothing() -> None:
    pass
