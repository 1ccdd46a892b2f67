"""What one rank does in the tests of ZeroRedundancyOptimizer; the same on gloo, on NCCL, and on threads.

Every function here runs on each rank of a fresh default group and raises if something is wrong.
"""

import copy
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
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


def device() -> torch.device:
    if dist.get_backend() == "nccl":
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


# --- parity ------------------------------------------------------------------------------------------------------


def matches_the_unsharded_optimizer(name: str, *, balanced: bool, steps: int = 3) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    for maximize, num_groups, dtype in product((False, True), (1, 2, 3), (torch.float32, torch.bfloat16)):
        model, reference = small_model((dtype,)), small_model((dtype,))
        ours = ZeroRedundancyOptimizer(
            grouped(model, num_groups),
            optimizer_class,
            parameters_as_bucket_view=(num_groups == 2) != maximize,
            balanced=balanced,
            maximize=maximize,
            **options,
        )
        theirs = optimizer_class(grouped(reference, num_groups), maximize=maximize, **options)
        for step in range(steps):
            set_gradients([model, reference], step)
            ours.step()
            theirs.step()
            assert_same(model, reference)


def stays_within_an_ulp_a_step_where_a_small_parameter_is_cut(name: str, steps: int = 5) -> None:
    """A parameter too small to be aligned starts its kernels elsewhere when it is cut, and elements move between a
    vector loop and its scalar tail, which may round differently: one ulp a step, of the larger of the value before
    and after it."""
    optimizer_class, options = OPTIMIZERS[name]
    initial = [torch.randn(numel, generator=generator(numel)).to(device()) for numel in (17, 1003)]
    ours_params = [tensor.clone().requires_grad_() for tensor in initial]
    theirs_params = [tensor.clone().requires_grad_() for tensor in initial]
    ours = ZeroRedundancyOptimizer(ours_params, optimizer_class, balanced=True, **options)
    theirs = optimizer_class(theirs_params, **options)
    assert any(len(pieces) > 1 for pieces in ours._partition.pieces)
    allowed = [torch.zeros_like(tensor) for tensor in initial]
    for step in range(steps):
        before = [param.detach().abs() for param in theirs_params]
        source = generator(step)
        for mine, peer in zip(ours_params, theirs_params, strict=True):
            mine.grad = torch.randn(mine.shape, generator=source).to(device())
            peer.grad = mine.grad.clone()
        ours.step()
        theirs.step()
        for mine, peer, was, room in zip(ours_params, theirs_params, before, allowed, strict=True):
            scale = torch.maximum(was, peer.detach().abs())
            room += torch.nextafter(scale, torch.full_like(scale, torch.inf)) - scale
            assert ((mine - peer).abs() <= room).all()


def steps_parameters_of_several_dtypes(*, as_views: bool, balanced: bool) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float32)
    model, reference = small_model(dtypes), small_model(dtypes)
    ours = ZeroRedundancyOptimizer(
        model.parameters(), Adam, parameters_as_bucket_view=as_views, balanced=balanced, lr=0.01
    )
    theirs = Adam(reference.parameters(), lr=0.01)
    for step in range(3):
        set_gradients([model, reference], step)
        ours.step()
        theirs.step()
        assert_same(model, reference)


def steps_a_model_of_two_devices(*, as_views: bool, balanced: bool) -> None:
    """Model parallel: on the CPU and, where there is one, on the GPU."""

    def build() -> nn.Sequential:
        model = small_model()
        model[0].cpu()
        model[3].cpu()
        return model

    model, reference = build(), build()
    ours = ZeroRedundancyOptimizer(
        model.parameters(), AdamW, parameters_as_bucket_view=as_views, balanced=balanced, lr=0.01
    )
    theirs = AdamW(reference.parameters(), lr=0.01)
    for step in range(3):
        set_gradients([model, reference], step)
        ours.step()
        theirs.step()
        assert_same(model, reference)
    assert [param.device for param in model.parameters()] == [
        param.device for param in reference.parameters()
    ]


def reduced_gradients_give_the_local_optimizers_step() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model, reference = small_model(), small_model()
    ours, theirs = (
        ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.01),
        SGD(reference.parameters(), lr=0.01),
    )
    for module in (model, reference):
        x = torch.full((4, 12), float(rank + 1), device=device())
        module[1](module[0](x)).sum().backward()
        for param in module.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= world
    ours.step()
    theirs.step()
    assert_same(model, reference)


def groups_up_front_and_added_later_agree_with_the_unsharded_optimizer(
    *, balanced: bool, as_views: bool
) -> None:
    def split(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        params = list(model.parameters())
        return [p for p in params if p.dim() > 1], [p for p in params if p.dim() == 1]

    up_front, later, reference = small_model(), small_model(), small_model()
    both = [
        {"params": split(up_front)[0], "weight_decay": 0.0},
        {"params": split(up_front)[1], "weight_decay": 0.1},
    ]
    how: dict[str, Any] = {"balanced": balanced, "parameters_as_bucket_view": as_views, "lr": 0.01}
    first = ZeroRedundancyOptimizer(both, AdamW, **how)
    second = ZeroRedundancyOptimizer(split(later)[0], AdamW, weight_decay=0.0, **how)
    second.add_param_group({"params": split(later)[1], "weight_decay": 0.1})
    plain = AdamW(
        [
            {"params": split(reference)[0], "weight_decay": 0.0},
            {"params": split(reference)[1], "weight_decay": 0.1},
        ],
        lr=0.01,
    )
    for step in range(3):
        set_gradients([up_front, later, reference], step)
        for optimizer in (first, second, plain):
            optimizer.step()
        assert_same(up_front, reference)
        assert_same(later, reference)


# --- the interface -----------------------------------------------------------------------------------------------


def exposes_state_and_groups_as_any_optimizer_does() -> None:
    x = torch.tensor([1.0], device=device(), requires_grad=True)
    optimizer = ZeroRedundancyOptimizer([x], SGD, lr=0.1, momentum=0.9)
    x.backward()
    optimizer.step()
    assert torch.equal(x, torch.tensor([0.9], device=device()))
    if optimizer.rank == 0:
        assert torch.equal(optimizer.optim.state[x]["momentum_buffer"], torch.tensor([1.0], device=device()))
    optimizer.zero_grad()

    optimizer.consolidate_state_dict(to=0)
    saved = share_from(0, optimizer.state_dict() if optimizer.rank == 0 else None)
    group = saved["param_groups"][0]
    wanted = {"lr": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 0, "dampening": 0}
    assert {key: group[key] for key in wanted} == wanted
    assert {key: value for key, value in group.items() if key != "params"} == {
        key: value for key, value in optimizer.param_groups[0].items() if key != "params"
    }

    again = ZeroRedundancyOptimizer([x], SGD, lr=0.01)
    again.load_state_dict(saved)
    assert again.param_groups[0]["lr"] == 0.1
    x.backward()
    again.step()
    torch.testing.assert_close(x, torch.tensor([0.71], device=device()))
    if again.rank == 0:
        torch.testing.assert_close(
            again.optim.state[x]["momentum_buffer"], torch.tensor([1.9], device=device())
        )
    assert again.param_groups[0]["params"][0].device == x.device


def share_from(source: int, value: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def follows_a_learning_rate_scheduler() -> None:
    x = torch.tensor([1.0], device=device(), requires_grad=True)
    y = torch.tensor([1.0], device=device(), requires_grad=True)
    ours, theirs = ZeroRedundancyOptimizer([x], SGD, lr=0.01), SGD([y], lr=0.01)
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in (ours, theirs)]
    for _ in range(5):
        for tensor, optimizer, schedule in zip((x, y), (ours, theirs), schedules, strict=True):
            optimizer.zero_grad()
            tensor.backward()
            optimizer.step()
            schedule.step()
        assert torch.equal(x, y)
    assert ours.optim.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] / 0.1


class SGDWithStepArgument(SGD):
    def step(self, closure: Any = None, kwarg: Any = None) -> None:
        super().step()
        kwarg.append(5)


class SGDWithNewKey(SGD):
    def step(self, closure: Any = None) -> None:
        super().step()
        self.param_groups[0]["new_key"] = 0.1


class SGDWithoutClosure(SGD):
    def step(self) -> Any:
        return super().step()


def steps_optimizers_with_steps_of_their_own() -> None:
    def stepped(
        optimizer_class: type[torch.optim.Optimizer], *args: Any, **kwargs: Any
    ) -> ZeroRedundancyOptimizer:
        x = torch.tensor([1.0], device=device(), requires_grad=True)
        optimizer = ZeroRedundancyOptimizer([x], optimizer_class, lr=0.1)
        x.backward()
        optimizer.step(*args, **kwargs)
        assert torch.equal(x, torch.tensor([0.9], device=device()))
        return optimizer

    seen: list[int] = []
    stepped(SGDWithStepArgument, 0, kwarg=seen)
    assert seen == [5]
    assert stepped(SGDWithNewKey).param_groups[0]["new_key"] == 0.1
    stepped(SGDWithoutClosure)


def steps_with_a_closure(*, as_views: bool, balanced: bool) -> None:
    value = float(dist.get_rank() + 1)
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(2.0)
    model.to(device())
    x, target = torch.tensor([value], device=device()), torch.tensor([value + 2.0 + 1.0], device=device())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), SGD, parameters_as_bucket_view=as_views, balanced=balanced, lr=0.1
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.l1_loss(model(x), target)
        loss.backward()
        # As in data parallel training: every rank steps by the average.
        for param in model.parameters():
            assert param.grad is not None
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        return loss

    assert optimizer.step(closure=closure).item() == 1.0
    mean = (dist.get_world_size() + 1) / 2
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[1.0 + 0.1 * mean]], device=device()))
    torch.testing.assert_close(model.bias.detach(), torch.tensor([2.1], device=device()))


def clears_gradients_of_parameters_it_does_not_own() -> None:
    model = small_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    set_gradients([model], 0)
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


def takes_parameters_in_any_form() -> None:
    model = small_model()
    ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    ZeroRedundancyOptimizer(list(model.parameters()), SGD, lr=0.1)
    optimizer = ZeroRedundancyOptimizer(
        [
            {"params": (layer.weight for layer in model), "weight_decay": 0.0},
            {"params": [layer.bias for layer in model if isinstance(layer, nn.Linear)], "weight_decay": 0.01},
        ],
        AdamW,
        lr=0.01,
        betas=(0.9, 0.99),
        eps=1e-7,
    )
    assert len(optimizer.param_groups) == len(optimizer.optim.param_groups) == 2
    assert [group["weight_decay"] for group in optimizer.optim.param_groups] == [0.0, 0.01]
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.99)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, Joinable)


def owned_numel(optimizer: ZeroRedundancyOptimizer) -> int:
    return sum(tensor.numel() for group in optimizer.optim.param_groups for tensor in group["params"])


def shares_out_equal_element_counts() -> None:
    world = dist.get_world_size()
    sizes = [9, 7, 5, 3]
    plain = [torch.rand(size, 1, device=device()) for size in sizes * world]
    assert owned_numel(ZeroRedundancyOptimizer(plain, SGD, lr=0.01)) == sum(sizes)

    trainable = [torch.rand(size, 1, device=device(), requires_grad=True) for size in (sizes * world)[:-1]]
    optimizer = ZeroRedundancyOptimizer(trainable, SGD, lr=0.01)
    optimizer.add_param_group({"params": [torch.rand(3, 1, device=device())]})
    assert owned_numel(optimizer) == sum(sizes)
    assert len(optimizer.param_groups) == len(optimizer.optim.param_groups) == 2


def steps_beside_a_large_frozen_parameter(*, as_views: bool, balanced: bool) -> None:
    frozen = torch.rand(100, 1, generator=generator(5)).to(device())
    before = frozen.clone()
    trainable = [torch.ones(size, 1, device=device(), requires_grad=True) for size in (3, 5, 2, 6, 4)]
    optimizer = ZeroRedundancyOptimizer(
        [frozen, *trainable], SGD, parameters_as_bucket_view=as_views, balanced=balanced, lr=0.5
    )
    optimizer.add_param_group({"params": [torch.ones(3, 1, device=device(), requires_grad=True)]})
    trainable.append(optimizer.param_groups[1]["params"][0])
    for param in trainable:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.equal(frozen, before)
    for param in trainable:
        assert torch.equal(param, torch.full_like(param, 0.5))


def steps_a_parameter_that_was_frozen_at_first(*, as_views: bool, balanced: bool) -> None:
    model, reference = small_model(), small_model()
    for module in (model, reference):
        module[0].requires_grad_(False)
    ours = ZeroRedundancyOptimizer(
        model.parameters(), Adam, parameters_as_bucket_view=as_views, balanced=balanced, lr=0.01
    )
    theirs = Adam(reference.parameters(), lr=0.01)
    for step in range(4):
        set_gradients([model, reference], step)
        if step < 2:
            for module in (model, reference):
                for param in module[0].parameters():
                    param.grad = None
        else:
            model[0].requires_grad_(True)
            reference[0].requires_grad_(True)
        ours.step()
        theirs.step()
        assert_same(model, reference)


def follows_parameters_whose_memory_was_replaced(*, as_views: bool, balanced: bool) -> None:
    model, reference = small_model(), small_model()
    ours = ZeroRedundancyOptimizer(
        model.parameters(), Adam, parameters_as_bucket_view=as_views, balanced=balanced, lr=0.01
    )
    theirs = Adam(reference.parameters(), lr=0.01)
    for step in range(3):
        for param in model.parameters():
            param.data = param.data.clone()
        set_gradients([model, reference], step)
        ours.step()
        theirs.step()
        assert_same(model, reference)


def keeps_the_memory_format_of_parameters(*, as_views: bool, balanced: bool) -> None:
    def build() -> nn.Module:
        return fill(nn.Conv2d(6, 16, 3)).to(device(), memory_format=torch.channels_last)

    model, reference = build(), build()
    ours = ZeroRedundancyOptimizer(
        model.parameters(), Adam, parameters_as_bucket_view=as_views, balanced=balanced, lr=0.01
    )
    theirs = Adam(reference.parameters(), lr=0.01)
    for step in range(3):
        # Contiguous gradients for channels-last parameters: a slice must still see its own elements.
        set_gradients([model, reference], step)
        ours.step()
        theirs.step()
        assert_same(model, reference)
    assert [param.stride() for param in model.parameters()] == [
        param.stride() for param in reference.parameters()
    ]


def a_parameter_saves_no_more_than_itself_from_a_view(path: str) -> None:
    model = small_model()
    ZeroRedundancyOptimizer(model.parameters(), SGD, parameters_as_bucket_view=True, lr=0.1)
    bias = model[3].bias
    assert bias.untyped_storage().nbytes() == bias.numel() * bias.element_size()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)
        for name, value in torch.load(path).items():
            assert torch.equal(value, model.state_dict()[name])
    copied = copy.deepcopy(model)
    assert_same(copied, model)
    dist.barrier()


def shares_out_state_evenly(*, dominating: int) -> None:
    """Memory a rank is within 2% of total/world, one parameter of the model being most of it."""
    params = [
        torch.zeros(numel, device=device(), requires_grad=True) for numel in (dominating, 4000, 300, 70, 9)
    ]
    optimizer = ZeroRedundancyOptimizer(params, Adam, balanced=True)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    state_bytes = sum(
        value.numel() * value.element_size()
        for values in optimizer.optim.state.values()
        for value in values.values()
        if isinstance(value, Tensor)
    )
    total = sum(param.numel() for param in params) * 4 * 2
    assert state_bytes <= 1.02 * total / dist.get_world_size()


def sends_few_messages(*, as_views: bool, balanced: bool) -> int:
    """How many operations of the group a step makes."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20))).to(device())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), SGD, parameters_as_bucket_view=as_views, balanced=balanced, lr=0.1
    )
    set_gradients([model], 0)
    with torch.profiler.profile() as profile:
        optimizer.step()
    calls = [event for event in profile.key_averages() if event.key.startswith("c10d::")]
    return sum(event.count for event in calls)


# --- uneven inputs -----------------------------------------------------------------------------------------------


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


def joins_with_ddp(*, as_views: bool, balanced: bool, unused: bool) -> None:
    """With DDP, whose joined ranks throw their reduced gradients away."""
    rank = dist.get_rank()
    model, reference = small_model(), small_model()
    devices = [device()] if device().type == "cuda" else None
    # One more parameter in use on some steps only: a joined rank must not step it by an old gradient.
    how: dict[str, Any] = {"device_ids": devices, "find_unused_parameters": True}
    ddp, peer = DistributedDataParallel(model, **how), DistributedDataParallel(reference, **how)
    ours = ZeroRedundancyOptimizer(
        model.parameters(), Adam, parameters_as_bucket_view=as_views, balanced=balanced, lr=0.01
    )
    theirs = Adam(reference.parameters(), lr=0.01)

    def train(net: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        for step in range(2 + 2 * rank):
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
        x = module[1](module[0](x))
        return x if leave_out else module[3](x)

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


def batches(seed: int) -> Iterator[Tensor]:
    """This rank's inputs, without end."""
    step = 0
    while True:
        yield torch.randn(4, 12, generator=generator(100_000 * seed + 100 * step + dist.get_rank())).to(
            device()
        )
        step += 1
