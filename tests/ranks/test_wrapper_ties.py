"""Wrapped models whose parameters are tied after wrapping, before any forward and after steps.

Whatever a program does first after a tie must see it, on the whole model and on one wrapper of it: each entry below
runs on a plain model and on a wrapped one, which must agree.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import shardwise
from shardwise import StateDictType, StateError
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.tables import cases_of, run_cases, slow

FSDP = shardwise.FullyShardedDataParallel
WIDTH = 4


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.outer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.inner = Inner()

    def forward(self, x):
        return self.inner(torch.tanh(self.outer(x)))


def made(is_wrapped, use_orig_params=True):
    model = seeded(Outer())
    if is_wrapped:
        model.inner.third = FSDP(model.inner.third, use_orig_params=use_orig_params)
        model.inner = FSDP(model.inner, use_orig_params=use_orig_params)
        model = FSDP(model, use_orig_params=use_orig_params)
    return model


def inside(module):
    return module.module if isinstance(module, FSDP) else module


def loss_of(model):
    return model(torch.arange(8.0).view(2, WIDTH) / 8).square().mean()


def step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    loss = loss_of(model)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def full(state):
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for name, value in state.items()
    }


# --- what is tied -----------------------------------------------------------------------------------------------------


def third_to_outer(model):
    inside(inside(model.inner).third).weight = model.outer.weight


def first_to_outer(model):
    inside(model.inner).first.weight = model.outer.weight


def outer_to_third(model):
    model.outer.weight = inside(inside(model.inner).third).weight


def first_to_third(model):
    inside(model.inner).first.weight = inside(inside(model.inner).third).weight


def outer_to_first_and_first_to_third(model):
    model.outer.weight = inside(model.inner).first.weight
    first_to_third(model)


# --- what a program does first after it -------------------------------------------------------------------------------


def reads_state(model, part):
    return full(part.state_dict())


def reads_sharded_state(model, part):
    if not isinstance(part, FSDP):
        return full(part.state_dict())
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return full(part.state_dict())


def reads_state_by_torch(model, part):
    return full(get_model_state_dict(part))


def loads(model, part):
    names = [name for name, _ in Outer().named_parameters()]
    prefix = "" if part is model else "inner." if part is model.inner else "inner.third."
    values = {name: torch.full((WIDTH, WIDTH), float(len(name))) for name in names}
    part.load_state_dict(
        {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    )
    return full(model.state_dict())


def summons(model, part):
    with FSDP.summon_full_params(part) if isinstance(part, FSDP) else nullcontext(), torch.no_grad():
        for param in part.parameters():
            param.mul_(2)
        return full(dict(part.named_parameters()))


def applies(model, part):
    seen = []

    def double(module):
        for param in module._parameters.values():
            if param is not None:
                seen.append(param.detach().clone())
                param.data.mul_(2)

    part.apply(double)
    return seen


def converts(model, part):
    part.double()
    state = full(model.state_dict())
    model.double()
    return state


def clips(model, part):
    loss_of(model).backward()
    if isinstance(model, FSDP):
        return model.clip_grad_norm_(0.01)
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def accumulates(model, part):
    with model.no_sync() if isinstance(model, FSDP) else nullcontext():
        loss_of(model).backward()
    return step(model)


def zeroes(model, part):
    part.zero_grad()
    return step(model)


def names(model, part):
    return [name for name, _ in part.named_parameters()]


def reads_optimizer(model, part):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    if not isinstance(model, FSDP):
        named = {id(param): name for name, param in model.named_parameters()}
        return {named[id(param)]: state["momentum_buffer"] for param, state in optimizer.state.items()}
    saved = FSDP.optim_state_dict(model, optimizer)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, saved))
    return {
        name: state["momentum_buffer"]
        for name, state in FSDP.optim_state_dict(model, optimizer)["state"].items()
    }


ENTRIES = [
    reads_state,
    reads_sharded_state,
    reads_state_by_torch,
    loads,
    summons,
    applies,
    converts,
    clips,
    accumulates,
    zeroes,
    names,
    reads_optimizer,
]


def after_a_tie(tie, entry, part, when, summoned):
    results = []
    for is_wrapped in (False, True):
        model = made(is_wrapped)
        if when == "after a forward":
            loss_of(model)
        elif when == "after a step":
            step(model)
        with FSDP.summon_full_params(model) if is_wrapped and summoned else nullcontext():
            tie(model)
        chosen = {"model": model, "inner": model.inner, "third": inside(model.inner).third}[part]
        result = entry(model, chosen)
        if entry is not converts:
            # What it did is right, and so is what follows.
            result = [result, step(model), full(model.state_dict())]
        results.append(result)
    assert_same(*results)


def assert_same(plain, wrapped):
    assert type(plain) is type(wrapped)
    if isinstance(plain, torch.Tensor):
        # A parameter of two uses is reduced twice, so its terms are added in another order.
        torch.testing.assert_close(wrapped, plain)
    elif isinstance(plain, dict):
        assert sorted(plain) == sorted(wrapped)
        for name, value in plain.items():
            assert_same(value, wrapped[name])
    elif isinstance(plain, list):
        assert len(plain) == len(wrapped)
        for one, other in zip(plain, wrapped, strict=True):
            assert_same(one, other)
    else:
        assert plain == wrapped


@pytest.mark.parametrize(
    ("ties", "whens"),
    [
        ([third_to_outer, outer_to_third, outer_to_first_and_first_to_third], ["before any forward"]),
        slow(
            [third_to_outer, outer_to_third, first_to_outer, first_to_third],
            ["before any forward", "after a forward", "after a step"],
        ),
    ],
    ids=["at once", "at any time"],
)
@pytest.mark.parametrize("summoned", [False, True])
def test_whatever_runs_first_after_a_tie_sees_it(ties, whens, summoned):
    cases = cases_of(
        tie=ties, entry=ENTRIES, part=["model", "inner", "third"], when=whens, summoned=[summoned]
    )
    # Converted in part, the buffer of the second wrapper would have two dtypes, which is refused.
    rows = [
        case
        for case in cases
        if case["entry"] is not converts or case["tie"] is not outer_to_first_and_first_to_third
    ]
    run_cases(after_a_tie, 2, rows, kind="threads")


def test_a_tie_of_full_parameters_is_refused_where_they_are_flat():
    def on_a_rank():
        model = made(True, use_orig_params=False)
        before = full(model.state_dict())
        with pytest.raises(StateError, match="flat parameters cannot follow"), FSDP.summon_full_params(model):
            third_to_outer(model)
        assert_same(before, full(model.state_dict()))

    run_ranks(on_a_rank, 2)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_parameters_frozen_while_they_are_full_are_frozen(use_orig_params):
    def on_a_rank():
        model = made(True, use_orig_params)
        with FSDP.summon_full_params(model):
            model.outer.requires_grad_(False)
        before = full(model.state_dict())
        step(model)
        after = full(model.state_dict())
        assert [name for name in before if torch.equal(before[name], after[name])] == ["outer.weight"]
        with FSDP.summon_full_params(model):
            model.outer.requires_grad_(True)
        step(model)
        assert not torch.equal(model.state_dict()["outer.weight"], after["outer.weight"])

    run_ranks(on_a_rank, 2)


def test_freezing_some_parameters_of_a_flat_one_while_they_are_full_is_refused():
    def on_a_rank():
        model = made(True, use_orig_params=False)
        with pytest.raises(StateError, match="some were frozen"), FSDP.summon_full_params(model):
            inside(model.inner).first.requires_grad_(False)

    run_ranks(on_a_rank, 2)


def test_a_tie_that_is_noticed_while_the_other_wrapper_is_summoned_shows_full_parameters():
    def on_a_rank():
        model = made(True)
        third = inside(model.inner).third
        expected = full(model.state_dict())["inner.third.weight"]
        outer_to_third(model)
        with FSDP.summon_full_params(model.inner):
            assert torch.equal(model.state_dict()["outer.weight"], expected)
            assert model.outer.weight is third.weight

    run_ranks(on_a_rank, 2)


def test_parameters_of_one_buffer_cannot_have_different_dtypes():
    def on_a_rank():
        model = made(True)
        inside(model.inner).first.double()
        with pytest.raises(StateError, match="lie in one flat buffer"):
            model.state_dict()
        inside(model.inner).first.float()
        assert len(model.state_dict()) == 4

    run_ranks(on_a_rank, 2)


def test_a_second_tie_that_an_inner_wrapper_notices_before_any_forward_is_gathered_by_the_outer_one():
    def losses(is_wrapped):
        model = seeded(Outer())
        model.outer.weight = model.inner.third.weight
        if is_wrapped:
            model.inner.third = FSDP(model.inner.third, use_orig_params=True)
            model.inner = FSDP(model.inner, use_orig_params=True)
            model = FSDP(model, use_orig_params=True)
        model.outer.weight = inside(model.inner).first.weight
        with FSDP.summon_full_params(inside(model.inner).third) if is_wrapped else nullcontext():
            pass
        found = []
        for _ in range(2):
            found.append(loss_of(model).detach())
            step(model)
        return torch.stack(found)

    def on_a_rank():
        torch.testing.assert_close(losses(True), losses(False))

    run_ranks(on_a_rank, 2)
