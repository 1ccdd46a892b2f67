"""The memory of shards' gradients is used again step after step, but never while somebody still holds part of it."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from shardwise import fully_shard
from shardwise.testing import run_ranks


def small():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.arange(param.numel()).reshape(param.shape) / 10)
    fully_shard(model)
    return model


def backward(model, scale):
    (model(torch.full((2, 6), scale)).sum() * scale).backward()


def drop(model):
    for param in model.parameters():
        param.grad = None


def laid_out_once():
    model = small()
    backward(model, 1.0)
    storage = model[0].weight.grad._local_tensor.untyped_storage()._cdata
    drop(model)
    backward(model, 2.0)
    return storage == model[0].weight.grad._local_tensor.untyped_storage()._cdata


def test_gradient_memory_is_laid_out_once():
    assert all(run_ranks(laid_out_once, 2, kind="gloo"))


def saved_in_a_graph(gradient):
    """A function that finds the gradient where autograd alone has kept it."""
    factor = torch.ones_like(gradient).requires_grad_()
    product = (gradient * factor).sum()
    return lambda: torch.autograd.grad(product, factor, retain_graph=True)[0]


def held(how):
    """Keeps a gradient of the first step in some way, and says whether the second step left it alone."""
    model = small()
    backward(model, 1.0)
    weight = model[0].weight
    kept = {
        "the gradient": lambda: weight.grad,
        "its local tensor": lambda: weight.grad._local_tensor,
        "a local view": lambda: weight.grad.to_local(),
        "a slice": lambda: weight.grad.to_local()[:1],
        "detached": lambda: weight.grad.detach(),
        "in a closure": lambda: lambda gradient=weight.grad: gradient,
        "in a graph": lambda: saved_in_a_graph(weight.grad),
    }[how]()
    value = kept() if callable(kept) and not isinstance(kept, torch.Tensor) else kept
    local = value.to_local() if hasattr(value, "to_local") else value
    before = local.clone()
    del value, local
    drop(model)
    backward(model, 2.0)
    after = kept() if callable(kept) and not isinstance(kept, torch.Tensor) else kept
    after_local = after.to_local() if hasattr(after, "to_local") else after
    return torch.equal(after_local, before) and not torch.equal(weight.grad.to_local()[: len(before)], before)


@pytest.mark.parametrize(
    "how",
    ["the gradient", "its local tensor", "a local view", "a slice", "detached", "in a closure", "in a graph"],
)
def test_a_gradient_that_someone_holds_keeps_its_values(how):
    assert all(run_ranks(held, 2, how, kind="gloo"))


def memory_goes(how):
    """Whether the memory is there while one gradient is left, after the last, and when nothing is held any more."""
    model = small()
    backward(model, 1.0)
    weight = model[0].weight
    storage = weight.grad._local_tensor.untyped_storage()
    kept = {
        "nothing": lambda: None,
        "a copy": lambda: copy.deepcopy(weight.grad),
        "one": lambda: weight.grad,
    }[how]()
    *others, last = model.parameters()
    for param in others:
        param.grad = None
    while_one_is_left = storage.nbytes()
    last.grad = None
    at_the_end = storage.nbytes()
    return while_one_is_left > 0, at_the_end > 0, kept is None or kept.to_local().isfinite().all().item()


@pytest.mark.parametrize(
    ("how", "stays"), [("nothing", False), ("a copy", False), ("one", True)], ids=lambda value: str(value)
)
def test_the_memory_goes_with_the_last_gradient(how, stays):
    assert run_ranks(memory_goes, 2, how, kind="gloo") == [(True, stays, True)] * 2


def accumulated(set_to_none):
    model = small()
    backward(model, 1.0)
    one = [param.grad.to_local().clone() for param in model.parameters()]
    backward(model, 1.0)
    two = [param.grad.to_local().clone() for param in model.parameters()]
    for param in model.parameters():
        if set_to_none:
            param.grad = None
        else:
            param.grad.zero_()
    backward(model, 1.0)
    again = [param.grad.to_local().clone() for param in model.parameters()]
    doubled = all(torch.equal(b, a * 2) for a, b in zip(one, two, strict=True))
    return doubled and all(torch.equal(a, b) for a, b in zip(one, again, strict=True))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_accumulate_and_start_over(set_to_none):
    assert all(run_ranks(accumulated, 2, set_to_none, kind="gloo"))


def dropped_model(with_gradients):
    """Whether a model that has trained, and is dropped, leaves anything of its units behind."""
    model = small()
    backward(model, 1.0)
    if not with_gradients:
        drop(model)
    units = [weakref.ref(unit) for unit in model._shardwise_units]
    weight = weakref.ref(model._shardwise_units[0].slots[0].unsharded)
    del model
    gc.collect()
    return [unit() is None for unit in units], weight() is None


@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_model_that_is_dropped_goes(with_gradients):
    assert run_ranks(dropped_model, 2, with_gradients, kind="gloo") == [([True], True)] * 2
