"""Stepping inside DistributedDataParallel's backward, bucket by bucket.

DDP reduces gradients in buckets and calls a hook for each, in order. The hook made here also steps the pieces of a
bucket that this rank owns as soon as its gradients are reduced, and sends them while later buckets are in flight:

    interleaved       hook 0       hook 1       hook 2 (last)
                      reduce 0     reduce 1     reduce 2
                                   step 0       step 1, step 2
                                   send 0       send 1, send 2, wait for all

    not interleaved   everything but the reduces happens in the last hook, so backward never waits

Parameters may be written once their bucket's hook was called: backward does not read them any more.

Ownership does not depend on DDP's buckets, so the first backward already steps. The exception is
``shard_buckets=False``, where one rank owns a whole bucket: when DDP rebuilds its buckets, after the first backward,
state moves to the new owners.
"""

# No `from __future__ import annotations`: DDP checks a hook's annotations, which must be objects, not strings.
import pickle
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from shardwise.comm.exchange import Exchange, Pending, all_gather_bytes, transport_device
from shardwise.comm.streams import StreamEvent, side_streams_for
from shardwise.errors import ConfigError
from shardwise.planning.ownership import OwnedPiece
from shardwise.torch_internals import mark_stepped
from shardwise.zero.optimizer import ZeroRedundancyOptimizer
from shardwise.zero.partition import Partition
from shardwise.zero.sync import plan_piece_exchanges

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]

if TYPE_CHECKING:

    class GradBucket(Protocol):
        """torch's class, as torch has no annotations for it."""

        def index(self) -> int: ...
        def is_last(self) -> bool: ...
        def parameters(self) -> list[Tensor]: ...
        def gradients(self) -> list[Tensor]: ...
        def buffer(self) -> Tensor: ...
else:
    GradBucket = dist.GradBucket

CommHook = Callable[[Any, GradBucket], Future[Tensor]]


def hook_with_zero_step(
    hook: CommHook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> CommHook:
    """Returns a communication hook for ``ddp`` that reduces with ``hook`` and steps ``zero`` after the last bucket.

    Args:
        hook: reduces gradients, such as torch's ``allreduce_hook``.
        ddp: the model; register the returned hook with ``ddp.register_comm_hook(state, …)``, with ``hook``'s state.
        zero: the optimizer, created with ``overlap_with_ddp=True``.
        shard_buckets: shard each bucket over the ranks, which balances memory; if False, one rank owns a bucket, which
            needs fewer messages. With ``balanced=True`` buckets are always sharded.
    """
    return _hook_that_steps(hook, ddp, zero, shard_buckets=shard_buckets, interleaved=False)


def hook_with_zero_step_interleaved(
    hook: CommHook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> CommHook:
    """Like ``hook_with_zero_step``, but steps buckets while backward still runs: for fast networks."""
    return _hook_that_steps(hook, ddp, zero, shard_buckets=shard_buckets, interleaved=True)


def _hook_that_steps(
    hook: CommHook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    *,
    shard_buckets: bool,
    interleaved: bool,
) -> CommHook:
    _check_match(ddp, zero)
    whole_buckets = not shard_buckets and not zero.partition.balanced
    backward = _SteppingBackward(hook, ddp, zero, whole_buckets=whole_buckets, interleaved=interleaved)
    zero.is_stepped_in_backward = True

    def reduce_and_step(state: Any, bucket: GradBucket) -> Future[Tensor]:
        return backward.reduce_and_step(state, bucket)

    return reduce_and_step


def _check_match(ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer) -> None:
    where = f"hook_with_zero_step(), rank {zero.rank}"
    if not zero.overlap_with_ddp:
        raise ConfigError(
            "the optimizer was created to step after backward, not in it",
            where=where,
            fix="create it with ZeroRedundancyOptimizer(…, overlap_with_ddp=True)",
        )
    ranks = dist.get_process_group_ranks(ddp.process_group)
    owners = dist.get_process_group_ranks(zero.process_group)
    if ranks != owners:
        raise ConfigError(
            f"the model is replicated over ranks {ranks}, the optimizer sharded over ranks {owners}",
            where=where,
            fix="pass the same process_group to both",
        )
    reduced = set(ddp.parameters())
    for index, param in enumerate(zero.partition.params):
        if param.requires_grad and param not in reduced:
            raise ConfigError(
                f"parameter {index}, of shape {tuple(param.shape)}, is not in the model, so no backward would step it",
                where=where,
                fix="create the optimizer with the parameters of the model that DDP wraps",
            )


@dataclass
class _BucketPlan:
    """How to step and send a bucket; valid as long as DDP puts the same parameters in it."""

    params: list[Tensor]
    owned: list[tuple[int, OwnedPiece]]
    exchanges: list[Exchange]
    used: list[bool] | None = None


@dataclass
class _WaitingBucket:
    plan: _BucketPlan
    gradients: list[Tensor]
    buffer: Tensor
    reduced: Future[Tensor]
    usage: "_Usage | None"
    last_read: StreamEvent


class _SteppingBackward:
    """Reduces and steps buckets, and keeps them between the two; lives as long as the hook."""

    def __init__(
        self,
        hook: CommHook,
        ddp: DistributedDataParallel,
        zero: ZeroRedundancyOptimizer,
        *,
        whole_buckets: bool,
        interleaved: bool,
    ) -> None:
        self._hook = hook
        # A weak reference: DDP owns the hook through C++, where the garbage collector cannot see a cycle.
        self._ddp = weakref.ref(ddp)
        self._zero = zero
        self._whole_buckets = whole_buckets
        self._interleaved = interleaved
        self._plans: dict[int, _BucketPlan] = {}
        self._planned_revision = zero.partition.revision
        self._waiting: deque[_WaitingBucket] = deque()
        self._sending: list[Pending] = []
        device = zero.partition.params[0].device
        self._streams = side_streams_for(device)
        # Several optimizers may step in one backward, in an order that differs between ranks: their tags must differ.
        zero.agreement.channel.num_models += 1
        self._tag_offset = zero.agreement.channel.num_models

    @torch.no_grad()
    def reduce_and_step(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        if bucket.index() == 0:
            self._begin()
        reduced = self._hook(state, bucket)
        plan = self._plan(bucket)
        self._waiting.append(
            _WaitingBucket(
                plan,
                _gradients_in(bucket),
                bucket.buffer(),
                reduced,
                self._issue_usage(plan),
                # order: the last use of these parameters in backward before their step, on a side stream
                self._streams.record_compute(),
            )
        )
        if bucket.is_last():
            self._finish()
        elif self._interleaved:
            self._step_ready_buckets()
        return reduced

    def _begin(self) -> None:
        # Left over from a backward that raised.
        self._waiting.clear()
        self._sending.clear()
        partition = self._zero.partition
        self._zero.agreement.channel.num_moves += 1
        partition.detect_moves()
        if partition.revision != self._planned_revision:
            self._plans.clear()
            self._planned_revision = partition.revision

    def _step_ready_buckets(self) -> None:
        while self._waiting and self._is_ready(self._waiting[0]):
            self._step(self._waiting.popleft())

    def _is_ready(self, first: _WaitingBucket) -> bool:
        if any(exchange.in_lockstep for exchange in first.plan.exchanges):
            # Every rank must get the same answer. All buckets but the newest are ready: the next reduce is then in
            # flight before anything waits for the one before.
            return len(self._waiting) > 1
        return first.reduced.done()

    def _finish(self) -> None:
        with self._zero.agreement.exchanging():
            while self._waiting:
                self._step(self._waiting.popleft())
            with self._streams.reduce:
                for sending in self._sending:
                    sending.wait()
            self._sending.clear()
            # order: the last update before whatever uses the parameters next
            self._streams.compute_waits_for(self._streams.reduce.record_event())
        mark_stepped(self._zero)

    def _step(self, bucket: _WaitingBucket) -> None:
        stream = self._streams.reduce
        stream.wait_event(bucket.last_read)
        with stream:
            _copy_into_bucket(bucket.reduced.wait(), bucket.buffer)
            used = bucket.plan.used if bucket.usage is None else bucket.usage.of_all_ranks()
            bucket.plan.used = used
            self._step_owned(bucket, used)
            self._sending += [exchange.issue() for exchange in bucket.plan.exchanges]

    def _step_owned(self, bucket: _WaitingBucket, used: list[bool] | None) -> None:
        partition = self._zero.partition
        try:
            self._zero.local.step_pieces(
                {
                    piece: _gradient_of_piece(partition, piece, bucket.gradients[position])
                    for position, piece in bucket.plan.owned
                    if used is None or used[position]
                }
            )
        except BaseException as error:
            self._zero.agreement.report_torn_step(error)
            raise

    # --- plans -----------------------------------------------------------------------------------------------

    def _plan(self, bucket: GradBucket) -> _BucketPlan:
        params = bucket.parameters()
        known = self._plans.get(bucket.index())
        if known is not None and len(known.params) == len(params) and all(map(is_, known.params, params)):
            return known
        partition = self._zero.partition
        # Another optimizer may step some of the model's parameters.
        positions = {partition.index_of[p]: at for at, p in enumerate(params) if p in partition.index_of}
        if self._whole_buckets:
            self._transfer(list(positions), bucket.index() % partition.world)
        owned = [
            (at, piece)
            for index, at in positions.items()
            for piece in partition.pieces[index]
            if piece.owner == partition.rank
        ]
        exchanges = plan_piece_exchanges(
            partition, self._zero.process_group, positions, tag_offset=self._tag_offset
        )
        plan = self._plans[bucket.index()] = _BucketPlan(params, owned, exchanges)
        return plan

    def _transfer(self, indices: list[int], owner: int) -> None:
        """Makes one rank the owner of these parameters, and sends it their state. Called on all ranks together."""
        partition, group = self._zero.partition, self._zero.process_group
        moving = [index for index in indices if partition.pieces[index][0].owner != owner]
        if moving:
            by_rank = all_gather_bytes(pickle.dumps(self._zero.local.transfer_to(owner, moving)), group)
            if partition.rank == owner:
                for states in by_rank:
                    self._zero.local.receive(pickle.loads(states))

    # --- unused parameters -----------------------------------------------------------------------------------

    def _issue_usage(self, plan: _BucketPlan) -> "_Usage | None":
        """Finds out which parameters are unused: DDP gives them zero gradients, but they must not be stepped."""
        ddp = self._ddp()
        if ddp is None or not (ddp.find_unused_parameters or ddp.static_graph):
            return None
        if ddp.static_graph and plan.used is not None:
            return None
        return _Usage(plan.params, self._zero.process_group)


class _Usage:
    """Which parameters got a gradient on any rank; all-reduced while the bucket is reduced."""

    def __init__(self, params: list[Tensor], group: dist.ProcessGroup) -> None:
        has_grad = [param.grad is not None for param in params]
        self._flags = torch.tensor(
            has_grad, dtype=torch.uint8, device=transport_device(group, params[0].device)
        )
        self._work = dist.all_reduce(self._flags, dist.ReduceOp.MAX, group=group, async_op=True)

    def of_all_ranks(self) -> list[bool]:
        if self._work is not None:
            self._work.wait()
        return [bool(flag) for flag in self._flags.tolist()]


def _gradients_in(bucket: GradBucket) -> list[Tensor]:
    """Returns a bucket's gradients. For complex ones, packed as pairs of reals, DDP's own method returns half."""
    params = bucket.parameters()
    if not params[0].is_complex():
        return bucket.gradients()
    numbers = torch.view_as_complex(bucket.buffer().view(-1, 2))
    parts = numbers.split([param.numel() for param in params])
    return [part.as_strided(param.shape, param.stride()) for part, param in zip(parts, params, strict=True)]


def _copy_into_bucket(reduced: Tensor, buffer: Tensor) -> None:
    """Copies a hook's result into the bucket, if it is another tensor."""
    if reduced.data_ptr() != buffer.data_ptr():
        buffer.copy_(reduced)


def _gradient_of_piece(partition: Partition, piece: OwnedPiece, grad: Tensor) -> Tensor:
    return grad if partition.is_whole(piece) else partition.gradient_of(piece, grad)
