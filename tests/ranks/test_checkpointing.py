"""Activation checkpointing of all three kinds, on units, inside them and around several: right gradients, and no
gather beyond the ones that forward and backward take without it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import checkpoint as checkpointed
from torch.utils.checkpoint import checkpoint

from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import (
    TwoLayers,
    average_gradients,
    data,
    full,
    held_bytes,
    same,
    same_shard,
    seen_weights,
    sgd,
)
from tests.ranks.subject import MixedPrecisionPolicy, beyond_torch, fully_shard, record
from tests.ranks.tables import cases_of, run_cases

pytestmark = pytest.mark.arithmetic

WIDTH = 6
NUM_LAYERS = 4
KINDS = ["non-reentrant", "reentrant", "composable"]
PLACES = ["units", "inside units", "around units", "the root"]


class Model(nn.Module):
    """Layers, of which some or all run under a checkpoint."""

    def __init__(self, place=None, kind=None):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            Layer(kind if place == "inside units" else None) for _ in range(NUM_LAYERS)
        )
        self.pairs = nn.ModuleList(
            nn.Sequential(*self.layers[index : index + 2]) for index in range(0, NUM_LAYERS, 2)
        )
        self.last = nn.Linear(WIDTH, WIDTH)
        self.place = place
        self.kind = kind
        if kind == "composable":
            for module in {"units": self.layers, "around units": self.pairs}.get(place, ()):
                checkpointed(module)

    def forward(self, x):
        x = self.first(x)
        for module in self.pairs if self.place == "around units" else self.layers:
            if self.place in ("units", "around units"):
                x = run(module, x, self.kind)
            else:
                x = module(x)
        return self.last(x)


class Layer(TwoLayers):
    def __init__(self, kind):
        super().__init__(WIDTH)
        self.kind = kind
        if kind == "composable":
            checkpointed(self.in_proj)

    def forward(self, x):
        return self.out_proj(torch.relu(run(self.in_proj, x, self.kind)))


def run(module, x, kind):
    if kind in ("non-reentrant", "reentrant"):
        return checkpoint(module, x, use_reentrant=kind == "reentrant")
    return module(x)


def build(place, kind, reshard=True, **kwargs):
    model = seeded(Model(place, kind))
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard, **kwargs)
    model = fully_shard(model, **kwargs)
    if place == "the root" and kind == "composable":
        checkpointed(model)
    return model


def run_model(model, x):
    if getattr(model, "place", None) == "the root":
        # Reentrant checkpoints need an input that asks for grad.
        return run(model, x.requires_grad_(), model.kind)
    return model(x)


def loss_of(model, step, rank):
    return run_model(model, data(step, rank, 2, WIDTH)).square().mean()


def check_gradients(place, kind, reshard):
    model, plain = build(place, kind, reshard), seeded(Model())
    optims = [sgd(each.parameters()) for each in (model, plain)]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    what = f"{kind} on {place}, reshard {reshard}"
    for step in range(3):
        loss = loss_of(model, step, rank)
        loss.backward()
        losses = average_gradients(plain, partial(loss_of, plain, step), world_size)
        same(loss.detach(), losses[rank], f"{what}, step {step}: loss")
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            same_shard(param.grad, expected.grad, f"{what}, step {step}: gradient of {name}")
        for each in optims:
            each.step()
            each.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_plain_model(kind):
    for place in PLACES:
        for reshard in (True, False):
            run_ranks(check_gradients, 2, place, kind, reshard)
    run_ranks(check_gradients, 4, "units", kind, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_plain_model_where_ranks_are_processes(kind):
    for place in ("units", "around units"):
        run_ranks(check_gradients, 2, place, kind, True, kind="gloo")


def gathers(place, kind, reshard):
    """Gathers and reduces of one step, by phase and unit, after a first step has settled everything."""
    model = build(place, kind, reshard)
    with record(model) as recorder:
        for step in range(2):
            recorder.clear()
            loss = loss_of(model, step, dist.get_rank())
            forward = sorted(unit for _, unit, _ in recorder.of("unshard"))
            recorder.clear()
            loss.backward()
            backward = sorted(unit for _, unit, _ in recorder.of("unshard"))
            reduces = sorted(unit for _, unit, _ in recorder.of("reduce"))
    return forward, backward, reduces


LAYERS = [f"layers.{index}" for index in range(NUM_LAYERS)]


@beyond_torch
@pytest.mark.parametrize("kind", KINDS)
def test_no_unit_is_gathered_twice_in_a_pass(kind):
    for place in PLACES:
        for reshard, in_backward in ((True, LAYERS), (False, [])):
            for forward, backward, reduces in run_ranks(gathers, 2, place, kind, reshard):
                what = f"{kind} on {place}, reshard {reshard}"
                assert forward == ["", *LAYERS], f"{what}: forward gathers {forward}"
                if place == "the root" and kind == "reentrant":
                    # Its forward runs without grad, so nothing is kept for it. What backward runs is a whole pass,
                    # forward and backward, of the model.
                    expected = ["", *sorted(2 * LAYERS)] if reshard else [""]
                else:
                    expected = in_backward
                assert backward == expected, f"{what}: backward gathers {backward}"
                assert reduces == ["", *LAYERS], f"{what}: {reduces}"


def memory_in_backward(place, kind):
    """While a layer is recomputed, no more than it, its neighbour and the root are in memory."""
    model = build(place, kind)
    most = 0

    def look(module, args):
        nonlocal most
        most = max(most, held_bytes(weights))

    with seen_weights(*(layer.in_proj for layer in model.layers)) as weights:
        loss = loss_of(model, 0, dist.get_rank())
        handles = [layer.out_proj.register_forward_pre_hook(look) for layer in model.layers]
        handles += [layer.in_proj.register_forward_pre_hook(look) for layer in model.layers]
        loss.backward()
        for handle in handles:
            handle.remove()
        assert held_bytes(weights) == 0
    layer_bytes = sum(param.numel() for param in TwoLayers(WIDTH).parameters()) * 4
    assert most > 0, "no layer was recomputed"
    assert most < 2.5 * layer_bytes, f"{kind} on {place}: {most} bytes of layers of {layer_bytes}"


@beyond_torch
@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_keeps_no_more_than_two_units(kind):
    for place in ("units", "inside units"):
        run_ranks(memory_in_backward, 2, place, kind)


def accumulates(kind):
    """Micro-batches without sync, then one with it."""
    model, plain = build("units", kind), seeded(Model())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        loss_of(model, step, rank).backward()
    totals = {}
    for each in range(world_size):
        for step in range(3):
            grads = torch.autograd.grad(loss_of(plain, step, each), list(plain.parameters()))
            for param, grad in zip(plain.parameters(), grads, strict=True):
                totals.setdefault(param, {}).setdefault(each, []).append(grad)
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        sums = [sum(grads[1:], grads[0]) for grads in totals[expected].values()]
        same_shard(param.grad, sum(sums[1:], sums[0]) / world_size, f"{kind}: gradient of {name}", 1e-6)


def test_gradients_accumulate_without_sync():
    run_cases(accumulates, 2, cases_of(kind=KINDS))


def in_low_precision(kind):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = [build("units", each, mp_policy=policy) for each in (kind, None)]
    for step in range(2):
        losses = [loss_of(model, step, dist.get_rank()) for model in models]
        for loss in losses:
            loss.backward()
        same(losses[0].detach(), losses[1].detach(), f"{kind}, step {step}: loss")
        for (name, param), expected in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            same(full(param.grad), full(expected.grad), f"{kind}, step {step}: gradient of {name}")


def test_checkpointing_changes_nothing_in_low_precision():
    run_cases(in_low_precision, 2, cases_of(kind=KINDS))


class FrozenBase(nn.Module):
    """A frozen layer with a small trained one beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.adapter(x))


def frozen(kind):
    def build():
        return seeded(nn.Sequential(*(FrozenBase() for _ in range(3))))

    model, plain = build(), build()
    for layer in model:
        if kind == "composable":
            checkpointed(layer)
        fully_shard(layer)
    fully_shard(model)

    def loss_in(each, kind, step, rank):
        x = data(step, rank, 2, WIDTH).requires_grad_()
        for layer in each:
            x = run(layer, x, kind)
        return x.square().mean()

    # The layers are run one by one: the root's forward is not called, each layer is a root of its own.
    for step in range(2):
        loss_in(model, kind, step, dist.get_rank()).backward()
        average_gradients(plain, partial(loss_in, plain, None, step), dist.get_world_size())
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (param.grad is None) == (expected.grad is None), f"{kind}: {name}"
            if expected.grad is not None:
                same_shard(param.grad, expected.grad, f"{kind}, step {step}: gradient of {name}")
        model.zero_grad()
        plain.zero_grad()


def test_frozen_layers_may_be_checkpointed():
    run_cases(frozen, 2, cases_of(kind=KINDS))
