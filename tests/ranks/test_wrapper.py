"""A wrapped model trains as the plain one does, whatever is wrapped, sharded, frozen, moved or ignored."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import shardwise
from shardwise import (
    BackwardPrefetch,
    CPUOffload,
    CustomPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
)
from shardwise.engine.unit.membership import ShardedPlaceholder, units_of
from shardwise.errors import StateError
from shardwise.testing import run_ranks
from shardwise.testing.parity import Accumulation, History, differences, run_plain
from shardwise.testing.workloads import TIED_ACROSS_UNITS, WORKLOADS, seeded
from shardwise.trace import record
from tests.ranks.models import (
    GATHER,
    REDUCE,
    Layers,
    TwoLayers,
    counted,
    data,
    held_bytes,
    same,
    seen_weights,
)
from tests.ranks.wrapped import ONE_AXIS, device, train, whole_gradients, wrap, wrapped

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD = ONE_AXIS
HYBRID, HYBRID_ZERO2 = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2
NAMED = {**WORKLOADS, TIED_ACROSS_UNITS.name: TIED_ACROSS_UNITS}
STEPS = 2
LAST_OF_TWO = Accumulation(2, sync_each=False)


# --- parity ---------------------------------------------------------------------------------------------------------


@functools.cache
def oracle(name, accumulation, world_size):
    return run_plain(NAMED[name], world_size, accumulation=accumulation, steps=STEPS, device=device())


def parity(cases, tolerance):
    """The first difference from the oracle in each case that has one."""
    rank, wrong = dist.get_rank(), []
    for name, accumulation, options in cases:
        workload = NAMED[name]
        model = workload.model()
        history = train(wrap(model, workload.units(model), **options), workload, STEPS, accumulation)
        plain = oracle(name, accumulation, dist.get_world_size())
        expected = History([[losses[rank]] for losses in plain.losses], plain.grads, plain.params)
        found = differences(expected, history, tolerance=tolerance)
        wrong += [f"{workload.name} {accumulation.label} {options}: {found[0]}"] if found else []
    return wrong


@pytest.mark.arithmetic
def test_two_ranks_match_the_oracle_bit_for_bit():
    runs = [*((name, Accumulation()) for name in NAMED), ("tied transformer", LAST_OF_TWO)]
    cases = [
        (name, accumulation, {"sharding_strategy": strategy, "use_orig_params": orig})
        for number, (name, accumulation) in enumerate(runs)
        for strategy, orig in [
            (FULL_SHARD, False),
            (FULL_SHARD, True),
            (SHARD_GRAD_OP, number % 2 == 0),
            (NO_SHARD, number % 2 == 1),
        ]
    ]
    assert run_ranks(parity, 2, cases, 0.0, kind="gloo") == [[]] * 2


@pytest.mark.slow
@pytest.mark.arithmetic
def test_more_ranks_match_the_oracle():
    cases = [
        (name, accumulation, {"sharding_strategy": strategy, "use_orig_params": orig})
        for name, strategy, orig, accumulation in [
            ("odd MLP", FULL_SHARD, False, Accumulation()),
            ("adapters", FULL_SHARD, True, LAST_OF_TWO),
            ("branches", SHARD_GRAD_OP, False, Accumulation()),
            ("tied transformer", SHARD_GRAD_OP, True, Accumulation()),
        ]
    ]
    assert run_ranks(parity, 3, cases, 0.0, kind="threads") == [[]] * 3
    cases += [
        ("conv net", Accumulation(), {"sharding_strategy": NO_SHARD}),
        ("odd MLP", LAST_OF_TWO, {"sharding_strategy": NO_SHARD, "use_orig_params": True}),
    ]
    # NO_SHARD is summed by gloo, in an order of its own.
    assert run_ranks(parity, 4, cases, 1e-6, kind="gloo") == [[]] * 4


def hybrid():
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = (mesh.get_group("shard"), mesh.get_group("replicate"))
    wrong = []
    for strategy, (key, value), orig in itertools.product(
        (HYBRID, HYBRID_ZERO2), (("device_mesh", mesh), ("process_group", groups)), (False, True)
    ):
        options = {"sharding_strategy": strategy, key: value, "use_orig_params": orig}
        wrong += parity([("adapters", LAST_OF_TWO, options)], 1e-6 if device().type == "cpu" else 1e-5)
    model = FullyShardedDataParallel(nn.Linear(8, 8, bias=False), None, HYBRID, device_mesh=mesh)
    assert sum(param.numel() for param in model.parameters()) == 32
    if device().type == "cpu":
        for strategy, gathers in ((HYBRID, 3), (HYBRID_ZERO2, 0)):
            model = seeded(Layers())
            model = wrap(model, model.layers, sharding_strategy=strategy, device_mesh=mesh)
            loss = model(data(0, 0, 2, 6)).sum()
            with CommDebugMode() as backward:
                loss.backward()
            assert counted(backward).get(GATHER, 0) == gathers, strategy
    one_axis = {"device_mesh": init_device_mesh(device().type, (4,)), "limit_all_gathers": False}
    model = FullyShardedDataParallel(nn.Linear(8, 8, bias=False), **one_axis)
    assert sum(param.numel() for param in model.parameters()) == 16
    return wrong


@pytest.mark.arithmetic
def test_hybrid_strategies_match_the_oracle():
    # Not bitwise: pairs of ranks are added first.
    assert run_ranks(hybrid, 4, kind="gloo") == [[]] * 4


# --- what is kept, gathered and freed -------------------------------------------------------------------------------


def traffic(strategy, orig):
    model = wrapped("tied transformer", sharding_strategy=strategy, use_orig_params=orig)
    workload = WORKLOADS["tied transformer"]
    with seen_weights(model.layers[0].up) as weights:
        for step in range(2):
            batch = workload.data(step, 0, dist.get_rank())
            with CommDebugMode() as forward:
                loss = workload.loss(model(*batch), batch)
            held = held_bytes(weights)
            with CommDebugMode() as backward:
                loss.backward()
    assert held_bytes(weights) == 0 or strategy is NO_SHARD
    if strategy is NO_SHARD and orig:
        # Whole where it is: no second copy.
        assert weights[0].data_ptr() == model.layers[0].up.weight.data_ptr()
    return counted(forward), counted(backward), held > 0


@pytest.mark.parametrize("orig", [False, True])
def test_each_strategy_gathers_reduces_and_frees_as_it_says(orig):
    four = 4
    for strategy, expected in {
        FULL_SHARD: ({GATHER: four}, {GATHER: four - 1, REDUCE: four}, False),
        SHARD_GRAD_OP: ({GATHER: four}, {REDUCE: four}, True),
        NO_SHARD: ({}, {"c10d.allreduce_": four}, True),
    }.items():
        assert run_ranks(traffic, 2, strategy, orig, kind="gloo") == [expected] * 2


def prefetches(option):
    model = seeded(Layers())
    units = [*model.layers]
    model = wrap(model, units, **option)
    for step in range(3):
        with record(model) as recorder:
            model(data(step, 0, 2, 6)).sum().backward()
    return [
        (kind, unit)
        for kind, unit, _ in recorder.of("unshard", "reshard", "pre_forward", "pre_backward", "post_backward")
    ]


def test_backward_and_forward_prefetch_when_told_to():
    def order(option):
        return run_ranks(prefetches, 2, option)[0]

    pre = order({"backward_prefetch": BackwardPrefetch.BACKWARD_PRE})
    post = order({"backward_prefetch": BackwardPrefetch.BACKWARD_POST})
    none = order({"backward_prefetch": None})
    gather, begins, ends = (
        ("unshard", "layers.1"),
        ("pre_backward", "layers.2"),
        ("post_backward", "layers.2"),
    )
    backward = pre.index(begins)
    assert backward < pre.index(gather, backward) < pre.index(ends)
    # After the last gradients of a unit, when it has been freed; or only when the next is needed.
    freed = ("reshard", "layers.2")
    ended = post.index(ends)
    assert post.index(begins) < post.index(freed, post.index(begins)) < ended < post.index(gather, ended)
    ended = none.index(ends)
    assert ended < none.index(gather, ended) == none.index(("pre_backward", "layers.1")) - 1
    ahead = order({"forward_prefetch": True})
    assert ahead.index(gather) < ahead.index(("pre_forward", "layers.0"))
    assert pre.index(gather) > pre.index(("pre_forward", "layers.0"))


# --- names and attributes -------------------------------------------------------------------------------------------


def names():
    plain = dict(seeded(Layers()).named_parameters())
    for orig in (False, True):
        model = seeded(Layers())
        model.note = "kept"
        model = wrap(model, model.layers, use_orig_params=orig)
        assert model.note == "kept"
        assert model.first.in_features == 6
        assert isinstance(model.module, Layers)
        found = dict(model.named_parameters())
        if orig:
            assert list(found) == list(plain)
            assert all(param.dim() == 1 for param in found.values())
        else:
            inside = "_fsdp_wrapped_module"
            inner = [f"{inside}.layers.{i}.{inside}._flat_param" for i in range(3)]
            assert list(found) == [f"{inside}._flat_param", *inner]
            assert [id(param) for param in model.module.parameters()] == [id(p) for p in model.parameters()]
        held = sum(param.numel() for param in found.values())
        total = sum(param.numel() for param in plain.values())
        world = dist.get_world_size()
        assert held <= total / world + 4 * 16 * (2 + 4 * world)
        # Between a forward and its backward the root's parameters are whole, and still shards are shown.
        loss = model(data(0, 0, 2, 6)).sum()
        assert [id(param) for param in model.parameters()] == [id(param) for param in found.values()]
        loss.backward()
        with FullyShardedDataParallel.summon_full_params(model):
            whole = dict(model.named_parameters())
            assert list(whole) == list(plain)
            for name, param in plain.items():
                same(whole[name].detach(), param.detach(), name)
    sequence = FullyShardedDataParallel(
        nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2)), nn.Linear(2, 2, bias=False))
    )
    assert isinstance(sequence[1], nn.Linear)
    assert [sequence.check_is_root(), sequence[0].check_is_root()] == [True, False]
    around = nn.ModuleList([sequence])
    assert FullyShardedDataParallel.fsdp_modules(around) == [sequence, sequence[0]]
    assert FullyShardedDataParallel.fsdp_modules(around, root_only=True) == [sequence]
    # A flat parameter stands for those that are there.
    assert "Linear(in_features=2, out_features=2, bias=True)" in str(sequence)
    assert "Linear(in_features=2, out_features=2, bias=False)" in str(sequence)
    inner = sequence[0].module
    assert list(dict(inner.named_parameters())) == ["_flat_param"]
    # Whoever asks from outside learns what is there, and is told off for using it.
    assert (inner.bias.shape, inner.bias.dtype, inner.bias.device.type) == ((2,), torch.float32, "cpu")
    assert str(inner.bias) == "<parameter 'bias', [2] torch.float32, sharded>"
    for use in (
        lambda: inner(torch.ones(2)),
        lambda: inner.weight.sum().item(),
        lambda: torch.cat([torch.ones(2, 2), inner.weight]),
        lambda: torch.nn.functional.linear(input=torch.ones(2), weight=inner.weight),
    ):
        with pytest.raises(StateError, match=r"'weight' was used while its unit is sharded") as caught:
            use()
        assert "register_fsdp_forward_method" in str(caught.value)
    sequence(torch.ones(2)).sum().backward()
    assert isinstance(inner.bias, ShardedPlaceholder)
    with FullyShardedDataParallel.summon_full_params(sequence):
        assert isinstance(inner.bias, nn.Parameter)
    assert isinstance(inner.bias, ShardedPlaceholder)
    # As in torch's, an optimizer made before wrapping goes on working with the original names.
    layer = nn.Linear(4, 4)
    before = list(layer.parameters())
    assert [id(param) for param in FullyShardedDataParallel(layer, use_orig_params=True).parameters()] == [
        id(param) for param in before
    ]
    unsharded = FullyShardedDataParallel(nn.Linear(4, 3), sharding_strategy=NO_SHARD, use_orig_params=True)
    assert [tuple(param.shape) for param in unsharded.parameters()] == [(3, 4), (3,)]


def test_names_are_clean_but_for_flat_parameters_and_attributes_fall_through():
    run_ranks(names, 2)


def options_read():
    """What a wrapper says of itself, in each strategy's own group."""
    layer = nn.Linear(4, 4)
    layer.rank = 7
    model = FullyShardedDataParallel(layer)
    assert (model.sharding_strategy, model.cpu_offload) == (FULL_SHARD, CPUOffload())
    assert (model.mixed_precision, model.backward_prefetch) == (
        MixedPrecision(),
        BackwardPrefetch.BACKWARD_PRE,
    )
    assert (model.compute_device.type, model.forward_prefetch) == ("cpu", False)
    assert (model.rank, model.module.rank, model.world_size) == (dist.get_rank(), 7, 4)
    assert model.process_group is dist.group.WORLD
    with pytest.raises(AttributeError):
        model.sharding_strategy = NO_SHARD
    options = {
        "cpu_offload": CPUOffload(offload_params=True),
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16),
        "backward_prefetch": None,
        "forward_prefetch": True,
    }
    for strategy, world_size in ((NO_SHARD, 4), (HYBRID, 2)):
        mesh = init_device_mesh("cpu", (2, 2) if strategy is HYBRID else (4,))
        model = FullyShardedDataParallel(
            nn.Linear(4, 4), sharding_strategy=strategy, device_mesh=mesh, **options
        )
        assert {name: getattr(model, name) for name in options} == options
        assert (model.sharding_strategy, model.world_size) == (strategy, world_size)
        assert model.process_group.rank() == model.rank == dist.get_rank() % world_size


def test_options_can_be_read():
    run_ranks(options_read, 4)


# --- frozen parameters ----------------------------------------------------------------------------------------------


def frozen(orig):
    workload = WORKLOADS["adapters"]
    model = wrapped("adapters", use_orig_params=orig)
    before = model.state_dict()
    optim = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(2):
        batch = workload.data(step, 0, dist.get_rank())
        workload.loss(model(*batch), batch).backward()
        optim.step()
    trained = {name for name, param in workload.model().named_parameters() if param.requires_grad}
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) != (name in trained), name
    row_numels = [
        sum(plan.row_numel for plan in unit.gradients._plans.values() if plan is not None)
        for unit in model._units
    ]
    gradient_numel = sum(param.grad.numel() for param in model.parameters() if param.grad is not None)
    trained_numel = sum(p.numel() for p in workload.model().parameters() if p.requires_grad)
    slack = 16 * (2 * dist.get_world_size() + 8) * len(row_numels)
    assert gradient_numel <= trained_numel / dist.get_world_size() + slack
    assert sum(row_numels) <= trained_numel / dist.get_world_size() + slack
    # Frozen after it was wrapped, a parameter costs no gradient memory either.
    if orig:
        optim.zero_grad()
        for layer in model.layers:
            layer.up.weight.requires_grad_(False)
        batch = workload.data(2, 0, dist.get_rank())
        values = model.state_dict()
        workload.loss(model(*batch), batch).backward()
        assert all(layer.up.weight.grad is None for layer in model.layers)
        for layer in model.layers:
            assert (layer.down.weight.grad is None) == (layer.down.weight.numel() == 0)
        optim.step()
        after = model.state_dict()
        assert all(torch.equal(after[name], values[name]) for name in values if "up" in name)
        assert not any(torch.equal(after[name], values[name]) for name in values if "down" in name)


@pytest.mark.parametrize("orig", [False, True])
def test_frozen_parameters_cost_no_gradient_memory_and_do_not_move(orig):
    run_ranks(frozen, 2, orig)


# --- policies -------------------------------------------------------------------------------------------------------


def wrapped_by(policy, build=Layers):
    model = FullyShardedDataParallel(seeded(build()), auto_wrap_policy=policy)
    model(data(0, 0, 2, 6)).sum().backward()
    return sorted(unit.name for module in model.modules() for unit in units_of(module))


def policies():
    from torch.distributed.fsdp import wrap as torchs

    layers = ["", "layers.0", "layers.1", "layers.2"]
    for ours in (shardwise, torchs):
        assert wrapped_by(ours.ModuleWrapPolicy({TwoLayers})) == layers
        assert wrapped_by(ours.CustomPolicy(lambda module: isinstance(module, TwoLayers))) == layers
    for module in (shardwise, torchs):
        assert (
            wrapped_by(
                functools.partial(module.transformer_auto_wrap_policy, transformer_layer_cls={TwoLayers})
            )
            == layers
        )
        assert (
            wrapped_by(
                functools.partial(
                    module.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, TwoLayers)
                )
            )
            == layers
        )
        # A layer has 318 elements, its two halves 168 and 150.
        assert wrapped_by(functools.partial(module.size_based_auto_wrap_policy, min_num_params=200)) == layers
        assert wrapped_by(functools.partial(module.size_based_auto_wrap_policy, min_num_params=160)) == [
            "",
            *(f"layers.{i}.in_proj" for i in range(3)),
        ]
    assert (
        wrapped_by(lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, TwoLayers))
        == layers
    )
    kept = CustomPolicy(
        lambda module: {"sharding_strategy": SHARD_GRAD_OP} if isinstance(module, TwoLayers) else False
    )
    model = FullyShardedDataParallel(seeded(Layers()), auto_wrap_policy=kept)
    (unit,) = units_of(model.layers[1])
    assert not unit.settings.after_forward.frees
    assert units_of(model)[0].settings.after_forward.frees
    with shardwise.enable_wrap(wrapper_cls=FullyShardedDataParallel, sharding_strategy=SHARD_GRAD_OP):
        one = shardwise.wrap(nn.Linear(2, 2))
        other = shardwise.wrap(nn.Linear(2, 2), sharding_strategy=FULL_SHARD)
    assert [units_of(each)[0].settings.after_forward.frees for each in (one, other)] == [False, True]
    assert type(shardwise.wrap(nn.Linear(2, 2))) is nn.Linear


def test_policies_choose_what_torchs_choose_and_torchs_own_work():
    run_ranks(policies, 2)


# --- where tensors come from ----------------------------------------------------------------------------------------


class WithBuffer(nn.Module):
    def __init__(self, fill):
        super().__init__()
        self.lin = nn.Linear(3, 5)
        self.register_buffer("offset", torch.full((5,), float(fill)))
        nn.init.constant_(self.lin.weight, fill)
        nn.init.constant_(self.lin.bias, fill)

    def reset_parameters(self):
        self.offset.fill_(3.0)

    def forward(self, x):
        return self.lin(x) + self.offset


def first_values():
    rank = dist.get_rank()
    for orig in (False, True):
        model = FullyShardedDataParallel(WithBuffer(rank + 1), sync_module_states=True, use_orig_params=orig)
        assert all(value.eq(1.0).all() for value in model.state_dict().values())
    with torch.device("meta"):
        model, other = WithBuffer(0), WithBuffer(0)
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), sync_module_states=True
    )
    state = model.state_dict()
    assert state["offset"].eq(3.0).all()
    assert state["lin.weight"].abs().max() < 1

    def init(module):
        module.to_empty(device="cpu", recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.constant_(tensor, 7.0)

    state = FullyShardedDataParallel(other, param_init_fn=init).state_dict()
    assert all(value.eq(7.0).all() for value in state.values())
    model = FullyShardedDataParallel(WithBuffer(2), device_id=torch.device("cpu"))
    assert model.to(torch.float64).state_dict()["lin.weight"].dtype == torch.float64
    assert model(torch.ones(1, 3, dtype=torch.float64)).dtype == torch.float64


def test_first_values_come_from_the_first_rank_or_from_an_init_function():
    run_ranks(first_values, 2, kind="gloo")


def ignored():
    for kind in ("ignored_modules", "ignored_states", "parameters"):
        model, plain = seeded(Layers()), seeded(Layers())
        states = [*model.layers[1].parameters()] if kind == "parameters" else [model.layers[1]]
        option = {"ignored_states" if kind == "parameters" else kind: states}
        left_alone = list(model.layers[1].parameters())
        model = FullyShardedDataParallel(model, use_orig_params=True, **option)
        assert all(a is b for a, b in zip(model.layers[1].parameters(), left_alone, strict=True))
        x = data(0, 0, 2, 6)
        model(x).sum().backward()
        plain(x).sum().backward()
        assert torch.equal(model.layers[1].in_proj.weight.grad, plain.layers[1].in_proj.weight.grad)
        state = model.state_dict()
        assert list(state) == list(plain.state_dict())


def test_ignored_modules_and_parameters_are_left_alone():
    run_ranks(ignored, 2)


def torchs_own_choices():
    from torch.distributed import fsdp

    model = FullyShardedDataParallel(
        nn.Linear(4, 4),
        sharding_strategy=fsdp.ShardingStrategy.SHARD_GRAD_OP,
        backward_prefetch=fsdp.BackwardPrefetch.BACKWARD_POST,
        cpu_offload=fsdp.CPUOffload(offload_params=True),
        mixed_precision=fsdp.MixedPrecision(param_dtype=torch.bfloat16),
    )
    assert model(torch.ones(1, 4)).dtype == torch.bfloat16
    with FullyShardedDataParallel.state_dict_type(model, fsdp.StateDictType.SHARDED_STATE_DICT):
        assert model.state_dict()["weight"].dtype == torch.float32
    first_only = fsdp.FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    with FullyShardedDataParallel.state_dict_type(model, fsdp.StateDictType.FULL_STATE_DICT, first_only):
        assert bool(model.state_dict()) == (dist.get_rank() == 0)


def test_torchs_enums_and_records_are_understood():
    run_ranks(torchs_own_choices, 2)


def a_group_of_some():
    """Two models, each over half of the ranks."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[dist.get_rank() // 2]
    model = FullyShardedDataParallel(
        nn.Linear(8, 4, bias=False), process_group=mine, cpu_offload=CPUOffload(True)
    )
    (model(torch.ones(1, 8)) * 2.0 ** dist.get_rank()).sum().backward()
    gradients = torch.cat([param.grad for param in model.parameters()])
    return gradients[gradients != 0].unique().tolist()


def test_a_process_group_shards_over_its_own_ranks():
    assert run_ranks(a_group_of_some, 4, kind="gloo") == [[1.5], [1.5], [6.0], [6.0]]


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x):
        for layer in (self.first, *self.layers):
            x = layer(x).relu()
        return x


def containers():
    plain = seeded(Listed())
    for orig in (False, True):
        by_hand = seeded(Listed())
        with pytest.warns(UserWarning, match="ModuleList has no forward"):
            by_hand.layers = FullyShardedDataParallel(by_hand.layers, use_orig_params=orig)
        by_hand = FullyShardedDataParallel(by_hand, use_orig_params=orig)
        with pytest.warns(UserWarning, match="ModuleList has no forward"):
            by_policy = FullyShardedDataParallel(
                seeded(Listed()),
                auto_wrap_policy=ModuleWrapPolicy({nn.ModuleList}),
                use_orig_params=orig,
            )
        for model in (by_hand, by_policy):
            assert len(FullyShardedDataParallel.fsdp_modules(model)) == 2
            for step in range(2):
                plain.zero_grad()
                model.zero_grad()
                x = torch.ones(2, 6) * (step + 1)
                assert torch.equal(model(x), plain(x))
                model(x).sum().backward()
                plain(x).sum().backward()
                gradients = whole_gradients(model)
                for name, param in plain.named_parameters():
                    assert torch.equal(gradients[name], param.grad), name


def test_a_container_is_gathered_with_the_wrapper_around_it():
    run_ranks(containers, 2, kind="gloo")


def warned():
    with pytest.warns(UserWarning, match="chooses no module of Sequential: the whole model is one unit"):
        model = FullyShardedDataParallel(
            nn.Sequential(nn.Linear(4, 4)), auto_wrap_policy=ModuleWrapPolicy({nn.Conv2d})
        )
    model(torch.ones(1, 4)).sum().backward()


def test_a_policy_that_chooses_nothing_leaves_one_unit():
    run_ranks(warned, 2, kind="gloo")
