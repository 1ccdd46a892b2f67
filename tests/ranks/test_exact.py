"""Exact mode: the same micro-batches give the same bits on 1, 2, 4 and 8 ranks, and however the model is sharded."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from shardwise import (
    ConfigError,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    PeerFailure,
    ShardingStrategy,
    ZeroRedundancyOptimizer,
    clip_grad_norm_,
    fully_shard,
    set_trust,
)
from shardwise.engine.reduce.exact_sums import TALLY_ATTRIBUTE
from shardwise.engine.unit.membership import units_of
from shardwise.optim import flat
from shardwise.testing import run_ranks
from shardwise.testing.workloads import TIED_ACROSS_UNITS, WORKLOADS, seeded
from tests.ranks.models import Layers, data, full
from tests.ranks.subject import beyond_torch
from tests.ranks.tables import run_cases, slow

pytestmark = [beyond_torch, pytest.mark.arithmetic]

NUM_MICRO_BATCHES = 8
NUM_STEPS = 3
MAX_NORM = 0.5


def own_micro_batches(count=NUM_MICRO_BATCHES):
    """Micro-batch m belongs to rank m modulo the number of ranks."""
    return range(dist.get_rank(), count, dist.get_world_size())


def mesh_of(mode, device):
    world_size = dist.get_world_size()
    replicas = world_size if mode == "replicas" else min(2, world_size)
    return init_device_mesh(device, (replicas, world_size // replicas))


def composed(workload, mode, precision, exact, device="cpu", **options):
    model = workload.model(device)
    options = {
        "exact": exact,
        "reshard_after_forward": {"kept": False, "parts": 2}.get(mode, True),
        **options,
    }
    if mode in ("hybrid", "replicas"):
        options["mesh"] = mesh_of(mode, device)
    if precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for unit in (*workload.units(model), model):
        fully_shard(unit, **options)
    return model


STRATEGIES = {
    "full": ShardingStrategy.FULL_SHARD,
    "kept": ShardingStrategy.SHARD_GRAD_OP,
    "replicas": ShardingStrategy.NO_SHARD,
    "hybrid": ShardingStrategy.HYBRID_SHARD,
}


def wrapped(workload, mode, precision, exact, device="cpu"):
    model = workload.model(device)
    options = {"exact": exact, "sharding_strategy": STRATEGIES[mode], "use_orig_params": mode != "kept"}
    if mode == "hybrid":
        options["device_mesh"] = mesh_of(mode, device)
    if precision == "bf16":
        options["mixed_precision"] = MixedPrecision(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    chosen = set(workload.units(model))
    policy = lambda module, recurse, **_: recurse or module in chosen  # noqa: E731
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)


APIS = {"fully_shard": composed, "wrapper": wrapped}


def backward(model, workload, step, micro_batch, count=NUM_MICRO_BATCHES, device="cpu"):
    batch = workload.data(step, micro_batch, 0, device)
    (workload.loss(model(*batch), batch) / (count // dist.get_world_size())).backward()


def whole(model):
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return {name: param.detach().clone() for name, param in model.named_parameters()}
    return {name: full(param.detach()).clone() for name, param in model.named_parameters()}


def trained(workload, api, mode, precision, exact=True, device="cpu", **options):
    """What some steps lead to: whole parameters and the norms that were clipped; from rank 0."""
    workload = WORKLOADS[workload]
    model = APIS[api](workload, mode, precision, exact, device, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    for step in range(NUM_STEPS):
        for micro_batch in own_micro_batches():
            backward(model, workload, step, micro_batch, device=device)
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    assert all(norm > MAX_NORM for norm in norms), "nothing was clipped"
    result = {name: value.cpu() for name, value in {"norms": torch.stack(norms), **whole(model)}.items()}
    return result if dist.get_rank() == 0 else None


MLP, TRANSFORMER = ("odd MLP", "fp32"), ("tied transformer", "fp32")
TRANSFORMER_BF16 = ("tied transformer", "bf16")
ALL = (MLP, TRANSFORMER, TRANSFORMER_BF16)
# Who shards how, and what, for each number of ranks: each pair of API and mode somewhere.
PLACES = {
    (1, "threads"): [("fully_shard", "full", ALL), ("wrapper", "kept", ALL)],
    (2, "gloo"): [("fully_shard", "kept", ALL), ("wrapper", "full", ALL), ("wrapper", "replicas", ALL)],
    (4, "gloo"): [
        ("fully_shard", "hybrid", ALL),
        ("fully_shard", "replicas", (MLP,)),
        ("fully_shard", "parts", (TRANSFORMER_BF16,)),
        ("wrapper", "hybrid", ALL),
    ],
    (8, "threads"): [("fully_shard", "hybrid", (MLP,)), ("wrapper", "kept", ALL)],
}


def trainings(all_places, exact, among=ALL):
    """What each training comes to, with where it ran."""
    for (world_size, kind), places in all_places.items():
        cases = [
            {"api": api, "mode": mode, "workload": workload, "precision": precision, "exact": exact}
            for api, mode, chosen in places
            for workload, precision in chosen
            if (workload, precision) in among or len(chosen) == 1 or world_size == 1
        ]
        for case, result in zip(cases, run_cases(trained, world_size, cases, kind=kind)[0], strict=True):
            yield (case["workload"], case["precision"]), f"{world_size} {kind}: {case}", result


def differing(one, other):
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("among", [(MLP,), slow(ALL)], ids=["one", "all"])
def test_training_comes_to_the_same_bits_on_any_number_of_ranks_in_any_mode(among):
    first = {}
    for what, where, result in trainings(PLACES, exact=True, among=among):
        assert not differing(first.setdefault(what, result), result), where


def test_without_exact_sums_it_does_not():
    first, bad = {}, set()
    places = {(world_size, "threads"): [("wrapper", "full", ALL)] for world_size in (1, 4)}
    for what, _, result in trainings(places, exact=False):
        if differing(first.setdefault(what, result), result):
            bad.add(what)
    assert bad == set(first)


# --- the order of the sum -------------------------------------------------------------------------------------------


def by_halving(terms):
    if len(terms) == 1:
        return terms[0]
    half = 1
    while 2 * half < len(terms):
        half *= 2
    return by_halving(terms[:half]) + by_halving(terms[half:])


def accumulated(count, mode, precision):
    """Gradients after each backward, against sums made by hand on this one process."""
    workload = WORKLOADS["odd MLP"]
    model = composed(workload, mode, precision, exact=True)
    plain = workload.model().to(torch.bfloat16 if precision == "bf16" else torch.float32)
    world_size = dist.get_world_size()
    terms = []
    for micro_batch in range(count):
        batch = workload.data(0, micro_batch, 0)
        inputs = [value.to(next(plain.parameters()).dtype) for value in batch]
        plain.zero_grad()
        (workload.loss(plain(*inputs), batch) / (count // world_size)).backward()
        terms.append([param.grad.float() for param in plain.parameters()])
    for number, micro_batch in enumerate(own_micro_batches(count)):
        backward(model, workload, 0, micro_batch, count)
        so_far = terms[: (number + 1) * world_size]
        for (name, param), grads in zip(model.named_parameters(), zip(*so_far, strict=True), strict=True):
            expected = by_halving(grads) / world_size
            assert torch.equal(full(param.grad), expected), f"{name} after {number + 1} backwards"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_gradient_is_at_all_times_the_sum_by_halving_in_float32_of_what_was_computed(world_size):
    counts = {"full": 8, "hybrid": 12}
    cases = [
        {"mode": mode, "count": counts[mode], "precision": p} for mode in counts for p in ("fp32", "bf16")
    ]
    run_cases(accumulated, world_size, cases)


class Parts(nn.Module):
    """Units that are reduced in several parts of a backward, run twice, used at times, or not at all."""

    def __init__(self):
        super().__init__()
        self.layers = seeded(Layers(num_layers=2, width=5))
        self.unused = nn.Linear(5, 5)
        self.at_times = nn.Linear(5, 5)

    def forward(self, x, reentrant, is_time):
        x = self.layers.first(x)
        if is_time:
            x = x + self.at_times(x)
        for layer in (*self.layers.layers, self.layers.layers[0]):
            x = checkpoint(layer, x, use_reentrant=True) if reentrant else layer(x)
        return self.layers.last(x)


def whole_gradients(model, shard, reentrant, tied):
    """Of 12 micro-batches, all of them here if the model is not sharded."""
    units = TIED_ACROSS_UNITS.units(model) if tied else model.layers.layers
    for unit in (*units, model) if shard else ():
        fully_shard(unit, exact=True)
    for micro_batch in own_micro_batches(count=12) if shard else range(12):
        if tied:
            (batch,) = TIED_ACROSS_UNITS.data(0, micro_batch, 0)
            loss = TIED_ACROSS_UNITS.loss(model(batch), (batch,))
        else:
            x = data(0, micro_batch, 3, 5).requires_grad_()
            # The same on all ranks of a backward, however many there are.
            loss = model(x, reentrant, is_time=micro_batch // 4 != 1).square().mean()
        (loss / (12 // dist.get_world_size() if shard else 12)).backward()
    return {
        name: None if param.grad is None else full(param.grad).clone()
        for name, param in model.named_parameters()
    }


def gradients_of_parts(**case):
    plain, model = (TIED_ACROSS_UNITS.model() if case["tied"] else seeded(Parts()) for _ in range(2))
    expected, got = whole_gradients(plain, False, **case), whole_gradients(model, True, **case)
    for name, grad in expected.items():
        assert (grad is None) == (got[name] is None) == name.startswith("unused"), name
        assert grad is None or torch.allclose(got[name], grad, rtol=1e-4, atol=1e-6), name
    return got


def test_units_that_are_reduced_in_parts_tied_or_unused_come_to_the_same_bits():
    cases = [{"reentrant": a, "tied": b} for a, b in ((False, False), (True, False), (False, True))]
    expected = run_cases(gradients_of_parts, 1, cases)[0]
    for world_size in (2, 4):
        results = run_cases(gradients_of_parts, world_size, cases)[0]
        for case, want, got in zip(cases, expected, results, strict=True):
            for name, grad in want.items():
                assert grad is None or torch.equal(grad, got[name]), f"{name}, {world_size} ranks, {case}"


# --- in company -----------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Each micro-batch takes one of two branches."""

    def __init__(self):
        super().__init__()
        self.even, self.odd, self.last = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, x, number):
        return self.last(self.odd(x) if number % 2 else self.even(x))


def branches_that_ranks_take():
    model = seeded(Branches())
    for unit in (model.even, model.odd, model):
        fully_shard(unit, exact=True)
    model.set_safe_participation(True)
    for number in own_micro_batches():
        loss = model(data(0, number, 3, 5), number).square().mean()
        (loss / (NUM_MICRO_BATCHES // dist.get_world_size())).backward()
    return {name: full(param.grad).clone() for name, param in model.named_parameters()}


def stepped(model, workload, optimizer):
    for step in range(NUM_STEPS):
        for micro_batch in own_micro_batches():
            backward(model, workload, step, micro_batch)
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def flat_steps():
    workload = WORKLOADS["odd MLP"]
    model = composed(workload, "full", "fp32", exact=True)
    return stepped(model, workload, flat(model, torch.optim.AdamW, lr=0.01))


def shared_steps():
    workload = WORKLOADS["odd MLP"]
    model = wrapped(workload, "replicas", "fp32", exact=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    return stepped(model, workload, optimizer)


def steps_in_hooks():
    """Optimizers that step as soon as a gradient is there, of one backward each."""
    workload = WORKLOADS["odd MLP"]
    results = []
    for in_hooks in (True, False):
        model = composed(workload, "full", "fp32", exact=True)
        optimizers = {param: torch.optim.AdamW([param], lr=0.01) for param in model.parameters()}

        def step(param, optimizers=optimizers):
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in model.parameters():
            if in_hooks:
                param.register_post_accumulate_grad_hook(step)
        for number in range(NUM_STEPS):
            backward(model, workload, number, dist.get_rank())
            for param in () if in_hooks else model.parameters():
                step(param)
        results.append(whole(model))
    assert not differing(*results)
    return {}


def company():
    return [each() for each in (branches_that_ranks_take, flat_steps, shared_steps, steps_in_hooks)]


def test_branches_of_ranks_and_other_ways_to_step_come_to_the_same_bits():
    expected = run_ranks(company, 1)[0]
    assert not differing(expected[1], expected[2])
    for world_size in (2, 4):
        for want, got in zip(expected, run_ranks(company, world_size)[0], strict=True):
            assert not differing(want, got), world_size


# --- gradients that others touch ------------------------------------------------------------------------------------


def exact_layers(kind=Layers):
    model = seeded(kind(num_layers=2, width=5))
    for unit in (*model.layers, model):
        fully_shard(unit, exact=True)
    return model


def run_backward(model, number):
    model(data(0, number * dist.get_world_size() + dist.get_rank(), 3, 5)).square().mean().backward()


def local_grads(model):
    return [param.grad.to_local().clone() for param in model.parameters()]


def grads_of(numbers):
    """The gradients of these backwards, summed from nothing."""
    model = exact_layers()
    for number in numbers:
        run_backward(model, number)
    return local_grads(model)


def gradients_that_others_touch():
    chosen = ((0,), (3,), (1, 2), (0, 1, 2), (1, 2, 3), (0, 1, 2, 3))
    sums = {numbers: grads_of(numbers) for numbers in chosen}
    model = exact_layers()

    def expect(expected, what):
        for got, want in zip(local_grads(model), expected, strict=True):
            assert torch.equal(got, want), what

    run_backward(model, 0)
    model.zero_grad(set_to_none=True)
    run_backward(model, 1)
    run_backward(model, 2)
    expect(sums[1, 2], "dropped gradients count no more")

    model.zero_grad(set_to_none=False)
    for number in (1, 2, 3):
        run_backward(model, number)
    expect(sums[1, 2, 3], "zeroed gradients count no more")

    model.zero_grad()
    run_backward(model, 0)
    for param in model.parameters():
        param.grad.mul_(2)
    for number in (1, 2):
        run_backward(model, number)
    expect(
        [2 * a + b for a, b in zip(sums[0,], sums[1, 2], strict=True)], "a gradient that was written to stays"
    )

    model.zero_grad()
    run_backward(model, 0)
    kept = [param.grad for param in model.parameters()]
    for number in (1, 2):
        run_backward(model, number)
    expect(sums[0, 1, 2], "a gradient that is kept elsewhere does no harm")
    for got, want in zip(kept, sums[0,], strict=True):
        assert torch.equal(got.to_local(), want), "a kept gradient stays what it was"

    model.zero_grad()
    for number in (0, 1, 2):
        run_backward(model, number)
    for module in model.modules():
        for unit in units_of(module):
            # As after a step that broke off while messages were under way.
            unit.gradients.forget_reduces(set(unit.gradients._plans.values()))
    run_backward(model, 3)
    expect(sums[0, 1, 2, 3], "reduces that are made anew go on with the sum")

    model.zero_grad()
    for number in (0, 1):
        run_backward(model, number)
    kept = [param.grad for param in model.parameters()]
    run_backward(model, 2)
    for grad in kept:
        grad.to_local().zero_()
    run_backward(model, 3)
    expect(
        [a + b for a, b in zip(sums[0, 1, 2], sums[3,], strict=True)], "a part of the sum that was written to"
    )


def test_gradients_that_were_dropped_zeroed_or_written_to_are_added_to_as_ever():
    run_ranks(gradients_that_others_touch, 2)


def what_gradients_carry():
    model = exact_layers()
    for number in range(3):
        run_backward(model, number)
    grad = next(model.parameters()).grad
    copied = copy.deepcopy(grad)
    assert torch.equal(copied.to_local(), grad.to_local())
    assert copied.__dict__[TALLY_ATTRIBUTE] is not grad.__dict__[TALLY_ATTRIBUTE]
    file = io.BytesIO()
    torch.save(grad, file)
    file.seek(0)
    assert not torch.load(file, weights_only=False).__dict__.get(TALLY_ATTRIBUTE), "partial sums were saved"
    blocks = weakref.ref(grad.__dict__[TALLY_ATTRIBUTE])
    del grad, copied
    gc.collect()
    assert blocks() is not None
    gc.disable()
    try:
        model.zero_grad()
        assert blocks() is None, "partial sums outlive the gradients they are for"
    finally:
        gc.enable()


def test_partial_sums_go_with_the_gradients_and_are_not_copied_with_them():
    run_ranks(what_gradients_carry, 2)


class Stumbles(Layers):
    """Its backward fails when some units are through."""

    fails = False

    def forward(self, x):
        x = self.first(x)
        if self.fails:
            x.register_hook(self._stumble)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)

    def _stumble(self, gradient):
        raise ValueError("on purpose")


def a_backward_that_is_undone():
    is_last_rank = dist.get_rank() == dist.get_world_size() - 1
    model = exact_layers(Stumbles)
    for number in range(4):
        if number == 3:
            model.fails = is_last_rank
            with pytest.raises(ValueError if is_last_rank else PeerFailure):
                run_backward(model, number)
            model.fails = False
        run_backward(model, number)
    for got, want in zip(local_grads(model), grads_of(range(4)), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_backward_that_was_undone_and_run_again_leaves_no_trace_in_the_sum(world_size):
    before = set_trust(undoes_steps=True)
    try:
        run_ranks(a_backward_that_is_undone, world_size)
    finally:
        set_trust(undoes_steps=before.undoes_steps)


# --- what cannot be exact -------------------------------------------------------------------------------------------


def refused(call, *words):
    with pytest.raises(ConfigError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), str(caught.value)


def contradictions():
    model = exact_layers()
    rank = f"rank {dist.get_rank()}"
    for call, *words in (
        (lambda: model.set_requires_gradient_sync(False), "before ranks"),
        (lambda: model.set_requires_all_reduce(False), "before replicas"),
        (lambda: model.set_gradient_divide_factor(3.0), "not a power of two"),
        (lambda: model.set_all_reduce_hook(lambda row: None), "set_all_reduce_hook"),
        (lambda: model.set_custom_reduce_scatter(None), "exact=True"),
        (lambda: model.set_separate_reduce_scatter_group(), "exact=True"),
    ):
        refused(call, rank, "unit 'Layers'", *words)
    model.set_requires_gradient_sync(True)
    model.set_gradient_divide_factor(0.5)
    run_backward(model, 0)
    refused(lambda: clip_grad_norm_(model.parameters(), 1.0, 2.5), "order 2.5", "norm_type 2")

    wrapper = FullyShardedDataParallel(seeded(Layers()), exact=True)
    with pytest.raises(ConfigError, match="no_sync sums micro-batches before ranks"), wrapper.no_sync():
        pass
    refused(lambda: wrapper.register_comm_hook(None, lambda *_: None), "register_comm_hook", rank)

    mixed = seeded(Layers(num_layers=1))
    fully_shard(mixed.layers[0])
    fully_shard(mixed, exact=True)
    refused(lambda: mixed(data(0, 0, 3, 6)), "unit 'layers.0' does not", "to none", rank)


def test_settings_that_would_change_the_order_are_refused_on_every_rank():
    run_ranks(contradictions, 2)


def three_ranks():
    for call in (lambda m: fully_shard(m, exact=True), lambda m: FullyShardedDataParallel(m, exact=True)):
        model = seeded(Layers())
        plain = [*model.parameters()]
        refused(lambda: call(model), "3 ranks", "1, 2, 4, 8")  # noqa: B023
        assert [*model.parameters()] == plain, "something was changed"


def test_a_number_of_ranks_that_is_no_power_of_two_is_refused_before_anything_changes():
    run_ranks(three_ranks, 3)


def one_rank_is_exact():
    model = seeded(Layers())
    fully_shard(model, exact=dist.get_rank() == 0)
    model(data(0, 0, 3, 6))


def test_ranks_that_do_not_agree_on_it_are_told():
    with pytest.raises(Exception, match="summed exactly"):
        run_ranks(one_rank_is_exact, 2)
