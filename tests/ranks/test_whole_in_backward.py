"""`shardwise.optim.whole(..., in_backward=True)`: gradients begin to travel to their owners while backward goes on."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW, Muon

from shardwise import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    PeerFailure,
    clip_grad_norm_,
    fully_shard,
    trace,
)
from shardwise.optim import flat, mixed, whole
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import data, match_plain, same
from tests.ranks.tables import run_cases, slow
from tests.ranks.test_whole_optimizer import (
    Failing,
    Model,
    Wide,
    chosen,
    loss_of,
    make,
    matrices,
    shard,
    train,
    values_of,
)

pytestmark = pytest.mark.arithmetic


def parity(kind="Muon", **settings):
    match_plain(Model, shard, loss_of, steps=4, optimizer=chosen(kind, in_backward=True, **settings))


def test_results_are_those_of_the_unsharded_optimizer():
    run_cases(parity, 3, [{}, {"at_once": 1}, {"at_once": 100}, {"kind": "Shampoo", "at_once": 3}])


def trace_a_step(at_once):
    model = shard(seeded(Wide()))
    optimizer = chosen("Muon", in_backward=True, at_once=at_once)(model.parameters())
    found = []
    for step in range(2):
        with trace.record(model) as recorder:
            model(data(step, dist.get_rank(), 2, 64)).square().mean().backward()
        in_backward = optimizer.moves.bytes_sent
        optimizer.step()
        optimizer.zero_grad()
        found.append((recorder.of(trace.SEND, trace.REDUCE), in_backward, optimizer.moves.bytes_sent))
    return found


def test_messages_start_before_backward_ends():
    for found in run_ranks(trace_a_step, 2, 100):
        for events, *_ in found:
            kinds = [(kind, unit) for kind, unit, _ in events]
            # Two units have one matrix for each owner. A reduce is finished before the next one is started.
            assert [unit for kind, unit in kinds if kind == trace.SEND] == [
                f"layers.{n}" for n in (6, 4, 2, 0)
            ]
            for number in (6, 4, 2):
                sent, reduced = (trace.SEND, f"layers.{number}"), (trace.REDUCE, f"layers.{number - 1}")
                assert kinds.index(sent) < kinds.index(reduced)


def test_what_was_sent_in_backward_is_not_sent_again():
    numel = 8 * 64 * 64
    for (_, _, fetched), (_, in_backward, end) in run_ranks(trace_a_step, 2, 100):
        # Of two ranks each sends half of each matrix that the other owns, and gets half of its own back.
        assert in_backward - fetched == 4 * numel / 4
        assert end - in_backward == 4 * numel / 4


class EvenlyOwned(Model):
    """Each of two ranks owns the same of each unit, so that each unit is sent by itself."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.few_rows.requires_grad_(False)
            layer.sometimes = nn.Parameter(torch.full((2, 7), 0.5), requires_grad=False)
        self.head.requires_grad_(False)


def train_with(change, in_backward):
    """Trains with something between backward and step; returns the values."""
    model = shard(seeded(EvenlyOwned()))
    optimizer = chosen("Muon", in_backward=in_backward, at_once=100)(model.parameters())
    if in_backward:
        loss_of(model, 0, dist.get_rank()).backward()
        assert len(optimizer._gradients._sent) == 4
        model.zero_grad()
    for step in range(3):
        change(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return values_of(model)


def clip(model, step):
    loss_of(model, step, dist.get_rank()).backward()
    clip_grad_norm_(model.parameters(), 0.1)


def clip_with_torch(model, step):
    loss_of(model, step, dist.get_rank()).backward()
    nn.utils.clip_grad_norm_(model.layers[0].parameters(), 0.1)


def write(model, step):
    loss_of(model, step, dist.get_rank()).backward()
    model.layers[1].up.weight.grad.to_local().mul_(3)
    model.layers[0].up.weight.grad = model.layers[0].up.weight.grad * 2


def accumulate(model, step):
    loss_of(model, step, dist.get_rank()).backward()
    loss_of(model, step + 7, dist.get_rank()).backward()


def accumulate_and_say_so(model, step):
    model.set_is_last_backward(False)
    loss_of(model, step, dist.get_rank()).backward()
    model.set_is_last_backward(True)
    loss_of(model, step + 7, dist.get_rank()).backward()


def begin_again(model, step):
    """What was sent is dropped, and nobody says that the second backward is the last."""
    loss_of(model, step + 7, dist.get_rank()).backward()
    model.zero_grad()
    model.set_is_last_backward(False)
    loss_of(model, step, dist.get_rank()).backward()
    model.set_is_last_backward(True)


def drop_some(model, step):
    loss_of(model, step, dist.get_rank()).backward()
    model.layers[0].down.weight.grad = None


def without_sync(model, step):
    model.set_requires_gradient_sync(False)
    loss_of(model, step, dist.get_rank()).backward()
    model.set_requires_gradient_sync(True)
    loss_of(model, step + 7, dist.get_rank()).backward()


CHANGES = [
    clip,
    clip_with_torch,
    write,
    accumulate,
    accumulate_and_say_so,
    begin_again,
    drop_some,
    without_sync,
]


def compare(change):
    expected = train_with(change, in_backward=False)
    for name, value in train_with(change, in_backward=True).items():
        same(value, expected[name], f"{change.__name__}: {name}")


def test_gradients_that_change_after_they_were_sent_are_sent_again():
    run_cases(compare, 2, [{"change": change} for change in CHANGES])


def gradients_at_once(at_once):
    """The most whole gradients that a rank has at a time, of those that have arrived or are on their way."""
    model = shard(Wide())
    live, most = [], []
    optimizer = whole(Muon, model.parameters(), at_once=at_once, in_backward=True)
    issue = optimizer._gradients._issue

    def watched(*args):
        movement, wholes = issue(*args)
        live.extend(map(weakref.ref, wholes.values()))
        most.append(sum(reference() is not None for reference in live))
        return movement, wholes

    optimizer._gradients._issue = watched
    for step in range(2):
        model(data(step, dist.get_rank(), 2, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return max(most)


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
def test_no_more_gradients_are_whole_at_once_than_allowed(at_once):
    # Of eight matrices, each rank owns four; the next round is on its way while one is stepped.
    assert run_ranks(gradients_at_once, 2, at_once) == [min(at_once, 4)] * 2


def fail():
    """An owner raises after gradients were sent; then a backward raises in the middle."""
    model, twin = shard(seeded(Model())), shard(seeded(Model()))
    optimizer = whole(Failing, matrices(model.parameters()), lr=0.02, in_backward=True, at_once=100)
    expected = whole(Muon, matrices(twin.parameters()), lr=0.02)
    loss_of(model, 0, dist.get_rank()).backward()
    Failing.fails_on = 1
    dist.barrier()
    with pytest.raises((ValueError, PeerFailure), match="no root"):
        optimizer.step()
    dist.barrier()
    Failing.fails_on = None
    dist.barrier()
    optimizer.step()
    optimizer.zero_grad()
    train(twin, expected, 1)
    handle = model.layers[0].up.register_forward_hook(raise_in_backward_of_rank_one)
    with pytest.raises((ValueError, PeerFailure)):
        loss_of(model, 1, dist.get_rank()).backward()
    handle.remove()
    optimizer.zero_grad()
    for step in (1, 2):
        train(model, optimizer, 1, first=step)
        train(twin, expected, 1, first=step)
    for (name, value), other in zip(values_of(model).items(), values_of(twin).values(), strict=True):
        same(value, other, name)


def raise_in_backward_of_rank_one(module, args, output):
    def no_gradient(gradient):
        raise ValueError("no gradient here")

    if dist.get_rank() == 1:
        output.register_hook(no_gradient)


def test_after_an_error_training_goes_on():
    run_ranks(fail, 2)


def on_replicas():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    results = []
    for in_backward in (False, True):
        model = shard(seeded(Model()), mesh=mesh)
        optimizer = chosen("Muon", in_backward=in_backward)(model.parameters())
        train(model, optimizer, 3)
        results.append(values_of(model))
    for name, value in results[0].items():
        same(results[1][name], value, name)


def test_replicas_give_the_same_results():
    run_ranks(on_replicas, 4)


def wrapped():
    results = []
    for in_backward in (False, True):
        model = seeded(Model())
        for number, layer in enumerate(model.layers):
            model.layers[number] = FullyShardedDataParallel(layer, use_orig_params=True)
        model = FullyShardedDataParallel(model, use_orig_params=True)
        shapes = [param.dim() for param in Model().parameters()]
        params = [param for param, dims in zip(model.parameters(), shapes, strict=True) if dims == 2]
        optimizer = whole(Muon, params, lr=0.02, in_backward=in_backward, at_once=100)
        train(model, optimizer, 3)
        with FullyShardedDataParallel.summon_full_params(model):
            results.append([param.detach().clone() for param in model.parameters()])
    for one, other in zip(*results, strict=True):
        same(one, other, "wrapped")


def test_the_wrapper_gives_the_same_results():
    run_ranks(wrapped, 2)


def with_flat():
    """Both parts of a mixed optimizer begin in backward, and use the same units."""
    results = []
    for in_backward in (False, True):
        model = shard(seeded(Model()), offload_policy=CPUOffloadPolicy(pin_memory=False))
        rest = [param for param in model.parameters() if param.dim() < 2]
        optimizer = mixed(
            [
                whole(Muon, matrices(model.parameters()), lr=0.02, in_backward=in_backward),
                flat(rest, AdamW, in_backward=in_backward),
            ]
        )
        train(model, optimizer, 4)
        results.append(values_of(model))
    for name, value in results[0].items():
        same(results[1][name], value, name)


def test_a_flat_optimizer_beside_it_steps_in_backward_too():
    run_ranks(with_flat, 2)


def between_processes():
    model, optimizer = make(in_backward=True)
    twin, expected = make()
    train(model, optimizer, 3)
    train(twin, expected, 3)
    for (name, value), other in zip(values_of(model).items(), values_of(twin).values(), strict=True):
        same(value, other, name)


@pytest.mark.parametrize("world", [2, slow(4)])
def test_it_works_between_processes(world):
    run_ranks(between_processes, world, kind="gloo")


def forget():
    """A unit does not keep an optimizer alive."""
    model = fully_shard(nn.Linear(4, 4, bias=False))
    optimizer = whole(Muon, model.parameters(), in_backward=True)
    reference = weakref.ref(optimizer)
    del optimizer
    model(torch.ones(1, 4)).sum().backward()
    return reference() is None


def test_an_optimizer_that_is_gone_hears_nothing():
    assert run_ranks(forget, 2) == [True] * 2
