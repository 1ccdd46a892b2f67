"""What happens to a unit's full parameters after its forward."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from tests.ranks.models import Layers, Traffic, data, held_bytes, is_sharded, same, seen_weights
from tests.ranks.subject import beyond_torch, fully_shard

# What one layer's parameters take in full: two weights and two biases of TwoLayers(6), in float32.
LAYER_BYTES = (6 * 24 + 24 + 24 * 6 + 6) * 4


def sharded_layers(reshard, root_reshard=None):
    model = seeded(Layers())
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard)
    return fully_shard(model, reshard_after_forward=root_reshard)


def check_state_after_forward(reshard, sharded):
    """After forward the layers are `sharded` or not, by what they show and by the memory they hold."""
    model = sharded_layers(reshard)
    layer = model.layers[1]
    for step in range(2):
        with seen_weights(layer.in_proj, layer.out_proj) as weights:
            loss = model(data(step, dist.get_rank(), 2, 6)).sum()
        assert len(weights) == 4
        assert is_sharded(layer.in_proj) == sharded
        assert is_sharded(layer.out_proj) == sharded
        if sharded:
            assert held_bytes(weights) == 0
        else:
            assert held_bytes(weights) >= LAYER_BYTES
            if step == 0:
                for shown, original in zip(
                    layer.parameters(), seeded(Layers()).layers[1].parameters(), strict=True
                ):
                    same(shown.detach(), original.detach(), "kept parameter")
        assert not is_sharded(model.first), "the root keeps its parameters for backward"
        loss.backward()
        for module in (layer.in_proj, layer.out_proj, model.first, model.last):
            assert is_sharded(module)
        assert held_bytes(weights) == 0


def test_true_frees_the_parameters_after_forward():
    run_ranks(check_state_after_forward, 2, True, True, kind="gloo")


def test_none_means_true():
    run_ranks(check_state_after_forward, 2, None, True, kind="gloo")


def test_false_keeps_the_parameters_to_the_end_of_backward():
    run_ranks(check_state_after_forward, 2, False, False, kind="gloo")


def test_an_int_frees_the_full_parameters_after_forward():
    run_ranks(check_state_after_forward, 4, 2, True, kind="gloo")


def test_the_world_size_as_an_int_means_true():
    run_ranks(check_state_after_forward, 2, 2, True, kind="gloo")


def one_means_false():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_state_after_forward(1, False)
    return [
        (str(warning.message), warning.filename)
        for warning in caught
        if issubclass(warning.category, UserWarning)
    ]


@beyond_torch  # torch writes to a log
def test_one_means_false_and_warns_at_the_callers_line():
    for told in run_ranks(one_means_false, 2, kind="gloo"):
        assert any("reshard_after_forward" in message for message, _ in told), told
        assert not any("fully_shard.py" in filename for _, filename in told), told


@beyond_torch
@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_the_state_after_forward_is_the_same_with_ranks_as_threads(kind):
    run_ranks(check_state_after_forward, 2, True, True, kind=kind)
    run_ranks(check_state_after_forward, 2, False, False, kind=kind)


def groups_of_gathers(reshard):
    model = sharded_layers(reshard)
    with Traffic() as forward:
        loss = model(data(0, dist.get_rank(), 2, 6)).sum()
    with Traffic() as backward:
        loss.backward()
    return forward.of("_allgather_base_"), backward.of("_allgather_base_")


def test_with_an_int_the_backward_gathers_run_over_groups_of_that_size():
    for forward, backward in run_ranks(groups_of_gathers, 4, 2, kind="gloo"):
        assert forward == [4, 4, 4, 4]
        assert backward == [2, 2, 2]


def test_with_true_the_backward_gathers_run_over_all_ranks():
    for forward, backward in run_ranks(groups_of_gathers, 4, True, kind="gloo"):
        assert forward == [4, 4, 4, 4]
        assert backward == [4, 4, 4]


def root_keeps_whatever_is_passed(root_reshard):
    model = sharded_layers(True, root_reshard)
    loss = model(data(0, dist.get_rank(), 2, 6)).sum()
    assert not is_sharded(model.first)
    with Traffic() as backward:
        loss.backward()
    assert len(backward.of("_allgather_base_")) == 3
    assert is_sharded(model.first)


@beyond_torch  # where True is passed to the root, torch now frees it
@pytest.mark.parametrize("root_reshard", [True, False, None, 2])
def test_the_root_keeps_its_parameters_whatever_is_passed(root_reshard):
    run_ranks(root_keeps_whatever_is_passed, 2, root_reshard, kind="gloo")


def root_overridden():
    model = sharded_layers(True)
    model.set_reshard_after_forward(True, recurse=False)
    for step in range(2):
        with seen_weights(model.first) as weights:
            loss = model(data(step, dist.get_rank(), 2, 6)).sum()
        assert is_sharded(model.first)
        assert held_bytes(weights) == 0
        with Traffic() as backward:
            loss.backward()
        assert len(backward.of("_allgather_base_")) == 4


def test_set_reshard_after_forward_on_the_root_alone_frees_the_root_too():
    run_ranks(root_overridden, 2, kind="gloo")


def set_for_all():
    model = sharded_layers(True)
    model.set_reshard_after_forward(False)
    loss = model(data(0, 0, 2, 6)).sum()
    assert not is_sharded(model.layers[0].in_proj)
    loss.backward()
    model.set_reshard_after_forward(True)
    loss = model(data(0, 0, 2, 6)).sum()
    assert is_sharded(model.layers[0].in_proj)
    loss.backward()
    model.set_reshard_after_forward(False, recurse=False)
    loss = model(data(0, 0, 2, 6)).sum()
    assert is_sharded(model.layers[0].in_proj)
    assert not is_sharded(model.first)
    loss.backward()


def test_set_reshard_after_forward_reaches_the_units_below_unless_told_not_to():
    run_ranks(set_for_all, 2, kind="gloo")


def scale(params):
    with torch.no_grad():
        for param in params:
            param.mul_(1.5)


def kept_parameters_follow_the_shards(reshard_by_hand):
    """A forward without a backward leaves full parameters behind; then the shards change."""
    model, plain = sharded_layers(False), seeded(Layers())
    shards = list(model.parameters())
    inputs = data(0, 0, 2, 6)
    with torch.no_grad():
        same(model(inputs), plain(inputs), "output")
        if reshard_by_hand:
            for unit in (*model.layers, model):
                unit.reshard()
        scale(shards)
        scale(plain.parameters())
        same(model(inputs), plain(inputs), "output after the shards changed")


def test_a_kept_unit_that_is_resharded_by_hand_sees_what_became_of_its_shards():
    run_ranks(kept_parameters_follow_the_shards, 2, True, kind="gloo")


@beyond_torch
def test_a_kept_unit_sees_what_became_of_its_shards():
    run_ranks(kept_parameters_follow_the_shards, 2, False, kind="gloo")


def memory_by_value(reshard):
    model = sharded_layers(reshard)
    held = []
    modules = [module for layer in model.layers for module in (layer.in_proj, layer.out_proj)]
    with seen_weights(*modules) as weights:
        model.last.register_forward_pre_hook(lambda module, args: held.append(held_bytes(weights)))
        model(data(0, 0, 2, 6))
    return held[0]


def test_while_the_last_layer_runs_the_earlier_ones_are_free_with_true_and_held_with_false():
    for freed in run_ranks(memory_by_value, 2, True, kind="gloo"):
        assert freed == 0
    for held in run_ranks(memory_by_value, 2, False, kind="gloo"):
        assert held >= 3 * LAYER_BYTES
