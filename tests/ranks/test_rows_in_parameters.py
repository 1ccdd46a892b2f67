"""Rows of a reduce lie where the full parameters were, as on a device: the same bits as in memory of their own.

Ranks are threads on the CPU with a device's schedule: memory goes as soon as the host has issued what uses it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from shardwise import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from shardwise.comm.streams import SideStream, SideStreams
from shardwise.engine.unit.membership import units_of
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import Layers, RunsALayerTwice, TwoLayers, data, same, sgd
from tests.ranks.subject import beyond_torch
from tests.ranks.tables import run_cases

pytestmark = beyond_torch

NUM_STEPS = 3
WIDTH = 8


class RunsAhead(SideStreams):
    """Frees memory when a device's host would."""

    host_runs_ahead = True


class Ties(Layers):
    def __init__(self):
        super().__init__(width=WIDTH)
        self.layers[2].in_proj.weight = self.layers[0].in_proj.weight


class OneLayerACall(TwoLayers):
    """Each call uses one of two parameters: the first call's are still to be gathered when the second's are reduced."""

    def __init__(self):
        super().__init__(WIDTH)
        self.out_proj = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.is_first = True

    def forward(self, x):
        layer = self.in_proj if self.is_first else self.out_proj
        self.is_first = not self.is_first
        return torch.relu(layer(x))[..., :WIDTH]


class GathersWhatIsReduced(Layers):
    def __init__(self):
        super().__init__(width=WIDTH)
        self.layers[1] = OneLayerACall()

    def forward(self, x):
        x = self.layers[0](self.first(x))
        return self.last(self.layers[1](self.layers[1](x)))


class LeavesALayerOut(Layers):
    def forward(self, x):
        return self.last(self.layers[2](self.layers[0](self.first(x))))


def by_fully_shard(model, **options):
    if "replicas" in options:
        mesh = init_device_mesh("cpu", (options.pop("replicas"), 2), mesh_dim_names=("replicate", "shard"))
        options["mesh"] = mesh
    return fully_shard(model, wrap=TwoLayers, **options)


def by_wrapper(model, **options):
    for index, layer in enumerate(model.layers):
        model.layers[index] = FullyShardedDataParallel(layer, **options)
    return FullyShardedDataParallel(model, **options)


def no_change(model):
    pass


def freezes(model):
    model.layers[1].requires_grad_(False)
    model.layers[2].out_proj.requires_grad_(False)


def recomputes(model, use_reentrant):
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=use_reentrant)


def act_like_a_device(model, on_device):
    """Gives the model a device's streams; returns a list that gets for each reduce whether its rows borrow memory."""
    borrowed = []
    units = list(dict.fromkeys(unit for module in model.modules() for unit in units_of(module)))
    for unit in units:
        for calls in unit.all_calls():
            # Models of one mesh share these.
            calls.ordered_by_stream = on_device
    root = units[0].root
    lend = root.lend_freed
    if on_device:
        root.streams = RunsAhead(*[SideStream()] * 3)

    def noted(unit, plan):
        lender = lend(unit, plan)
        borrowed.append(lender is not None)
        return lender

    root.lend_freed = noted
    return borrowed


def trained(on_device, build, shard, prepare, accumulates, options, configure):
    """Losses, gradients of all steps and the weights in the end; and for each reduce whether its rows borrowed."""
    model = seeded(build())
    prepare(model)
    model = shard(model, **options)
    configure(model)
    model(data(0, 0, 4, WIDTH)).sum().backward()
    model.zero_grad()
    borrowed = act_like_a_device(model, on_device)
    optim = sgd(model.parameters())
    found = []
    for step in range(NUM_STEPS):
        for micro_batch in range(2 if accumulates else 1):
            if accumulates == "without sync":
                model.set_requires_gradient_sync(micro_batch == 1)
            loss = model(data(2 * step + micro_batch, torch.distributed.get_rank(), 4, WIDTH)).square().mean()
            loss.backward()
            found.append(loss.detach())
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None and p.grad.numel()]
        optim.step()
        optim.zero_grad()
    found += [param.detach().clone() for param in model.parameters()]
    return found, borrowed


def same_bits(
    borrows,
    build=None,
    shard=by_fully_shard,
    prepare=no_change,
    accumulates="",
    configure=no_change,
    **options,
):
    build = build or partial(Layers, width=WIDTH)
    args = (build, shard, prepare, accumulates, options, configure)
    plain, borrowed_on_a_host = trained(False, *args)
    found, borrowed = trained(True, *args)
    assert not any(borrowed_on_a_host)
    assert len(plain) == len(found)
    for one, other in zip(found, plain, strict=True):
        same(one, other, "loss, gradient or weight")
    assert all(borrowed) if borrows else not any(borrowed), borrowed
    assert len(borrowed) >= NUM_STEPS


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def reduces_twice_at_once(model):
    model.set_reduce_scatter_max_input_buffers(2)


def reduces_apart(model):
    model.set_separate_reduce_scatter_group(True)


def keeps_after_backward(model):
    model.set_reshard_after_backward(False)


def test_rows_in_the_memory_of_full_parameters_change_no_bit():
    run_cases(
        same_bits,
        2,
        [
            {"borrows": True},
            {"borrows": True, "reshard_after_forward": False},
            {"borrows": True, "mp_policy": MIXED},
            {"borrows": True, "exact": True},
            {"borrows": True, "exact": True, "accumulates": "with sync"},
            {"borrows": True, "accumulates": "with sync"},
            {"borrows": True, "accumulates": "without sync"},
            {"borrows": True, "build": Ties},
            {"borrows": True, "build": partial(RunsALayerTwice, width=WIDTH)},
            {"borrows": True, "build": GathersWhatIsReduced},
            {"borrows": True, "build": partial(LeavesALayerOut, width=WIDTH)},
            {"borrows": True, "prepare": freezes},
            {"borrows": True, "prepare": partial(recomputes, use_reentrant=False)},
            {"borrows": True, "prepare": partial(recomputes, use_reentrant=True)},
            {"borrows": True, "shard": by_wrapper},
            {"borrows": True, "shard": by_wrapper, "use_orig_params": True},
        ],
    )


def test_rows_have_memory_of_their_own_where_they_do_not_fit_or_more_overlap_is_wanted():
    run_cases(
        same_bits,
        2,
        [
            {
                "borrows": False,
                "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            },
            {"borrows": False, "configure": reduces_twice_at_once},
            {"borrows": False, "configure": reduces_apart},
            {"borrows": False, "configure": keeps_after_backward},
        ],
    )


def test_replicas_and_parts_kept_after_forward_borrow_too():
    run_cases(same_bits, 4, [{"borrows": True, "replicas": 2}, {"borrows": True, "reshard_after_forward": 2}])


class NotesWaits(SideStream):
    def __init__(self, noted):
        self._noted = noted

    def wait_event(self, event):
        self._noted.append("the gather stream waits for compute")


def replaced_in_forward():
    """What happens before a unit makes new buffers, because one of its gathered parameters has other memory."""
    model = by_fully_shard(seeded(Layers(width=WIDTH)))
    act_like_a_device(model, True)
    model(data(0, 0, 4, WIDTH)).sum().backward()
    layer = model.layers[1]
    (unit,) = units_of(layer)
    noted = []
    unit.root.streams = RunsAhead(NotesWaits(noted), SideStream(), SideStream())
    build = unit.build
    unit.build = lambda: (noted.append("new buffers"), build())
    layer.unshard()
    layer.in_proj.weight.data = layer.in_proj.weight.data.clone()
    del noted[:]
    model(data(0, 0, 4, WIDTH))
    return noted[: noted.index("new buffers") + 1][-2:]


def test_memory_of_a_unit_goes_back_before_it_makes_new_buffers():
    expected = ["the gather stream waits for compute", "new buffers"]
    assert run_ranks(replaced_in_forward, 2) == [expected, expected]
