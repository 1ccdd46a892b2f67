"""A sharded optimizer steps like the unsharded one."""

import copy
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from shardwise import fully_shard
from shardwise.zero import ZeroRedundancyOptimizer
from tests.ranks.zero_cases.models import (
    OPTIMIZERS,
    assert_same,
    assert_same_state,
    device,
    generator,
    grouped,
    set_gradients,
    small_model,
    train_both,
)


def matches_the_unsharded_optimizer(name: str, *, balanced: bool, steps: int = 3) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    dtypes = (torch.float32, torch.bfloat16)
    for maximize, num_groups, dtype in product((False, True), (1, 2, 3), dtypes):
        # Every combination on two ranks; on more, half of them, in which still every two choices meet.
        if dist.get_world_size() > 2 and (num_groups + dtypes.index(dtype)) % 2 != maximize:
            continue
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
        train_both(model, ours, reference, theirs, range(steps))


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
    assert any(len(pieces) > 1 for pieces in ours.partition.pieces)
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


def steps_large_parameters_block_by_block(name: str, *, balanced: bool) -> None:
    """To the bits of the whole, state included; and what is seen of the local optimizer are whole tensors.

    Sizes are odd, one parameter lies in memory channels last, one has no gradient for a while, and in the middle the
    state is loaded, which puts it elsewhere in memory.
    """
    optimizer_class, options = OPTIMIZERS[name]
    # From here on the engine has hooks of its own around the steps of all optimizers.
    fully_shard(nn.Linear(2, 2).to(device()))

    def build() -> list[Tensor]:
        shapes = ((1000, 603), (7,), (600_001,), (9, 500, 11, 13))
        made = [torch.randn(shape, generator=generator(sum(shape))).to(device()) for shape in shapes]
        made[3] = made[3].to(memory_format=torch.channels_last)
        return [tensor.requires_grad_() for tensor in made]

    ours_params, theirs_params = build(), build()
    ours = ZeroRedundancyOptimizer(
        ours_params, optimizer_class, parameters_as_bucket_view=balanced, balanced=balanced, **options
    )
    theirs = optimizer_class(theirs_params, **options)
    stepped = _sizes_in_each_step(ours.optim)
    for step in range(5):
        source = generator(step)
        for mine, peer in zip(ours_params, theirs_params, strict=True):
            mine.grad = torch.empty_like(mine).copy_(torch.randn(mine.shape, generator=source))
            peer.grad = mine.grad.clone()
        if step == 2:
            ours_params[0].grad = theirs_params[0].grad = None
        ours.step()
        theirs.step()
        for number, (mine, peer) in enumerate(zip(ours_params, theirs_params, strict=True)):
            assert torch.equal(mine, peer), f"step {step}: parameter {number}"
        held = [tensor.numel() for group in ours.optim.param_groups for tensor in group["params"]]
        assert set(ours.optim.state) <= {t for group in ours.optim.param_groups for t in group["params"]}
        if step == 3:
            saved = copy.deepcopy(theirs.state_dict())
            ours.load_state_dict(saved)
    has_state = bool(theirs.state_dict()["state"])
    in_blocks = device().type == "cpu" and has_state and torch.get_num_threads() == 1
    # Not in the first step, which makes the state, nor where a rank's only large parameter had no gradient.
    for step in (1, 3, 4):
        assert (len(stepped[step]) > len(held)) == in_blocks, (
            f"step {step}: tensors of {stepped[step]} elements"
        )
    ours.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert_same_state(ours.state_dict(), theirs.state_dict())


def _sizes_in_each_step(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """What its ``step`` is shown from now on: hooks would be shown what it holds."""
    stepped: list[list[int]] = []
    step = optimizer.step

    def look_and_step(**kwargs: Any) -> Any:
        stepped.append([tensor.numel() for group in optimizer.param_groups for tensor in group["params"]])
        return step(**kwargs)

    optimizer.step = look_and_step  # type: ignore[method-assign]
    return stepped


def steps_small_neighbours_in_a_buffer_as_one_tensor(name: str, *, balanced: bool) -> None:
    """To the bits of each by itself, state included; one has no gradient for a while, and the state is loaded once."""
    optimizer_class, options = OPTIMIZERS[name]

    def build() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Linear(11, 11) for _ in range(9)] + [nn.Conv2d(3, 4, 3)]
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    model, reference = build(), build()
    ours = ZeroRedundancyOptimizer(
        grouped(model, 2), optimizer_class, parameters_as_bucket_view=True, balanced=balanced, **options
    )
    theirs = optimizer_class(grouped(reference, 2), **options)
    stepped = _sizes_in_each_step(ours.optim)
    num_owned = sum(len(group["params"]) for group in ours.optim.param_groups)
    for step in range(6):
        set_gradients([model, reference], step)
        if step in (2, 3):
            model[4].weight.grad = reference[4].weight.grad = None
        ours.step()
        theirs.step()
        assert_same(model, reference)
        if step == 4:
            ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    # One for each group at first; then its owner steps the one that had no gradient alone, and those around it.
    num_stepped = [len(sizes) for sizes in stepped]
    assert num_stepped[0] <= 2, num_stepped
    assert max(num_stepped) <= 4 < num_owned, f"{num_stepped} of {num_owned}"
    ours.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert_same_state(ours.state_dict(), theirs.state_dict())


def steps_parameters_of_several_dtypes(*, as_views: bool, balanced: bool) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float32)
    model, reference = small_model(dtypes), small_model(dtypes)
    ours = ZeroRedundancyOptimizer(
        model.parameters(), Adam, parameters_as_bucket_view=as_views, balanced=balanced, lr=0.01
    )
    theirs = Adam(reference.parameters(), lr=0.01)
    train_both(model, ours, reference, theirs, range(3))


def steps_a_model_of_two_devices(*, as_views: bool, balanced: bool) -> None:
    """Model parallel: on the CPU and, where there is one, on the GPU."""

    def build() -> nn.Sequential:
        model = small_model()
        model[0].cpu()
        model[3].cpu()
        return model

    # On the GPU alone torch would choose foreach kernels, on a mix not; they may round differently.
    model, reference = build(), build()
    ours = ZeroRedundancyOptimizer(
        model.parameters(),
        AdamW,
        parameters_as_bucket_view=as_views,
        balanced=balanced,
        lr=0.01,
        foreach=False,
    )
    theirs = AdamW(reference.parameters(), lr=0.01, foreach=False)
    train_both(model, ours, reference, theirs, range(3))
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


def shares_out_over_some_of_the_ranks(*, as_views: bool, balanced: bool) -> None:
    """Ranks 1 and 2 of three: their numbers in the group are not those in the world."""
    members = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    model, reference = small_model(), small_model()
    ours = ZeroRedundancyOptimizer(
        model.parameters(),
        Adam,
        process_group=members,
        parameters_as_bucket_view=as_views,
        balanced=balanced,
        lr=0.01,
    )
    assert (ours.rank, ours.world_size, ours.global_rank) == (dist.get_rank() - 1, 2, dist.get_rank())
    theirs = Adam(reference.parameters(), lr=0.01)
    train_both(model, ours, reference, theirs, range(3))
    ours.consolidate_state_dict(to=1)
    if ours.rank == 1:
        assert_same_state(ours.state_dict(), theirs.state_dict())
