"""Small models, and a loop that compares a sharded model with a plain one step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.engine.unit.membership import membership
from shardwise.planning.lifecycle import UNSHARDED
from shardwise.testing.workloads import seeded


class TwoLayers(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.in_proj = nn.Linear(width, 4 * width)
        self.out_proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(torch.relu(self.in_proj(x)))


class DoubleLinear(nn.Module):
    """Two parallel layers; the second is optional."""

    def __init__(self, width: int = 8, use_second: bool = True) -> None:
        super().__init__()
        self.lin1 = nn.Linear(width, width)
        self.lin2 = nn.Linear(width, width)
        self.use_second = use_second

    def forward(self, x: Tensor) -> Any:
        first = torch.relu(self.lin1(x))
        return (first, torch.relu(self.lin2(x))) if self.use_second else first


class Layers(nn.Module):
    """Layers between parameters of the root; the first layer's input requires grad, as after an embedding."""

    def __init__(self, num_layers: int = 3, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(TwoLayers(width) for _ in range(num_layers))
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class RunsALayerTwice(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in (0, 1, 0, 2, 1):
            x = self.layers[index](x)
        return self.last(x)


def data(step: int, rank: int, *shape: int) -> Tensor:
    """Returns one rank's input of one step; any rank can draw it."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + rank + 7))


def full(value: Tensor) -> Tensor:
    """Returns the full tensor; shards on the host are gathered through the mesh's device."""
    return value.to(value.device_mesh.device_type).full_tensor() if isinstance(value, DTensor) else value


def own_part(whole: Tensor, like: DTensor) -> Tensor | None:
    """Returns this rank's shard of `whole`, placed as `like` is; None for placements other than Shard and Replicate."""
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(like.placements):
        if type(placement) is Shard:
            chunks = whole.chunk(like.device_mesh.size(axis), placement.dim)
            nothing = whole.narrow(placement.dim, 0, 0)
            whole = chunks[coordinate[axis]] if coordinate[axis] < len(chunks) else nothing
        elif not isinstance(placement, Replicate):
            return None
    return whole


def is_sharded(module: nn.Module) -> bool:
    """Returns whether the module shows shards of its own parameters (all of them, or none)."""
    shown = {isinstance(param, DTensor) for param in module.parameters(recurse=False)}
    assert len(shown) == 1, "some parameters are sharded and some are not"
    return shown.pop()


def is_gathered(module: nn.Module) -> bool:
    """Returns whether the module's own parameters are gathered, whether or not the module shows them."""
    units = {
        found[0] for param in module.parameters(recurse=False) if (found := membership(param)) is not None
    }
    return any(unit.state is UNSHARDED for unit in units) if units else not is_sharded(module)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.02, momentum=0.9)


def match_plain(
    build: Callable[[], nn.Module],
    shard: Callable[[Any], object],
    loss_of: Callable[[Any, int, int], Tensor],
    *,
    steps: int = 10,
    set_to_none: Callable[[int], bool] = lambda step: True,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    tolerance: float = 0.0,
) -> nn.Module:
    """Train a sharded and a plain model; losses, gradients and parameters must agree at every step.

    `loss_of(model, step, rank)` runs the forward. The plain model computes every rank's loss in turn and averages
    the gradients in rank order. Returns the sharded model. `tolerance` 0 means bitwise.
    """
    model, plain = seeded(build()), seeded(build())
    shard(model)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optim, plain_optim = optimizer(model.parameters()), optimizer(plain.parameters())
    for step in range(steps):
        loss = loss_of(model, step, rank)
        loss.backward()
        plain_losses = average_gradients(plain, lambda r: loss_of(plain, step, r), world_size)  # noqa: B023
        same(loss.detach(), plain_losses[rank], f"step {step}: loss", tolerance)
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (param.grad is None) == (expected.grad is None), (
                f"step {step}: gradient of {name} is {param.grad}"
            )
            if expected.grad is not None:
                assert isinstance(param.grad, DTensor)
                same_shard(param.grad, expected.grad, f"step {step}: gradient of {name}", 100 * tolerance)
        for each in (optim, plain_optim):
            each.step()
            each.zero_grad(set_to_none=set_to_none(step))
        same_shards(model, plain, f"step {step}: ", tolerance)
    same_parameters(model, plain, "at the end: ", tolerance)
    return model


def average_gradients(plain: nn.Module, loss_of: Callable[[int], Tensor], world_size: int) -> list[Tensor]:
    """Adds the average of all ranks' gradients to the gradients of `plain`; returns the ranks' losses."""
    totals: dict[nn.Parameter, Tensor] = {}
    losses = []
    for rank in range(world_size):
        loss = loss_of(rank)
        losses.append(loss.detach())
        params = [param for param in plain.parameters() if param.requires_grad]
        for param, grad in zip(params, torch.autograd.grad(loss, params, allow_unused=True), strict=True):
            if grad is not None:
                totals[param] = totals[param] + grad if param in totals else grad
    for param, total in totals.items():
        average = total / world_size
        param.grad = average if param.grad is None else param.grad + average
    return losses


def same_parameters(model: nn.Module, plain: nn.Module, where: str = "", tolerance: float = 0.0) -> None:
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        same(full(param.detach()), expected.detach(), f"{where}parameter {name}", tolerance)


def same_shards(model: nn.Module, plain: nn.Module, where: str = "", tolerance: float = 0.0) -> None:
    """As `same_parameters`, but each rank compares its shards: for loops, in which gathering would take most time."""
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        same_shard(param.detach(), expected.detach(), f"{where}parameter {name}", tolerance)


def same_shard(got: Tensor, want: Tensor, what: str, tolerance: float = 0.0) -> None:
    """Compares this rank's shard: all ranks together compare the full tensor, without gathering it."""
    part = own_part(want, got) if isinstance(got, DTensor) else None
    if part is None:
        same(full(got), want, what, tolerance)
        return
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, expected {tuple(want.shape)}"
    same(got.to_local(), part, what, tolerance)


def same(got: Tensor, want: Tensor, what: str, tolerance: float = 0.0) -> None:
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, expected {want.dtype}"
    if not torch.equal(got, want):
        error = float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))
        assert 0 < error <= tolerance, f"{what}: relative error {error:.3g}, allowed {tolerance:.3g}"


class Traffic(TorchDispatchMode):
    """Like `CommDebugMode`, with sizes: records (op, ranks in the group, bytes of the larger side) in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if func.namespace == "c10d" and name in ("_allgather_base_", "_reduce_scatter_base_"):
            one, other = args[0].numel(), args[1].numel()
            large, small = max(one, other), min(one, other)
            self.seen.append((name, large // small, large * args[0].element_size()))
        return func(*args, **(kwargs or {}))

    def of(self, op: str) -> list[int]:
        """Returns the group sizes of the collectives of one kind."""
        return [ranks for name, ranks, _ in self.seen if name == op]


GATHER, REDUCE = "c10d._allgather_base_", "c10d._reduce_scatter_base_"


def counted(mode: CommDebugMode) -> dict[str, int]:
    """Returns the count of each collective that `CommDebugMode` saw, by the name of the op."""
    return {str(op): count for op, count in mode.get_comm_counts().items()}


@contextmanager
def seen_weights(*modules: nn.Module) -> Iterator[list[Tensor]]:
    """Collects the parameters that these modules show during a forward.

    Each is kept as autograd would keep it; the size of its storage shows whether its memory is allocated.
    """
    seen: list[Tensor] = []

    def look(module: nn.Module, args: Any) -> None:
        seen.extend(module.parameters(recurse=False))

    handles = [module.register_forward_pre_hook(look) for module in modules]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def held_bytes(weights: list[Tensor]) -> int:
    storages = {weight.untyped_storage()._cdata: weight.untyped_storage() for weight in weights}
    return sum(storage.size() for storage in storages.values())
