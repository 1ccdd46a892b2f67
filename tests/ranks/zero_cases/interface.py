"""A sharded optimizer is an optimizer like any other."""

import copy
import operator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.optim import SGD, Adam, AdamW

from shardwise.zero import ZeroRedundancyOptimizer, sync
from tests.ranks.zero_cases.models import (
    assert_same,
    assert_same_state,
    device,
    fill,
    generator,
    owned_numel,
    set_gradients,
    share_from,
    small_model,
    train_both,
)


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


def lets_a_scheduler_cycle_momentum() -> None:
    """It asks the optimizer's defaults, also for options that nobody passed, whether there is a momentum to change."""
    model, reference = small_model(), small_model()
    ours, theirs = (
        ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01),
        AdamW(reference.parameters(), lr=0.01),
    )
    assert ours.defaults == theirs.defaults
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)
        for optimizer in (ours, theirs)
    ]
    for step in range(4):
        train_both(model, ours, reference, theirs, range(step, step + 1))
        for schedule in schedules:
            schedule.step()
    assert ours.optim.param_groups[0]["betas"] != (0.95, 0.999)


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


def steps_each_parameter_by_its_owners_gradient(*, as_views: bool) -> None:
    """Without a reduction every rank has gradients of its own; what counts is the owner's."""
    value = float(dist.get_rank() + 1)
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(2.0)
    model.to(device())
    x, target = torch.tensor([value], device=device()), torch.tensor([value + 3.0], device=device())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, parameters_as_bucket_view=as_views, lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.l1_loss(model(x), target)
        loss.backward()
        return loss

    assert optimizer.step(closure=closure).item() == 1.0
    # Rank 0 owns the weight, and there the input is 1.
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[1.1]], device=device()))
    torch.testing.assert_close(model.bias.detach(), torch.tensor([2.1], device=device()))


def steps_by_gradients_a_closure_makes(*, as_views: bool, balanced: bool) -> None:
    model, reference = small_model(), small_model()
    ours = ZeroRedundancyOptimizer(
        model.parameters(), Adam, parameters_as_bucket_view=as_views, balanced=balanced, lr=0.01
    )
    theirs = Adam(reference.parameters(), lr=0.01)
    for step in range(3):
        for module, optimizer in ((model, ours), (reference, theirs)):

            def closure(module: nn.Module = module, step: int = step) -> float:
                set_gradients([module], step)
                return float(step)

            optimizer.zero_grad()
            assert optimizer.step(closure) == step
        assert_same(model, reference)


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


def takes_named_parameters(*, balanced: bool) -> None:
    model, reference = small_model(), small_model()
    ours = ZeroRedundancyOptimizer(model.named_parameters(), Adam, balanced=balanced, lr=0.01)
    theirs = Adam(reference.named_parameters(), lr=0.01)
    set_gradients([model, reference], 0)
    ours.step()
    theirs.step()
    ours.consolidate_state_dict(to=0)
    saved = share_from(0, ours.state_dict() if dist.get_rank() == 0 else None)
    assert_same_state(saved, theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    set_gradients([model, reference], 1)
    ours.step()
    theirs.step()
    assert_same(model, reference)


class SGDThatReadsNames(SGD):
    """Notes the name and the shape of what it steps."""

    def step(self, closure: Any = None) -> Any:
        self.stepped = [
            (name, tensor.numel())
            for group in self.param_groups
            for name, tensor in zip(group["param_names"], group["params"], strict=True)
        ]
        return super().step(closure)


def tells_the_local_optimizer_the_names_of_what_it_steps() -> None:
    model, extra = small_model(), nn.Linear(3, 3).to(device())
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), SGDThatReadsNames, lr=0.1)
    optimizer.add_param_group(
        {"params": [(f"extra.{name}", param) for name, param in extra.named_parameters()]}
    )
    wanted = {name: param.numel() for name, param in model.named_parameters()} | {
        f"extra.{name}": param.numel() for name, param in extra.named_parameters()
    }
    set_gradients([model], 0)
    optimizer.step()
    stepped: list[tuple[str, int]] = []
    for of_rank in _gathered(optimizer.optim.stepped):  # type: ignore[attr-defined]
        stepped += of_rank
    assert sorted(stepped) == sorted(wanted.items())
    # As in backward: some pieces alone.
    piece = optimizer.partition.owned[-1]
    tensor = optimizer.partition.stepped_tensor(piece)
    optimizer.local.step_pieces({piece: torch.ones_like(tensor)})
    ((name, numel),) = optimizer.optim.stepped  # type: ignore[attr-defined]
    assert wanted[name] == numel == tensor.numel()
    assert sum(len(group["param_names"]) for group in optimizer.optim.param_groups) == len(
        optimizer.partition.owned
    )


def _gathered(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def shows_hooks_of_the_local_optimizer_the_tensors_it_holds() -> None:
    """Not what their memory is stepped as: several as one tensor, large ones in blocks."""
    model, reference = small_model(), small_model()
    ours = ZeroRedundancyOptimizer(model.parameters(), Adam, parameters_as_bucket_view=True, lr=0.01)
    theirs = Adam(reference.parameters(), lr=0.01)
    train_both(model, ours, reference, theirs, range(2))
    held = [tensor for group in ours.optim.param_groups for tensor in group["params"]]
    seen: list[bool] = []

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        seen.append(len(tensors) == len(held) and all(map(operator.is_, tensors, held)))

    ours.optim.register_step_pre_hook(look)
    ours.optim.register_step_post_hook(look)
    train_both(model, ours, reference, theirs, range(2, 4))
    assert seen == [True] * 4


def shows_the_defaults_of_its_class() -> None:
    """A scheduler that turns betas, too, finds them; parameters may be of several dtypes."""
    model = small_model()
    params = [*model.parameters(), nn.Parameter(torch.zeros(3, dtype=torch.float64, device=device()))]
    optimizer = ZeroRedundancyOptimizer(params, Adam, lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
    before = optimizer.param_groups[0]["betas"]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["betas"] != before
    assert params[-1].abs().min() > 0


def takes_gradients_of_another_dtype(*, as_views: bool, balanced: bool) -> None:
    models = [small_model((torch.bfloat16,)) for _ in range(2)]
    model, reference = models
    for param in (param for each in models for param in each.parameters()):
        param.grad_dtype = None
    ours = ZeroRedundancyOptimizer(
        model.parameters(), SGD, parameters_as_bucket_view=as_views, balanced=balanced, lr=0.125
    )
    theirs = SGD(reference.parameters(), lr=0.125)
    source = generator(3)
    for mine, peer in zip(model.parameters(), reference.parameters(), strict=True):
        # With few bits, so that a cut makes no difference.
        grad = torch.randint(-4, 4, mine.shape, generator=source).float().to(device())
        mine.grad, peer.grad = grad, grad.clone()
    ours.step()
    theirs.step()
    assert_same(model, reference)


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

    def replace(*_: object) -> None:
        for param in model.parameters():
            param.data = param.data.clone()

    for step in range(3):
        replace()
        train_both(model, ours, reference, theirs, range(step, step + 1))
    # Between the local step and the exchange.
    ours.optim.register_step_post_hook(replace)
    train_both(model, ours, reference, theirs, range(3, 5))


def follows_parameters_to_another_dtype(*, as_views: bool, balanced: bool) -> None:
    for first, second in ((torch.float32, torch.float64), (torch.float64, torch.float32)):
        model, reference = small_model((first,)), small_model((first,))
        ours = ZeroRedundancyOptimizer(
            model.parameters(), SGD, parameters_as_bucket_view=as_views, balanced=balanced, lr=0.1
        )
        theirs = SGD(reference.parameters(), lr=0.1)
        train_both(model, ours, reference, theirs, range(1))
        for module in (model, reference):
            module[:3].to(second)
        train_both(model, ours, reference, theirs, range(1, 3))


def keeps_the_memory_format_of_parameters(*, as_views: bool, balanced: bool) -> None:
    def build() -> nn.Module:
        return fill(nn.Conv2d(6, 16, 3)).to(device(), memory_format=torch.channels_last)

    model, reference = build(), build()
    ours = ZeroRedundancyOptimizer(
        model.parameters(),
        Adam,
        parameters_as_bucket_view=as_views,
        balanced=balanced,
        lr=0.01,
        foreach=False,
    )
    theirs = Adam(reference.parameters(), lr=0.01, foreach=False)
    # Contiguous gradients for channels-last parameters: a slice must still see its own elements.
    train_both(model, ours, reference, theirs, range(3))
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


def sends_few_messages(*, as_views: bool, balanced: bool, on_one_host: bool = True) -> int:
    """How many operations of the group a step makes."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20))).to(device())
    with pytest.MonkeyPatch.context() as patch:
        if not on_one_host:
            patch.setattr(sync, "process_vm_peers_of", lambda *_: None)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), SGD, parameters_as_bucket_view=as_views, balanced=balanced, lr=0.1
        )
    set_gradients([model], 0)
    with torch.profiler.profile() as profile:
        optimizer.step()
    calls = [event for event in profile.key_averages() if event.key.startswith("c10d::")]
    return sum(event.count for event in calls)
