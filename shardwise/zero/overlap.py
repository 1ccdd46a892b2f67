"""Stepping inside DistributedDataParallel's backward, bucket by bucket.

DDP reduces gradients in buckets and calls a hook for each, in order. Here the hook also steps what this rank owns of
a bucket as soon as its gradients are reduced, and sends it while later buckets are still under way:

    interleaved       hook 0       hook 1       hook 2 (last)
                      reduce 0     reduce 1     reduce 2
                                   step 0       step 1, step 2
                                   send 0       send 1, send 2, wait for all

    not interleaved   everything but the reductions happens in the last hook, so backward is never held up

A parameter may be written once its bucket's hook was called: by then backward has read it for the last time.

Ownership does not depend on DDP's buckets, so the first backward already steps. The exception is
``shard_buckets=False``, which gives a bucket to one rank: when DDP rearranges its buckets, after the first backward,
state moves to the new owners.
"""

# DDP reads the annotations of a hook as objects, so this file must not turn them into strings.
import pickle
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from shardwise.comm.exchange import Exchange, Pending, all_gather_bytes, transport_device
from shardwise.comm.streams import StreamEvent, side_streams_for
from shardwise.errors import ConfigError
from shardwise.plan.ownership import OwnedPiece
from shardwise.torch_internals import mark_stepped
from shardwise.zero.optimizer import ZeroRedundancyOptimizer
from shardwise.zero.partition import Partition
from shardwise.zero.sync import plan_piece_exchanges

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]

if TYPE_CHECKING:

    class GradBucket(Protocol):
        """torch's bucket of gradients, which its annotations leave out."""

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
    """A communication hook for ``ddp`` that reduces by ``hook`` and steps ``zero`` when the last bucket is ready.

    Args:
        hook: how gradients are reduced, such as torch's ``allreduce_hook``.
        ddp: the model; register the result with ``ddp.register_comm_hook(state, …)``, ``state`` being the hook's.
        zero: the optimizer, built with ``overlap_with_ddp=True``.
        shard_buckets: share each bucket out over ranks, which balances memory; if False a bucket belongs to one
            rank, which makes fewer messages. With ``balanced=True`` buckets are always shared.
    """
    return _overlapping(hook, ddp, zero, shard_buckets=shard_buckets, interleaved=False)


def hook_with_zero_step_interleaved(
    hook: CommHook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> CommHook:
    """Like ``hook_with_zero_step``, but steps buckets while backward still runs: for fast networks."""
    return _overlapping(hook, ddp, zero, shard_buckets=shard_buckets, interleaved=True)


def _overlapping(
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
        return backward.take(state, bucket)

    return reduce_and_step


def _check_match(ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer) -> None:
    where = f"hook_with_zero_step(), rank {zero.rank}"
    if not zero.overlap_with_ddp:
        raise ConfigError(
            "the optimizer was built to step after backward, not in it",
            where=where,
            fix="build it with ZeroRedundancyOptimizer(…, overlap_with_ddp=True)",
        )
    ranks = dist.get_process_group_ranks(ddp.process_group)
    owners = dist.get_process_group_ranks(zero.process_group)
    if ranks != owners:
        raise ConfigError(
            f"the model is replicated over ranks {ranks}, the optimizer shared out over ranks {owners}",
            where=where,
            fix="give both the same process_group",
        )
    reduced = set(ddp.parameters())
    for index, param in enumerate(zero.partition.params):
        if param.requires_grad and param not in reduced:
            raise ConfigError(
                f"parameter {index}, of shape {tuple(param.shape)}, is not in the model, so no backward would step it",
                where=where,
                fix="build the optimizer from the parameters of the model that DDP wraps",
            )


@dataclass
class _BucketPlan:
    """What there is to do for a bucket, as long as DDP puts the same parameters in it."""

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
    """Buckets between their reduction and their step; lives as long as the hook."""

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
        # DDP owns the hook through C++, where no garbage collector would see a way back.
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
        # Several optimizers may step in one backward, and what is ready first differs between ranks.
        zero.agreement.channel.num_models += 1
        self._tag_offset = zero.agreement.channel.num_models

    @torch.no_grad()
    def take(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
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
                self._ask_for_usage(plan),
                # order: the last use of these parameters in backward before their step, on a lane of its own
                self._streams.record_compute(),
            )
        )
        if bucket.is_last():
            self._finish()
        elif self._interleaved:
            self._step_what_is_ready()
        return reduced

    def _begin(self) -> None:
        # What an earlier backward left behind when it raised.
        self._waiting.clear()
        self._sending.clear()
        partition = self._zero.partition
        self._zero.agreement.channel.num_moves += 1
        partition.follow()
        if partition.revision != self._planned_revision:
            self._plans.clear()
            self._planned_revision = partition.revision

    def _step_what_is_ready(self) -> None:
        """Steps the buckets whose turn it is, in order."""
        while self._waiting and self._is_ready(self._waiting[0]):
            self._step(self._waiting.popleft())

    def _is_ready(self, first: _WaitingBucket) -> bool:
        if any(exchange.in_lockstep for exchange in first.plan.exchanges):
            # Every rank must come to the same answer. All but the newest bucket: so the next reduction is on its
            # way before anything waits for the last.
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
            _put_in_place(bucket.reduced.wait(), bucket.buffer)
            used = bucket.plan.used if bucket.usage is None else bucket.usage.of_all_ranks()
            bucket.plan.used = used
            self._step_owned(bucket, used)
            self._sending += [exchange.issue() for exchange in bucket.plan.exchanges]

    def _step_owned(self, bucket: _WaitingBucket, used: list[bool] | None) -> None:
        partition = self._zero.partition
        try:
            self._zero.local.step_pieces(
                {
                    piece: _part(partition, piece, bucket.gradients[position])
                    for position, piece in bucket.plan.owned
                    if used is None or used[position]
                }
            )
        except BaseException as error:
            self._zero.agreement.tear(error)
            raise

    # --- plans -----------------------------------------------------------------------------------------------

    def _plan(self, bucket: GradBucket) -> _BucketPlan:
        params = bucket.parameters()
        known = self._plans.get(bucket.index())
        if known is not None and len(known.params) == len(params) and all(map(_is, known.params, params)):
            return known
        partition = self._zero.partition
        # A model may have parameters that another optimizer steps.
        positions = {partition.index_of[p]: at for at, p in enumerate(params) if p in partition.index_of}
        if self._whole_buckets:
            self._hand_over(list(positions), bucket.index() % partition.world)
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

    def _hand_over(self, indices: list[int], owner: int) -> None:
        """Makes one rank the owner of these parameters, and gives it their state. All ranks come here together."""
        partition, group = self._zero.partition, self._zero.process_group
        moving = [index for index in indices if partition.pieces[index][0].owner != owner]
        if moving:
            given = all_gather_bytes(pickle.dumps(self._zero.local.give_up(moving, owner)), group)
            if partition.rank == owner:
                for states in given:
                    self._zero.local.take_over(pickle.loads(states))

    # --- parameters nobody used ------------------------------------------------------------------------------

    def _ask_for_usage(self, plan: _BucketPlan) -> "_Usage | None":
        """DDP fills unused parameters' gradients with zeros, by which the optimizer must not step."""
        ddp = self._ddp()
        if ddp is None or not (ddp.find_unused_parameters or ddp.static_graph):
            return None
        if ddp.static_graph and plan.used is not None:
            return None
        return _Usage(plan.params, self._zero.process_group)


class _Usage:
    """Which parameters got a gradient on any rank; asked for along with the reduction."""

    def __init__(self, params: list[Tensor], group: dist.ProcessGroup) -> None:
        here = [param.grad is not None for param in params]
        self._flags = torch.tensor(here, dtype=torch.uint8, device=transport_device(group, params[0].device))
        self._work = dist.all_reduce(self._flags, dist.ReduceOp.MAX, group=group, async_op=True)

    def of_all_ranks(self) -> list[bool]:
        if self._work is not None:
            self._work.wait()
        return [bool(flag) for flag in self._flags.tolist()]


def _gradients_in(bucket: GradBucket) -> list[Tensor]:
    """A bucket's gradients. DDP packs complex ones as pairs of real numbers, and then gives out only half of them."""
    params = bucket.parameters()
    if not params[0].is_complex():
        return bucket.gradients()
    numbers = torch.view_as_complex(bucket.buffer().view(-1, 2))
    parts = numbers.split([param.numel() for param in params])
    return [part.as_strided(param.shape, param.stride()) for part, param in zip(parts, params, strict=True)]


def _put_in_place(reduced: Tensor, buffer: Tensor) -> None:
    """A hook may give its result in another tensor than the bucket's."""
    if reduced.data_ptr() != buffer.data_ptr():
        buffer.copy_(reduced)


def _part(partition: Partition, piece: OwnedPiece, grad: Tensor) -> Tensor:
    return grad if partition.is_whole(piece) else partition.gradient_of(piece, grad)


def _is(a: Tensor, b: Tensor) -> bool:
    return a is b
