"""Models, gradients and batches that are the same on every rank, and what it means to agree."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

from shardwise.zero import ZeroRedundancyOptimizer

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.05}),
    "momentum": (SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": (SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adam": (Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adagrad": (Adagrad, {"lr": 0.05}),
    "rmsprop": (RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
}


_force_cuda = False


@contextmanager
def on_cuda() -> Iterator[None]:
    """Cases inside put their models on the GPU, whatever the group."""
    global _force_cuda
    _force_cuda = True
    try:
        yield
    finally:
        _force_cuda = False


def device() -> torch.device:
    if _force_cuda or dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def generator(seed: int) -> torch.Generator:
    """A generator of one's own: ranks that are threads share the default one."""
    return torch.Generator().manual_seed(seed)


def fill(module: nn.Module, seed: int = 0) -> nn.Module:
    """The same values on every rank."""
    source = generator(seed)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=source) / 8)
    return module


def small_model(dtypes: tuple[torch.dtype, ...] = (torch.float32,), seed: int = 0) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(12, 37), nn.Linear(37, 5), nn.Embedding(2067, 8), nn.Linear(5, 3)]
    model = nn.Sequential(*(layer.to(dtypes[i % len(dtypes)]) for i, layer in enumerate(layers)))
    return fill(model, seed).to(device())  # type: ignore[return-value]


def set_gradients(models: list[nn.Module], step: int) -> None:
    """Gradients as after a reduction: the same on every rank, and for every model."""
    source = generator(1000 + step)
    for params in zip(*(model.parameters() for model in models), strict=True):
        grad = torch.randn(params[0].shape, generator=source)
        for param in params:
            param.grad = grad.to(param.device, param.dtype, copy=True)


def assert_same(a: nn.Module, b: nn.Module) -> None:
    """The same bits."""
    for (name, ours), theirs in zip(a.named_parameters(), b.parameters(), strict=True):
        apart = (ours - theirs).abs().max()
        assert torch.equal(ours, theirs), f"{name} differs by up to {apart:.3g}"


def assert_same_on_all_ranks(module: nn.Module) -> None:
    for name, param in module.named_parameters():
        first = param.detach().clone()
        dist.broadcast(first, src=0)
        assert torch.equal(first, param), f"{name} is not what rank 0 has"


def grouped(model: nn.Module, num_groups: int) -> list[dict[str, Any]]:
    params = list(model.parameters())
    options: list[dict[str, Any]] = [{}, {"lr": 0.002}, {"weight_decay": 0.2, "lr": 0.03}]
    return [{"params": params[i::num_groups], **options[i]} for i in range(num_groups)]


def batches(seed: int) -> Iterator[Tensor]:
    """This rank's inputs, without end."""
    step = 0
    while True:
        yield torch.randn(4, 12, generator=generator(100_000 * seed + 100 * step + dist.get_rank())).to(
            device()
        )
        step += 1


class Shuffled(nn.Module):
    """Runs its layers in another order than it lists them, so that DDP rearranges its buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(5))
        self.first, self.last = nn.Linear(12, 24), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in (3, 0, 4, 1, 2):
            x = torch.tanh(self.layers[index](x))
        return self.last(x)


def wide_model(seed: int = 0) -> nn.Module:
    return fill(Shuffled(), seed).to(device())


def ddp_of(model: nn.Module, *, hook: Any = allreduce_hook, **options: Any) -> DistributedDataParallel:
    # Buckets of a few KB, so that a small model has several, and DDP rearranges them after the first backward.
    ddp = DistributedDataParallel(
        model, device_ids=[device()] if device().type == "cuda" else None, bucket_cap_mb=0.001, **options
    )
    if hook is not None:
        # Without a hook DDP multiplies by 1/world instead of dividing by world, which rounds differently.
        ddp.register_comm_hook(None, hook)
    return ddp


def assert_same_state(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["param_groups"] == theirs["param_groups"]
    assert list(ours["state"]) == list(theirs["state"])
    for index, values in theirs["state"].items():
        assert ours["state"][index].keys() == values.keys()
        for key, value in values.items():
            mine = ours["state"][index][key]
            if isinstance(value, Tensor):
                assert mine.shape == value.shape
                assert mine.dtype == value.dtype
                assert torch.equal(mine.cpu(), value.cpu()), f"{key} of parameter {index} differs"
            else:
                assert mine == value


def share_from(source: int, value: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def owned_numel(optimizer: ZeroRedundancyOptimizer) -> int:
    return sum(tensor.numel() for group in optimizer.optim.param_groups for tensor in group["params"])


def trained(
    optimizer_name: str = "adam", *, balanced: bool = False, as_views: bool = False, steps: int = 3
) -> tuple[nn.Module, ZeroRedundancyOptimizer, nn.Module, torch.optim.Optimizer]:
    """A model, and the same trained by the unsharded optimizer."""
    optimizer_class, options = OPTIMIZERS[optimizer_name]
    model, reference = small_model(), small_model()
    ours = ZeroRedundancyOptimizer(
        grouped(model, 2), optimizer_class, parameters_as_bucket_view=as_views, balanced=balanced, **options
    )
    theirs = optimizer_class(grouped(reference, 2), **options)
    train_both(model, ours, reference, theirs, range(steps))
    return model, ours, reference, theirs


def train_both(
    model: nn.Module,
    ours: ZeroRedundancyOptimizer,
    reference: nn.Module,
    theirs: torch.optim.Optimizer,
    steps: range,
) -> None:
    for step in steps:
        set_gradients([model, reference], step)
        ours.step()
        theirs.step()
        assert_same(model, reference)


def overlap_both(
    ddp: nn.Module,
    ours: ZeroRedundancyOptimizer,
    peer: nn.Module,
    theirs: torch.optim.Optimizer,
    batch: Tensor,
) -> None:
    """One step: ours inside the backward, theirs after it."""
    for net, optimizer in ((ddp, ours), (peer, theirs)):
        optimizer.zero_grad()
        net(batch).square().sum().backward()
    theirs.step()
    assert_same(ddp, peer)
