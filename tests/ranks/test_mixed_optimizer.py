"""`shardwise.optim.mixed`: several optimizer classes that schedulers, clipping and checkpoints see as one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import AdamW, Muon, Optimizer

import shardwise
from shardwise import ConfigError, PeerFailure, StateError
from shardwise.checkpoint import Saver, Store, TrainingState, read_manifest
from shardwise.optim import blockwise, flat, mixed, rowwise, whole
from shardwise.optim.whole_optimizer import WholeOptimizer
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from shardwise.train.team import Team
from tests.ranks.models import average_gradients, data, same
from tests.ranks.tables import slow
from tests.ranks.test_whole_optimizer import Model, loss_of, matrices, replay, shard, train, values_of
from tests.ranks.whole_classes import Shampoo

pytestmark = pytest.mark.arithmetic


def parts_of(model):
    """The usual split: the head by name to AdamW, with whatever is no matrix."""
    inner = matrices(model.layers.parameters())
    rest = [param for param in model.layers.parameters() if param.dim() < 2]
    return inner, [model.head.weight, *rest]


def make(seed=0):
    model = shard(seeded(Model(), seed))
    inner, rest = parts_of(model)
    groups = {Muon: [{"params": inner, "lr": 0.02, "weight_decay": 0.05}], AdamW: rest}
    return model, mixed(groups, weight_decay=0.01)


def match_two_optimizers():
    model, optimizer = make()
    plain = seeded(Model())
    inner, rest = parts_of(plain)
    plain_optimizers = [Muon(inner, lr=0.02, weight_decay=0.05), AdamW(rest, weight_decay=0.01, foreach=True)]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (optimizer, *plain_optimizers)]
    for step in range(4):
        loss_of(model, step, dist.get_rank()).backward()
        average_gradients(plain, lambda rank: loss_of(plain, step, rank), dist.get_world_size())  # noqa: B023
        shardwise.clip_grad_norm_(model.parameters(), 1e6)
        for each in (optimizer, *plain_optimizers, *schedules):
            each.step()
        for each in (optimizer, *plain_optimizers):
            each.zero_grad()
        for (name, value), param in zip(values_of(model).items(), plain.parameters(), strict=True):
            same(value, param.detach(), f"step {step}: {name}")
    assert all(param.grad is None for param in model.parameters())
    return [group["lr"] for group in optimizer.param_groups]


def test_it_equals_two_optimizers_with_a_scheduler_each():
    for rates in run_ranks(match_two_optimizers, 3):
        assert rates == pytest.approx([0.02 * 0.9**4, 1e-3 * 0.9**4])


def save(folder, own):
    model, optimizer = make()
    train(model, optimizer, 3)
    if own:
        saver = Saver(Store(folder), Team.new_group(), keep=1)
        saver.save(3, TrainingState(model, optimizer).parts(), {})
        saver.wait()
        assert saver.outcomes()[0].problem is None
    else:
        parts = get_state_dict(model, optimizer)
        dcp.save(dict(zip(("model", "optimizer"), parts, strict=True)), checkpoint_id=folder)
    train(model, optimizer, 2, first=3)
    return values_of(model)


def resume(folder, own):
    model, optimizer = make(seed=7)
    if own:
        found = Store(folder).checkpoints()[0]
        TrainingState(model, optimizer).load(found, read_manifest(found), dist.group.WORLD)
    else:
        parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(parts, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
    replay(model, optimizer, 2, first=3, world=4)
    return values_of(model)


@pytest.mark.parametrize("own", [slow(False), True])
def test_one_checkpoint_holds_all_parts_and_resumes_on_another_number_of_ranks(own, tmp_path):
    expected = run_ranks(save, 4, tmp_path, own, kind="gloo")[0]
    for resumed in run_ranks(resume, 3, tmp_path, own, kind="gloo"):
        for name, value in expected.items():
            same(resumed[name], value, name)


class Failing(Shampoo):
    fails = False

    def step(self, closure=None):
        super().step(closure)
        if Failing.fails and dist.get_rank() == 1:
            raise ValueError("no root")


def fail_in_the_second_part():
    model = shard(seeded(Model()))
    inner, rest = parts_of(model)
    optimizer = mixed({AdamW: rest, Muon: inner[:3], Failing: inner[3:]})
    train(model, optimizer, 1)
    before = values_of(model)
    loss_of(model, 1, dist.get_rank()).backward()
    Failing.fails = True
    dist.barrier()
    with pytest.raises((ValueError, PeerFailure), match="no root"):
        optimizer.step()
    dist.barrier()
    Failing.fails = False
    for name, value in values_of(model).items():
        same(value, before[name], name)
    optimizer.zero_grad()
    train(model, optimizer, 1, first=1)


def test_an_error_in_one_part_leaves_all_parts_where_they_were():
    run_ranks(fail_in_the_second_part, 2)


class Exploding(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.factor = 1.0

    def forward(self, x):
        return self.layers[0](x) * self.factor


def skip_what_is_not_finite():
    model = shard(seeded(Exploding()))
    optimizer = mixed({Muon: matrices(model.parameters()), AdamW: [model.layers[0].bias]})
    for step in range(3):
        model.factor = float("inf") if step == 1 and dist.get_rank() == 1 else 1.0
        before = values_of(model)
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, value in values_of(model).items():
            assert torch.equal(value, before[name]) == (step == 1), name


def test_a_step_that_is_not_finite_is_skipped_by_all_parts_on_all_ranks():
    before = shardwise.set_trust(non_finite="skip")
    try:
        run_ranks(skip_what_is_not_finite, 2)
    finally:
        shardwise.set_trust(non_finite=before.non_finite)


def refuse():
    model = shard(seeded(Model()))
    inner, rest = parts_of(model)
    with pytest.raises(TypeError, match="a dict from optimizer classes"):
        mixed([])
    with pytest.raises(ValueError, match="more than one parameter group"):
        mixed({Muon: inner, AdamW: [*rest, inner[0]]})
    optimizer = mixed([whole(Muon, inner), flat(rest[1:], AdamW)])
    with pytest.raises(ConfigError, match="which class steps it"):
        optimizer.add_param_group({"params": rest[:1]})
    optimizer.parts[1].add_param_group({"params": rest[:1]})
    assert len(optimizer.param_groups) == 3
    train(model, optimizer, 1)
    state = optimizer.state_dict()
    state["param_groups"].pop()
    with pytest.raises(ConfigError, match="the groups that were saved"):
        optimizer.load_state_dict(state)


def test_parts_that_do_not_fit_are_refused():
    run_ranks(refuse, 2)


# --- classes that step rows or blocks of rows -------------------------------------------------------------------------


@rowwise
class RowNorms(Optimizer):
    """Divides each row's gradient by the root of its average square."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state["step"] = torch.zeros(())
                        state["squares"] = torch.zeros_like(param[:, :1])
                    state["step"] += 1
                    state["squares"].lerp_(param.grad.square().mean(1, keepdim=True), 0.1)
                    param.sub_(param.grad / (state["squares"].sqrt() + 1e-8), alpha=group["lr"])


@blockwise(2)
class Blocks(Optimizer):
    """Preconditions blocks of two rows by the sum of their squares; keeps one matrix for each."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    blocks = param.grad.view(-1, 2, param.shape[1])
                    state = self.state[param]
                    if not state:
                        state["sides"] = torch.eye(2).repeat(len(blocks), 1, 1)
                    state["sides"].add_(blocks @ blocks.mT)
                    update = torch.linalg.solve(state["sides"], blocks).reshape(param.shape)
                    param.sub_(update, alpha=group["lr"])


class Stack(nn.Module):
    """Rows that come out even on two ranks, in blocks of two for `even` alone."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 6, bias=False)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def step_bands(optimizer_class, folder):
    model, plain = shard(seeded(Stack())), seeded(Stack())
    optimizer = mixed({optimizer_class: [{"params": list(model.parameters())}]}, lr=0.1)
    unsharded = optimizer_class(plain.parameters(), lr=0.1)
    sent = 0
    for step in range(4):
        if step == 2:
            parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.save(parts, checkpoint_id=folder)
            model = shard(seeded(Stack(), 7))
            optimizer = mixed({optimizer_class: model.parameters()}, lr=0.1)
            parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.load(parts, checkpoint_id=folder)
            set_state_dict(
                model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"]
            )
        loss = lambda model, rank: model(data(step, rank, 3, 8)).square().mean()  # noqa: B023, E731
        loss(model, dist.get_rank()).backward()
        average_gradients(plain, lambda rank: loss(plain, rank), dist.get_world_size())  # noqa: B023
        for each in (optimizer, unsharded):
            each.step()
            each.zero_grad()
        for (name, value), param in zip(values_of(model).items(), plain.parameters(), strict=True):
            same(value, param.detach(), f"step {step}: {name}")
    sent = sum(part.moves.bytes_sent for part in optimizer.parts if isinstance(part, WholeOptimizer))
    return [type(part).__name__ for part in optimizer.parts], sent


def test_rows_are_stepped_where_they_are(tmp_path):
    # On four ranks the last has no row of the second matrix: that one is stepped whole.
    assert run_ranks(step_bands, 2, RowNorms, tmp_path / "2") == [(["FlatRowNorms"], 0)] * 2
    for names, sent in run_ranks(step_bands, 4, RowNorms, tmp_path / "4"):
        assert names == ["FlatRowNorms", "WholeOptimizer"]
        assert sent


def test_blocks_of_rows_are_stepped_where_no_rank_cuts_one(tmp_path):
    # Three rows a rank cut a block in two.
    for names, sent in run_ranks(step_bands, 2, Blocks, tmp_path):
        assert names == ["FlatBlocks", "WholeOptimizer"]
        assert sent


@rowwise
class Columns(Shampoo):
    """Says that it is row-wise, and is not."""


def declare_wrongly():
    model = shard(seeded(Stack()))
    optimizer = mixed({Columns: model.parameters()})
    model(data(0, 0, 3, 8)).square().mean().backward()
    with pytest.raises(StateError, match="a list with tensors in it"):
        optimizer.step()


def test_state_that_is_not_of_rows_is_refused():
    run_ranks(declare_wrongly, 2)
