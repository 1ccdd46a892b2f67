"""Stepping inside the backward of DistributedDataParallel."""

import random
import time
import warnings
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW

from shardwise.errors import PeerFailure
from shardwise.zero import (
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from tests.ranks.zero_cases.models import (
    OPTIMIZERS,
    assert_same,
    assert_same_on_all_ranks,
    assert_same_state,
    batches,
    ddp_of,
    device,
    fill,
    grouped,
    overlap_both,
    wide_model,
)


def overlapped(
    model: nn.Module,
    optimizer_class: type[torch.optim.Optimizer],
    *,
    interleaved: bool,
    shard_buckets: bool,
    params: Any = None,
    hook: Any = allreduce_hook,
    balanced: bool = False,
    ddp_options: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    ddp = ddp_of(model, hook=None, **(ddp_options or {}))
    optimizer = ZeroRedundancyOptimizer(
        params or model.parameters(), optimizer_class, overlap_with_ddp=True, balanced=balanced, **options
    )
    make = hook_with_zero_step_interleaved if interleaved else hook_with_zero_step
    ddp.register_comm_hook(None, make(hook, ddp, optimizer, shard_buckets=shard_buckets))
    return ddp, optimizer


def overlap_equals_ddp_with_a_local_optimizer(
    name: str, *, interleaved: bool, shard_buckets: bool, balanced: bool = False, steps: int = 3
) -> None:
    """From the first step on, and the same bits: DDP gives every rank the same gradients.

    In the second step DDP has rearranged its buckets; in the third it goes on as ever.
    """
    optimizer_class, options = OPTIMIZERS[name]
    for as_bucket_view, static_graph in product((False, True), (False, True)):
        ddp_options = {"gradient_as_bucket_view": as_bucket_view, "static_graph": static_graph}
        model, reference = wide_model(), wide_model()
        ddp, ours = overlapped(
            model,
            optimizer_class,
            params=grouped(model, 2),
            interleaved=interleaved,
            shard_buckets=shard_buckets,
            balanced=balanced,
            ddp_options=ddp_options,
            **options,
        )
        peer, theirs = ddp_of(reference, **ddp_options), optimizer_class(grouped(reference, 2), **options)
        inputs = batches(3)
        for _ in range(steps):
            overlap_both(ddp, ours, peer, theirs, next(inputs))
        ours.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            assert_same_state(ours.state_dict(), theirs.state_dict())


def a_bucket_belongs_to_one_rank_also_after_ddp_rearranged_its_buckets(*, interleaved: bool) -> None:
    model = wide_model()
    seen: list[tuple[int, tuple[Tensor, ...]]] = []

    def watching_hook(state: Any, bucket: Any) -> Any:
        seen.append((bucket.index(), tuple(bucket.parameters())))
        return allreduce_hook(state, bucket)

    ddp, optimizer = overlapped(
        model, Adam, interleaved=interleaved, shard_buckets=False, hook=watching_hook, lr=0.01
    )
    inputs = batches(1)
    layouts = []
    for _ in range(3):
        seen.clear()
        ddp(next(inputs)).sum().backward()
        layouts.append([params for _, params in seen])
        for index, params in seen:
            for param in params:
                (piece,) = optimizer.partition.pieces[optimizer.partition.index_of[param]]
                assert piece.owner == index % dist.get_world_size()
                assert (param in optimizer.optim.state) == (piece.owner == dist.get_rank())
    # In the first backward DDP has few large buckets, later those of the size it was asked for.
    assert len(layouts[1]) > len(layouts[0])


def steps_the_first_bucket_before_the_last_is_ready(*, interleaved: bool) -> bool:
    """Whether an owned parameter of the first bucket had moved when the last bucket's hook was called."""
    model = wide_model()
    first: list[Tensor] = []
    before: list[Tensor] = []
    moved: list[bool] = []

    def waiting_hook(state: Any, bucket: Any) -> Any:
        if bucket.index() == 0:
            first[:] = bucket.parameters()
            before[:] = [param.detach().clone() for param in first]
        if bucket.is_last():
            moved.append(any(not torch.equal(p, old) for p, old in zip(first, before, strict=True)))
        future = allreduce_hook(state, bucket)
        future.wait()
        return future

    ddp, _ = overlapped(model, SGD, interleaved=interleaved, shard_buckets=False, hook=waiting_hook, lr=0.1)
    inputs = batches(9)
    for _ in range(2):
        ddp(next(inputs)).square().sum().backward()
    return moved[1]


def overlap_leaves_unused_parameters_alone(*, interleaved: bool, static_graph: bool) -> None:
    """Weight decay would move them, if they were stepped by the zeros DDP puts in their place."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(12, 30), nn.Linear(30, 30), nn.Linear(30, 3)
            self.skips_b = True

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            return self.c(x if self.skips_b else self.b(x))

    model, reference = fill(Net()).to(device()), fill(Net()).to(device())
    ddp_options = {"find_unused_parameters": True, "static_graph": static_graph}
    options = {"lr": 0.1, "weight_decay": 0.5}
    ddp, ours = overlapped(
        model, SGD, interleaved=interleaved, shard_buckets=True, ddp_options=ddp_options, **options
    )
    peer, theirs = ddp_of(reference, **ddp_options), SGD(reference.parameters(), **options)
    inputs = batches(2)
    for step in range(5):
        x = next(inputs)
        for net, optimizer in ((ddp, ours), (peer, theirs)):
            # On every second step rank 0 alone uses b, and then all ranks must step it.
            net.module.skips_b = static_graph or step % 2 == 0 or dist.get_rank() != 0
            optimizer.zero_grad()
            net(x).square().sum().backward()
        theirs.step()
        assert_same(model, reference)


def overlap_steps_a_group_that_was_added_later(*, interleaved: bool) -> None:
    model, reference = wide_model(), wide_model()
    first, rest = list(model.parameters())[:5], list(model.parameters())[5:]
    ddp, ours = overlapped(model, Adam, params=first, interleaved=interleaved, shard_buckets=True, lr=0.01)
    peer, theirs = ddp_of(reference), Adam(list(reference.parameters())[:5], lr=0.01)
    inputs = batches(12)
    for step in range(4):
        if step == 2:
            ours.add_param_group({"params": rest, "lr": 0.03})
            theirs.add_param_group({"params": list(reference.parameters())[5:], "lr": 0.03})
        x = next(inputs)
        for net in (ddp, peer):
            net.zero_grad()
            net(x).square().sum().backward()
        theirs.step()
        assert_same(model, reference)


def overlap_steps_only_where_gradients_are_synchronised(*, interleaved: bool) -> None:
    model, reference = wide_model(), wide_model()
    ddp, ours = overlapped(model, AdamW, interleaved=interleaved, shard_buckets=True, lr=0.01)
    peer, theirs = ddp_of(reference), AdamW(reference.parameters(), lr=0.01)
    inputs = batches(4)
    for _ in range(3):
        x, y = next(inputs), next(inputs)
        for net, optimizer in ((ddp, ours), (peer, theirs)):
            optimizer.zero_grad()
            with net.no_sync():
                net(x).square().sum().backward()
            net(y).square().sum().backward()
        theirs.step()
        assert_same(model, reference)


def overlap_takes_a_hook_that_gives_its_result_elsewhere(*, interleaved: bool) -> None:
    def elsewhere(state: Any, bucket: dist.GradBucket):  # type: ignore[no-untyped-def]
        copied = bucket.buffer().clone().div_(dist.get_world_size())
        return dist.all_reduce(copied, async_op=True).get_future().then(lambda done: done.value()[0])

    model, reference = wide_model(), wide_model()
    ddp, ours = overlapped(model, Adam, interleaved=interleaved, shard_buckets=True, hook=elsewhere, lr=0.01)
    peer, theirs = ddp_of(reference, hook=elsewhere), Adam(reference.parameters(), lr=0.01)
    inputs = batches(5)
    for _ in range(3):
        overlap_both(ddp, ours, peer, theirs, next(inputs))


def two_optimizers_step_one_model_in_one_backward() -> None:
    """Each has half of every bucket; how many buckets are ready when one is asked differs between the ranks."""

    def late_on_the_last_rank(state: Any, bucket: Any) -> Any:
        future = allreduce_hook(state, bucket)
        if dist.get_rank() == dist.get_world_size() - 1 and not bucket.is_last():
            return future.then(lambda done: (time.sleep(0.002), done.value())[1])
        return future

    model, reference = wide_model(), wide_model()
    params, peer_params = [*model.parameters()], [*reference.parameters()]
    ddp, peer = ddp_of(model, hook=None), ddp_of(reference)
    ours = [
        ZeroRedundancyOptimizer(params[0::2], Adam, overlap_with_ddp=True, lr=0.01),
        ZeroRedundancyOptimizer(params[1::2], SGD, overlap_with_ddp=True, lr=0.1),
    ]
    theirs = [Adam(peer_params[0::2], lr=0.01), SGD(peer_params[1::2], lr=0.1)]
    hook: Any = late_on_the_last_rank
    for optimizer in ours:
        hook = hook_with_zero_step_interleaved(hook, ddp, optimizer, shard_buckets=True)
    ddp.register_comm_hook(None, hook)
    inputs = batches(13)
    for _ in range(4):
        x = next(inputs)
        for net in (ddp, peer):
            net.zero_grad()
            net(x).square().sum().backward()
        for optimizer in theirs:
            optimizer.step()
        assert_same(model, reference)


class SGDThatRaises(SGD):
    """On one rank, when it is told to."""

    raises_on: int | None = None
    error: type[Exception] = ZeroDivisionError

    def step(self, closure: Any = None) -> Any:
        if dist.get_rank() == self.raises_on:
            raise self.error("in the local step")
        return super().step(closure)


def a_rank_whose_step_raises_in_backward_keeps_no_other_waiting(
    *, interleaved: bool, error: type[Exception]
) -> None:
    ddp, ours = overlapped(wide_model(), SGDThatRaises, interleaved=interleaved, shard_buckets=True, lr=0.1)
    inputs = batches(14)
    for _ in range(2):
        ddp(next(inputs)).square().sum().backward()
    ours.optim.raises_on, ours.optim.error = 1, error  # type: ignore[attr-defined]
    raises = (
        pytest.raises(error, match=r"^in the local step$")
        if dist.get_rank() == 1
        else pytest.raises(PeerFailure, match=rf"rank 1 aborted its step: {error.__name__} .* torn")
    )
    with raises:
        ddp(next(inputs)).square().sum().backward()


def overlap_follows_a_scheduler_without_a_call_of_step() -> None:
    model, reference = wide_model(), wide_model()
    ddp, ours = overlapped(model, SGD, interleaved=True, shard_buckets=True, lr=0.1)
    peer, theirs = ddp_of(reference), SGD(reference.parameters(), lr=0.1)
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in (ours, theirs)]
    inputs = batches(6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            overlap_both(ddp, ours, peer, theirs, next(inputs))
            for schedule in schedules:
                schedule.step()
            assert_same(model, reference)


def the_watch_sees_overlapped_steps_get_on() -> None:
    """DDP's own collectives are not on the path: without this, a rank that trains would seem to stand still."""
    ddp, ours = overlapped(wide_model(), SGD, interleaved=False, shard_buckets=False, lr=0.1)
    channel, inputs = ours.agreement.channel, batches(6)
    for _ in range(3):
        before = channel.num_moves
        ddp(next(inputs)).sum().backward()
        assert channel.num_moves > before


def overlap_joins_uneven_inputs(*, interleaved: bool, shard_buckets: bool) -> None:
    model, reference = wide_model(), wide_model()
    ddp, ours = overlapped(model, Adam, interleaved=interleaved, shard_buckets=shard_buckets, lr=0.01)
    peer, theirs = ddp_of(reference), Adam(reference.parameters(), lr=0.01)
    rounds = 2 + dist.get_rank()
    for net, optimizer in ((ddp, ours), (peer, theirs)):
        inputs = batches(7)
        with Join([net]):
            for _ in range(rounds):
                optimizer.zero_grad()
                net(next(inputs)).square().sum().backward()
                if optimizer is theirs:
                    theirs.step()
    assert_same_on_all_ranks(model)
    assert_same(model, reference)


def soaks(seed: int, steps: int, *, interleaved: bool, shard_buckets: bool) -> None:
    """Ranks and hooks that sleep at random come to the same parameters as DDP with a local optimizer."""
    rng = random.Random(1000 * seed + dist.get_rank())

    def sleepy_hook(state: Any, bucket: Any) -> Any:
        _sleep(rng)
        future = allreduce_hook(state, bucket)
        return future.then(lambda done: (_sleep(rng), done.value())[1]) if rng.random() < 0.5 else future

    model, reference = wide_model(seed), wide_model(seed)
    ddp, ours = overlapped(
        model, Adam, interleaved=interleaved, shard_buckets=shard_buckets, hook=sleepy_hook, lr=0.01
    )
    peer, theirs = ddp_of(reference), Adam(reference.parameters(), lr=0.01)
    inputs = batches(seed)
    for _ in range(steps):
        _sleep(rng)
        overlap_both(ddp, ours, peer, theirs, next(inputs))


def _sleep(rng: random.Random) -> None:
    if rng.random() < 0.3:
        time.sleep(rng.random() * 0.01)
