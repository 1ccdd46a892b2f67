"""`fully_shard(model, wrap=…)` shards a whole model in one call."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise import (
    ConfigError,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    StateError,
    fully_shard,
    register_fsdp_forward_method,
    trace,
)
from shardwise.engine.unit.membership import units_of as units_of_module
from shardwise.testing import run_ranks
from shardwise.testing.workloads import Block, TiedTransformer, seeded
from tests.ranks.models import Layers, RunsALayerTwice, TwoLayers, data, full, is_sharded, same, sgd
from tests.ranks.subject import FSDPModule, beyond_torch
from tests.ranks.tables import cases_of, run_cases

pytestmark = beyond_torch


def units_of(model):
    """The names of the units, in the order a forward gathers them, with what they are gathered for."""
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def tokens(step):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(0, TiedTransformer.VOCAB, (2, 6), generator=generator)


def train(model, inputs_of):
    optim = sgd(model.parameters())
    history = []
    with trace.record(model) as recorder:
        for step in range(3):
            loss = model(inputs_of(step)).square().mean()
            loss.backward()
            optim.step()
            optim.zero_grad()
            history.append(loss.detach())
    return history, recorder.of(), [param.detach().to_local() for param in model.parameters()]


def equals_the_loop(build, wrap, chosen, inputs_of):
    """One call with `wrap` and a hand-written loop over the same modules: the same units, events and bits."""
    model, looped = seeded(build()), seeded(build())
    assert fully_shard(model, wrap=wrap) is model
    for module in chosen(looped):
        fully_shard(module)
    fully_shard(looped)
    assert units_of(model) == units_of(looped)
    got, want = train(model, inputs_of), train(looped, inputs_of)
    assert got[1] == want[1]
    for one, other in zip((*got[0], *got[2]), (*want[0], *want[2]), strict=True):
        same(one, other, "loss or shard")


def layers(model):
    return list(model.layers)


def layers_and_embeddings(model):
    return [model.embed, model.positions, *model.layers]


def linears_and_layers(model):
    return [module for layer in model.layers for module in (layer.in_proj, layer.out_proj, layer)]


def layer_data(step):
    return data(step, dist.get_rank(), 3, 6)


def is_layer(module):
    return isinstance(module, TwoLayers)


def by_class():
    equals_the_loop(TiedTransformer, Block, layers, tokens)


def test_wrap_by_class_equals_a_loop_over_the_modules_of_the_class():
    run_ranks(by_class, 2, kind="gloo")


def by_classes():
    equals_the_loop(TiedTransformer, (Block, nn.Embedding), layers_and_embeddings, tokens)
    equals_the_loop(Layers, (nn.Linear, TwoLayers), all_linears_and_layers, layer_data)


def all_linears_and_layers(model):
    return [model.first, *linears_and_layers(model), model.last]


def test_wrap_by_several_classes_shards_inner_modules_first():
    run_ranks(by_classes, 2, kind="gloo")


def by_callable():
    equals_the_loop(Layers, is_layer, layers, layer_data)


def test_wrap_by_callable_equals_a_loop_over_the_modules_it_accepts():
    run_ranks(by_callable, 2, kind="gloo")


def by_size():
    # TwoLayers(6) holds 318 elements: in_proj 168, out_proj 150. first and last hold 42 each.
    equals_the_loop(Layers, 318, layers, layer_data)
    # At 160, in_proj reaches it alone; 150 are left in the layer, which does not.
    equals_the_loop(Layers, 160, lambda model: [layer.in_proj for layer in model.layers], layer_data)
    # At 150 both do, and nothing is left for the layer.
    equals_the_loop(
        Layers,
        150,
        lambda model: [m for layer in model.layers for m in (layer.in_proj, layer.out_proj)],
        layer_data,
    )


def test_wrap_by_size_makes_a_unit_where_the_parameters_left_below_reach_it():
    run_ranks(by_size, 2, kind="gloo")


def override(module):
    if isinstance(module, TwoLayers):
        return {"reshard_after_forward": False}
    return isinstance(module, nn.Linear) and module.out_features == 24


def by_callable_with_overrides():
    model = seeded(Layers(num_layers=1))
    fully_shard(model, wrap=override)
    assert units_of(model) == ["", "layers.0", "layers.0.in_proj"]
    loss = model(layer_data(0)).sum()
    assert is_sharded(model.layers[0].in_proj)
    assert not is_sharded(model.layers[0].out_proj), "its own reshard_after_forward=False"
    loss.backward()


def test_a_callable_may_answer_with_keywords_for_the_unit():
    run_ranks(by_callable_with_overrides, 2, kind="gloo")


def keywords_reach_every_unit():
    model = seeded(Layers(num_layers=1))
    fully_shard(model, wrap=TwoLayers, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    seen = []
    for module in (model.first, model.layers[0].in_proj):
        module.register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
    model(layer_data(0))
    assert seen == [torch.bfloat16, torch.bfloat16]


def test_the_keywords_of_the_call_reach_every_unit():
    run_ranks(keywords_reach_every_unit, 2)


def chooses_nothing(wrap):
    model = seeded(Layers())
    with pytest.raises(ConfigError):
        fully_shard(model, wrap=wrap)
    assert units_of(model) == []
    assert type(model) is Layers


def test_a_wrap_that_chooses_nothing_or_means_nothing_is_refused():
    run_cases(chooses_nothing, 2, cases_of(wrap=[nn.Conv2d, 10**9, "layers", 1.5, ()]))


def boom(module):
    raise KeyError("from the callable")


def test_an_error_of_the_callable_leaves_the_model_plain():
    run_ranks(callable_raises, 2)


def callable_raises():
    model = seeded(Layers())
    with pytest.raises(KeyError, match="from the callable"):
        fully_shard(model, wrap=boom)
    assert units_of(model) == []


def already_sharded_below():
    """Units made by hand stay as they are; the rest of the model is wrapped around them."""
    model = seeded(Layers())
    fully_shard(model.layers[1], reshard_after_forward=False)
    fully_shard(model, wrap=TwoLayers)
    assert units_of(model) == ["", "layers.0", "layers.1", "layers.2"]
    model(layer_data(0)).sum().backward()


def test_units_made_by_hand_before_are_left_as_they_are():
    run_ranks(already_sharded_below, 2)


LAYER_BYTES = 318 * 4


def trained_in_groups(
    group_bytes, build=Layers, wrap=TwoLayers, recompute=False, inputs_of=layer_data, **options
):
    """Returns the units of three layers, what happened in three steps, and the losses and shards they ended with."""
    model = seeded(build())
    if recompute:
        for layer in model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    fully_shard(model, wrap=wrap, group_bytes=group_bytes, **options)
    losses, events, shards = train(model, inputs_of)
    units = sorted({name for event, name, _ in events if event == trace.UNSHARD})
    assert all(is_sharded(layer.in_proj) for layer in model.layers)
    return units, events, [*losses, *(shard.clone() for shard in shards)]


def groups_train_alike(group_bytes, units, **options):
    apart, joined = (trained_in_groups(size, **options) for size in (0, group_bytes))
    assert joined[0] == units
    assert len(apart[0]) > len(units)
    for one, other in zip(joined[2], apart[2], strict=True):
        same(one, other, "loss or shard")
    for event in (trace.UNSHARD, trace.REDUCE):
        counts = [sum(happened[0] == event for happened in events) for _, events, _ in (joined, apart)]
        assert counts[0] < counts[1], "fewer collectives"


def test_small_neighbors_share_a_unit_and_train_to_the_same_bits():
    run_cases(
        groups_train_alike,
        2,
        [
            {"group_bytes": 2 * LAYER_BYTES, "units": ["", "layers.0", "layers.2"]},
            {"group_bytes": 3 * LAYER_BYTES - 1, "units": ["", "layers.0", "layers.2"], "recompute": True},
            {"group_bytes": 2**30, "units": ["", "layers.0"], "reshard_after_forward": False},
            {"group_bytes": 2**30, "units": ["", "layers.0"], "offload_policy": CPUOffloadPolicy()},
            {"group_bytes": 2**30, "units": ["", "layers.0"], "build": SkipsALayer},
            {"group_bytes": 2**30, "units": ["", "layers.0"], "build": RunsALayerTwice},
        ],
        kind="gloo",
    )


class SkipsALayer(Layers):
    def forward(self, x):
        return self.last(self.layers[2](self.layers[0](self.first(x))))


def last_one_is_kept(module):
    return isinstance(module, TwoLayers) and {"reshard_after_forward": module.is_last}


def groups_respect_keywords_and_parents():
    model = seeded(Layers(num_layers=4))
    for index, layer in enumerate(model.layers):
        layer.is_last = index == 3
    fully_shard(model, wrap=last_one_is_kept, group_bytes=2**30)
    (first,) = {id(unit) for layer in model.layers[:3] for unit in units_of_module(layer)}
    assert {id(unit) for unit in units_of_module(model.layers[3])} != {first}, "its keywords differ"
    model(layer_data(0)).sum().backward()
    model = seeded(Layers(num_layers=2))
    fully_shard(model, wrap=(nn.Linear, TwoLayers), group_bytes=2**30)
    inner = [units_of_module(linear) for layer in model.layers for linear in (layer.in_proj, layer.out_proj)]
    assert inner[0] == inner[1] != inner[2] == inner[3], "of one parent"
    model(layer_data(0)).sum().backward()


def test_modules_with_other_keywords_or_another_parent_stay_apart():
    run_ranks(groups_respect_keywords_and_parents, 2)


def wrong_groups(message, **options):
    model = seeded(Layers())
    with pytest.raises(ConfigError, match=message):
        fully_shard(model, **options)
    assert units_of(model) == []


def test_groups_without_a_size_or_without_modules_to_join_are_refused():
    run_cases(
        wrong_groups,
        2,
        [
            {"message": "group_bytes=-1 is not a size", "wrap": TwoLayers, "group_bytes": -1},
            {"message": "group_bytes=1.5 is not a size", "wrap": TwoLayers, "group_bytes": 1.5},
            {"message": "below a module, and there are none", "group_bytes": 2**20},
        ],
    )


def by_hand(build=Layers, group_bytes=2**30, prepare=None, **options):
    """A model whose layers were sharded one by one, and joined when the model was."""
    model = seeded(build())
    for layer in model.layers:
        fully_shard(layer, **options)
    if prepare is not None:
        prepare(model)
    return fully_shard(model, group_bytes=group_bytes, **options)


def made_by_hand_train_alike(group_bytes=2**30, units=("", "layers.0"), build=Layers, **options):
    joined = by_hand(build, group_bytes, **options)
    losses, events, shards = train(joined, layer_data)
    assert sorted({name for event, name, _ in events if event == trace.UNSHARD}) == list(units)
    chosen = trained_in_groups(group_bytes, build, **options)
    assert events == chosen[1]
    for one, other in zip([*losses, *shards], chosen[2], strict=True):
        same(one, other, "loss or shard")


def test_units_made_by_hand_are_joined_and_train_to_the_same_bits():
    run_cases(
        made_by_hand_train_alike,
        2,
        [
            {},
            {"group_bytes": 2 * LAYER_BYTES, "units": ["", "layers.0", "layers.2"]},
            {"group_bytes": 2 * LAYER_BYTES - 1, "units": ["", "layers.0", "layers.1", "layers.2"]},
            {"reshard_after_forward": False},
            {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
            {"offload_policy": CPUOffloadPolicy()},
            {"exact": True},
            {"build": RunsALayerTwice},
        ],
    )


def joined_by_hand_keep_what_is_theirs():
    """Names, values and identity of parameters; optimizers, registered methods and refusals from before."""
    model, plain = seeded(Layers()), seeded(Layers())
    originals = list(model.layers.parameters())
    for layer in model.layers:
        layer.twice = lambda x, layer=layer: layer.out_proj(layer.in_proj(x)) * 2
        fully_shard(layer)
        register_fsdp_forward_method(layer, "twice")
    before = {name: (param, full(param.detach().clone())) for name, param in model.layers.named_parameters()}
    optim = sgd(model.layers.parameters())
    fully_shard(model, group_bytes=2**30)
    assert len({id(unit) for layer in model.layers for unit in units_of_module(layer)}) == 1
    after = dict(model.layers.named_parameters())
    assert list(after) == list(before)
    for name, (param, value) in before.items():
        assert after[name] is param
        same(full(param.detach()), value, name)
    x = layer_data(0)
    same(model.layers[1].twice(x), plain.layers[1].out_proj(plain.layers[1].in_proj(x)) * 2, "other method")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model(x).square().mean().backward()
    optim.step()
    assert not torch.equal(
        model.layers[2].in_proj.weight.to_local(), state["layers.2.in_proj.weight"].to_local()
    )
    model.load_state_dict(state)
    for name, value in model.state_dict().items():
        same(value.to_local(), state[name].to_local(), name)
    model.zero_grad()
    model(x).square().mean().backward()
    with pytest.raises(StateError, match="as it was before it was sharded"):
        torch.optim.SGD(originals[-1:], lr=0.1).step()


def test_joined_units_keep_names_identity_and_what_was_registered():
    run_ranks(joined_by_hand_keep_what_is_theirs, 2)


def differ_in_a_setting(model):
    model.layers[1].set_reshard_after_forward(False)


def have_run(model):
    for layer in model.layers:
        layer(layer_data(0))


def are_prefetched(model):
    model.layers[0].set_modules_to_forward_prefetch([model.layers[1]])


def average_otherwise(model):
    model.layers[1].set_gradient_divide_factor(3.0)


class TiedLayers(Layers):
    def __init__(self):
        super().__init__()
        self.layers[1].in_proj.weight = self.layers[0].in_proj.weight


def stay_apart(groups, **options):
    model = by_hand(**options)
    units = [units_of_module(layer)[0] for layer in model.layers]
    assert [units.index(unit) for unit in units] == groups
    model(layer_data(0)).square().mean().backward()


def test_units_that_were_made_differently_or_are_known_elsewhere_are_not_joined():
    run_cases(
        stay_apart,
        2,
        [
            {"groups": [0, 0, 0]},
            {"groups": [0, 1, 2], "prepare": differ_in_a_setting},
            {"groups": [0, 1, 2], "prepare": have_run},
            {"groups": [0, 1, 2], "prepare": are_prefetched},
            {"groups": [0, 1, 2], "prepare": average_otherwise},
            {"groups": [0, 1, 2], "build": TiedLayers},
        ],
    )
