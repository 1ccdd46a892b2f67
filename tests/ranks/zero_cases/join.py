"""Ranks with fewer inputs than others."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

from shardwise.zero import ZeroRedundancyOptimizer
from tests.ranks.zero_cases.models import (
    assert_same,
    assert_same_on_all_ranks,
    device,
    generator,
    set_gradients,
    small_model,
)


def joins_with_gradients_set_by_another_hook() -> None:
    """Ranks with different numbers of inputs step as if all of them had gone on to the end."""
    rank, world = dist.get_rank(), dist.get_world_size()
    steps = 3
    model, reference = small_model(), small_model()
    ours, theirs = (
        ZeroRedundancyOptimizer(model.parameters(), Adam, lr=0.01),
        Adam(reference.parameters(), lr=0.01),
    )

    class Setter(Joinable):
        def __init__(self) -> None:
            super().__init__()
            self.step = 0

        def set(self) -> None:
            set_gradients([model], self.step)
            self.step += 1

        def join_hook(self, **kwargs: Any) -> JoinHook:
            hook = JoinHook()
            hook.main_hook = self.set  # type: ignore[method-assign]
            return hook

        join_device = property(lambda self: device())  # type: ignore[assignment]
        join_process_group = property(lambda self: dist.group.WORLD)  # type: ignore[assignment]

    setter = Setter()
    with Join([setter, ours]):
        for _ in range(steps + rank):
            Join.notify_join_context(setter)
            setter.set()
            ours.step()
    for step in range(steps + world - 1):
        set_gradients([reference], step)
        theirs.step()
    assert_same(model, reference)


def joins_without_gradients_of_its_own() -> None:
    """Nobody sets a joined rank's gradients. Rank 0 owns the embedding and still has an old gradient of it when it
    joins; the others have none any more."""
    model, reference = small_model(), small_model()
    ours, theirs = (
        ZeroRedundancyOptimizer(model.parameters(), Adam, lr=0.01),
        Adam(reference.parameters(), lr=0.01),
    )

    def prepare(module: nn.Sequential, step: int) -> None:
        set_gradients([module], step)
        if step > 0:
            module[2].weight.grad = None

    with Join([ours]):
        for step in range(1 + dist.get_rank()):
            prepare(model, step)
            ours.step()
    for step in range(dist.get_world_size()):
        prepare(reference, step)
        theirs.step()
    assert_same(model, reference)


def joins_with_ddp(*, as_views: bool, balanced: bool, unused: bool) -> None:
    """With DDP, whose joined ranks throw their reduced gradients away."""
    rank = dist.get_rank()
    model, reference = small_model(), small_model()
    devices = [device()] if device().type == "cuda" else None
    # The embedding is in use on some steps only.
    how: dict[str, Any] = {"device_ids": devices, "find_unused_parameters": True}
    ddp, peer = DistributedDataParallel(model, **how), DistributedDataParallel(reference, **how)
    ours = ZeroRedundancyOptimizer(
        model.parameters(), Adam, parameters_as_bucket_view=as_views, balanced=balanced, lr=0.01
    )
    theirs = Adam(reference.parameters(), lr=0.01)

    def train(net: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        for step in range(1 + 2 * rank):
            optimizer.zero_grad()
            net.module.forward = _partial_forward(net.module, unused and step % 2 == 1)
            x = torch.randn(4, 12, generator=generator(10 * rank + step)).to(device())
            net(x).square().sum().backward()
            optimizer.step()

    with Join([ddp, ours]):
        train(ddp, ours)
    with Join([peer]):
        train(peer, theirs)
    assert_same_on_all_ranks(model)
    assert_same(model, reference)


def _partial_forward(module: nn.Sequential, leave_out: bool) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        x = module[3](module[1](module[0](x)))
        return x if leave_out else x + module[2].weight.sum()

    return forward


def steps_normally_after_a_join() -> None:
    model, reference = small_model(), small_model()
    ours, theirs = (
        ZeroRedundancyOptimizer(model.parameters(), Adam, lr=0.01),
        Adam(reference.parameters(), lr=0.01),
    )
    with Join([ours]):
        for step in range(2):
            set_gradients([model], step)
            ours.step()
    assert not ours._under_join
    set_gradients([model], 2)
    ours.step()
    for step in range(3):
        set_gradients([reference], step)
        theirs.step()
    assert_same(model, reference)
