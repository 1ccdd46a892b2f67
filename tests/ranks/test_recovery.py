"""After an exception anywhere in a step, the next step just works, as if the failed one had never been."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import data, held_bytes, is_sharded, same, seen_weights, sgd
from tests.ranks.subject import beyond_torch, fully_shard
from tests.ranks.tables import cases_of, run_cases

pytestmark = beyond_torch


class Boom(Exception):
    """Stands for a user's error, and for running out of memory."""


class BackwardBoom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Boom


class Fuse(nn.Module):
    """Does nothing, until it is told to blow up in forward or in backward."""

    def __init__(self):
        super().__init__()
        self.armed = None

    def forward(self, x):
        if self.armed == "forward":
            raise Boom
        return BackwardBoom.apply(x) if self.armed == "backward" else x


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.before = nn.Linear(width, width)
        self.fuse = Fuse()
        self.after = nn.Linear(width, width)

    def forward(self, x):
        return self.after(self.fuse(torch.tanh(self.before(x))))


class Model(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(4))
        self.fuse = Fuse()
        self.last = nn.Linear(width, width)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(self.fuse(x))


def sharded(reshard):
    model = seeded(Model())
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard)
    return fully_shard(model)


def loss_of(model, step):
    return model(data(step, dist.get_rank(), 3, 5)).square().mean()


def arm_layer_forward(model):
    model.layers[1].fuse.armed = "forward"


def arm_layer_backward(model):
    model.layers[1].fuse.armed = "backward"


def arm_root_forward(model):
    model.fuse.armed = "forward"


def arm_root_backward(model):
    model.fuse.armed = "backward"


def arm_first_layer_backward(model):
    model.layers[0].fuse.armed = "backward"


def raise_boom(*_):
    raise Boom


def hook_on_a_shard(model):
    return model.layers[2].before.weight.register_post_accumulate_grad_hook(raise_boom)


def hook_on_a_forward(model):
    return model.layers[2].before.register_forward_hook(raise_boom)


def pre_hook_on_a_unit(model):
    return model.layers[2].register_forward_pre_hook(raise_boom)


def hook_on_an_activation(model):
    def watch(module, args, output):
        output.register_hook(raise_boom)

    return model.layers[2].before.register_forward_hook(watch)


FAILURES = [
    arm_layer_forward,
    arm_layer_backward,
    arm_root_forward,
    arm_root_backward,
    arm_first_layer_backward,
    hook_on_a_shard,
    hook_on_a_forward,
    pre_hook_on_a_unit,
    hook_on_an_activation,
]


def fail(model, optim, failure, step):
    """One step that blows up; what the failure put in place is taken away again."""
    handle = failure(model)
    with pytest.raises(Boom):
        loss_of(model, step).backward()
    for fuse in model.modules():
        if isinstance(fuse, Fuse):
            fuse.armed = None
    if handle is not None:
        handle.remove()
    # Not the model's: that reaches whatever parameters the failure left on show, this reaches the shards alone.
    optim.zero_grad()


def train(reshard, failure, num_failures):
    model = sharded(reshard)
    optim = sgd(model.parameters())
    history = []
    modules = [layer.before for layer in model.layers]
    for step in range(4):
        if failure is not None and step in (0, 2):
            for _ in range(num_failures):
                fail(model, optim, failure, step)
        with seen_weights(*modules) as weights:
            loss = loss_of(model, step)
        loss.backward()
        assert all(is_sharded(module) for module in (*modules, model.first, model.last))
        assert held_bytes(weights) == 0
        optim.step()
        history.append([loss.detach(), *(param.detach().to_local().clone() for param in model.parameters())])
        optim.zero_grad()
    return history


def compare(reshard, failure, num_failures=1):
    for step, (got, want) in enumerate(
        zip(train(reshard, failure, num_failures), train(reshard, None, 0), strict=True)
    ):
        for index, pair in enumerate(zip(got, want, strict=True)):
            same(*pair, f"step {step}: value {index}")


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.__name__)
def test_a_step_after_a_failure_gives_the_bits_it_would_have_given_without(failure):
    for reshard in (True, False):
        run_ranks(compare, 2, reshard, failure, kind="gloo")


def test_a_step_after_several_failures_gives_the_bits_it_would_have_given_without():
    run_cases(compare, 2, cases_of(reshard=[True], failure=FAILURES, num_failures=[3]))


@pytest.mark.parametrize(
    "failure", [arm_layer_forward, arm_layer_backward], ids=lambda failure: failure.__name__
)
def test_a_unit_kept_in_part_recovers_too(failure):
    run_ranks(compare, 4, 2, failure, kind="gloo")


def out_of_memory():
    model = sharded(True)

    def refuse(module, args):
        raise torch.OutOfMemoryError("pretended")

    handle = model.layers[3].register_forward_pre_hook(refuse)
    with pytest.raises(torch.OutOfMemoryError, match="pretended"):
        loss_of(model, 0)
    handle.remove()
    loss = loss_of(model, 0)
    loss.backward()
    other = sharded(True)
    expected = loss_of(other, 0)
    expected.backward()
    same(loss.detach(), expected.detach(), "loss")
    for param, want in zip(model.parameters(), other.parameters(), strict=True):
        same(param.grad.to_local(), want.grad.to_local(), "gradient")


def test_running_out_of_memory_comes_through_as_it_is_and_does_no_harm():
    run_ranks(out_of_memory, 2, kind="gloo")


def forward_without_backward():
    """A loss that is thrown away is no failure, and no burden."""
    model = sharded(True)
    reference = sharded(True)
    for step in range(3):
        loss_of(model, step + 20)
        loss, expected = loss_of(model, step), loss_of(reference, step)
        loss.backward()
        expected.backward()
        same(loss.detach(), expected.detach(), "loss")
        for param, want in zip(model.parameters(), reference.parameters(), strict=True):
            same(param.grad.to_local(), want.grad.to_local(), "gradient")


def test_a_loss_that_is_thrown_away_changes_nothing():
    run_ranks(forward_without_backward, 2, kind="gloo")


def shards_after_a_failure():
    """Right after the failure, with no step between, the parameters can be read and saved."""
    model = sharded(False)
    before = [param.detach().to_local().clone() for param in model.parameters()]
    fail(model, sgd(list(model.parameters())), arm_layer_backward, 0)
    for unit in (*model.layers, model):
        unit.reshard()
    for param, want in zip(model.parameters(), before, strict=True):
        same(param.detach().to_local(), want, "shard")


def test_after_a_failure_the_shards_hold_what_they_held():
    run_ranks(shards_after_a_failure, 2, kind="gloo")
