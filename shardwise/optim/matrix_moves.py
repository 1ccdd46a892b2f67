"""Moves matrices between the ranks that hold their shards and the ranks that step them whole.

    shards      rank 0 [a0 b0 c0]   rank 1 [a1 b1 c1]   rank 2 [a2 b2 c2]
                     ╲ one all-to-all each way ╱
    whole       rank 0 [a0 a1 a2]   rank 1 [b0 b1 b2]   rank 2 [c0 c1 c2]

Bytes travel, so matrices of several dtypes share a message. On CUDA a movement runs on a side stream, beside whatever
is computed until it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from shardwise.comm.channels.channel import collective_code
from shardwise.comm.collectives.agreement import gather_bytes
from shardwise.comm.collectives.group import GroupCollectives, drain
from shardwise.planning.matrix_owners import Held, HeldBlock, RowsPlan, Shape, plan_messages, senders
from shardwise.torch_internals import copy_all, unseen_by_modes

# Which parameters have gradients may differ from step to step.
_KEPT_PLANS = 1000
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
        self._plans: dict[Hashable, _Plan] = {}
        self._stream = torch.cuda.Stream() if calls.device.type == "cuda" and calls.world > 1 else None
        self.bytes_sent = 0

    def to_owners(
        self,
        routes: Sequence[Route],
        shards: Sequence[torch.Tensor | None],
        wholes: Sequence[torch.Tensor | None],
        key: Hashable = None,
    ) -> Movement:
        """Fills ``wholes``, given on their owners, from all ranks' ``shards``; values are cast to their dtype.

        Routes with the same ``key`` are the same: they are planned once.
        """
        targets, sources = [], []
        for route, shard, whole in zip(routes, shards, wholes, strict=True):
            own = route.held[self._calls.rank]
            if whole is not None and shard is not None and own is not None:
                targets.append(view_of(whole, own))
                # Cast like what travels, so that results do not depend on who the owner is.
                sources.append(shard.to(route.dtype).view(own.sizes))
        _copy(targets, sources)
        return self._issue(routes, shards, wholes, key, is_to_owners=True)

    def from_owners(
        self,
        routes: Sequence[Route],
        wholes: Sequence[torch.Tensor | None],
        shards: Sequence[torch.Tensor | None],
        key: Hashable = None,
    ) -> Movement:
        """Fills every rank's ``shards`` from ``wholes``, which their owners pass; ``key`` as in ``to_owners``."""
        targets, sources = [], []
        for route, whole, shard in zip(routes, wholes, shards, strict=True):
            own = route.held[self._calls.rank]
            if whole is not None and shard is not None and own is not None:
                targets.append(shard)
                sources.append(view_of(whole, own).view(shard.shape))
        _copy(targets, sources)
        return self._issue(routes, wholes, shards, key, is_to_owners=False)

    def _issue(
        self,
        routes: Sequence[Route],
        sources: Sequence[torch.Tensor | None],
        targets: Sequence[torch.Tensor | None],
        key: Hashable,
        *,
        is_to_owners: bool,
    ) -> Movement:
        plan = self._plan(routes, is_to_owners, key)
        calls = self._calls
        if not plan.row_bytes:
            return Movement(None, None, _nothing, None)
        with unseen_by_modes():
            rows = torch.empty(calls.world * plan.row_bytes, dtype=torch.uint8, device=calls.device)
            arrived = torch.empty_like(rows)
            in_rows, sent = plan.sent.pair(rows, sources, are_whole=not is_to_owners)
            in_arrived, received = plan.received.pair(arrived, targets, are_whole=is_to_owners)
            _copy(in_rows, sent)
            work, event = self._exchange(arrived, rows, _TO_OWNERS if is_to_owners else _FROM_OWNERS)
        self.bytes_sent += plan.row_bytes * (calls.world - 1)
        return Movement(work, event, lambda: _copy(received, in_arrived), (rows, arrived))

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

    def _plan(self, routes: Sequence[Route], is_to_owners: bool, key: Hashable) -> _Plan:
        known = self._plans.get((key, is_to_owners)) if key is not None else None
        if known is None:
            planned = plan_messages(_journeys(routes, is_to_owners), self._calls.world)
            sent, received = (
                _cut(planned, routes, self._calls, is_to_owners, sends) for sends in (True, False)
            )
            known = _Plan(planned.row_bytes, sent, received)
            if len(self._plans) >= _KEPT_PLANS:
                self._plans.clear()
            if key is not None:
                self._plans[key, is_to_owners] = known
        return known


class _Piece(NamedTuple):
    """A block in the rows. ``span``: where its elements start in the whole matrix and how many follow each other."""

    matrix: int
    dtype: torch.dtype
    block: HeldBlock
    span: tuple[int, int] | None


@dataclass(frozen=True)
class _Cuts:
    """How the rows that a rank sends, or receives, are cut into blocks: a gap before each, and after the last."""

    # In elements of ``dtype``, bytes if blocks have several.
    lengths: list[int]
    dtype: torch.dtype
    pieces: list[_Piece]

    def pair(
        self, rows: torch.Tensor, tensors: Sequence[torch.Tensor | None], *, are_whole: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Blocks in the rows, and the same in ``tensors``: shards or whole matrices. What is not given is left out."""
        # One split instead of one view a block: a step makes many.
        in_rows, given = [], []
        for part, piece in zip(rows.view(self.dtype).split(self.lengths)[1::2], self.pieces, strict=True):
            tensor = tensors[piece.matrix]
            if tensor is None:
                # Nothing to send: what arrives means nothing.
                continue
            if piece.dtype is not self.dtype:
                part = part.view(piece.dtype)
            is_plain = tensor.is_contiguous()
            if not are_whole and is_plain:
                tensor = tensor.view(-1)
            elif are_whole and is_plain and piece.span is not None:
                start, numel = piece.span
                tensor = tensor.as_strided((numel,), (1,), tensor.storage_offset() + start)
            else:
                tensor = view_of(tensor, piece.block) if are_whole else tensor
                part = part.view(tensor.shape)
            in_rows.append(part)
            given.append(tensor)
        return in_rows, given


class _Plan(NamedTuple):
    row_bytes: int
    sent: _Cuts
    received: _Cuts


def _cut(
    plan: RowsPlan, routes: Sequence[Route], calls: GroupCollectives, is_to_owners: bool, sends: bool
) -> _Cuts:
    """Cuts the rows that this rank sends, or those that it receives."""
    placed = []
    for message in plan.messages:
        if (message.source if sends else message.target) != calls.rank:
            continue
        route = routes[message.matrix]
        # The block that travels is what the rank that is not the owner holds.
        block = route.held[message.source if is_to_owners else message.target]
        assert block is not None
        row = message.target if sends else message.source
        piece = _Piece(message.matrix, route.dtype, block, _span_in(route.shape, block))
        placed.append((row * plan.row_bytes + message.start_bytes, piece))
    placed.sort(key=itemgetter(0))
    dtypes = {each.dtype for each in routes}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    lengths, end = [], 0
    for start, piece in placed:
        stop = start + piece.block.numel * piece.dtype.itemsize
        lengths += [(start - end) // dtype.itemsize, (stop - start) // dtype.itemsize]
        end = stop
    lengths.append((calls.world * plan.row_bytes - end) // dtype.itemsize)
    return _Cuts(lengths, dtype, [piece for _, piece in placed])


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


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        copy_all(targets, sources)


def _nothing() -> None:
    pass
