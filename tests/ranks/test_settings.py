"""Everything a user can set on a sharded module, seen through what it changes."""

from __future__ import annotations

import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import ConfigError, MixedPrecisionPolicy, StateError, fully_shard
from shardwise.testing import run_ranks
from shardwise.testing.workloads import seeded
from shardwise.trace import record
from tests.ranks.models import (
    GATHER,
    REDUCE,
    DoubleLinear,
    Layers,
    average_gradients,
    counted,
    data,
    full,
    held_bytes,
    is_gathered,
    is_sharded,
    match_plain,
    same,
    same_parameters,
    same_shard,
    same_shards,
    seen_weights,
    sgd,
)
from tests.ranks.tables import cases_of, run_cases

both_kinds = pytest.mark.parametrize("kind", ["gloo", "threads"])
two_and_four = pytest.mark.parametrize("world_size", [2, 4])

# gloo adds ranks up in rank order, as the plain model does; the group of threads in an order of its own.
FOUR_THREADS = 1e-6


def sharded_layers(**kwargs):
    model = seeded(Layers())
    for unit in (*model.layers, model):
        fully_shard(unit, **kwargs)
    return model


def units(model):
    return (model, *model.layers)


def backward(model, step=0):
    loss = model(data(step, dist.get_rank(), 2, 6)).sum()
    loss.backward()
    return loss


def check_gradients(model, steps, tolerance=0.0, world_size=None):
    """The gradients are those of the plain model over these steps, averaged over ranks and added up."""
    plain = seeded(Layers())
    for step in steps:
        average_gradients(
            plain,
            lambda r: plain(data(step, r, 2, 6)).sum(),  # noqa: B023
            world_size or dist.get_world_size(),
        )
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert param.grad is not None, f"{name} has no gradient"
        same_shard(param.grad, expected.grad, name, tolerance)


class Slope(nn.Module):
    """Its parameter's gradient is the slope it is given."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, slope):
        return (self.weight * slope).sum()


def reduced(module, slope):
    """What the reduced gradient is filled with, when this rank's is `slope`."""
    module.weight.grad = None
    module(slope).backward()
    (value,) = set(full(module.weight.grad).flatten().tolist())
    return value


# --- gradient sync ----------------------------------------------------------------------------------------------------


def one_unit_without_sync():
    model = sharded_layers()
    model.set_requires_gradient_sync(False, recurse=False)
    with CommDebugMode() as first:
        backward(model, 0)
    assert counted(first)[REDUCE] == 3
    for name, param in model.named_parameters():
        assert (param.grad is not None) == name.startswith("layers"), name
    model.set_requires_gradient_sync(True, recurse=False)
    with CommDebugMode() as second:
        backward(model, 1)
    assert counted(second)[REDUCE] == 4
    # To the last digits: the root's micro-batches are added up before the ranks, the plain model's after.
    check_gradients(model, [0, 1], 1e-6)


@two_and_four
def test_without_recurse_gradient_sync_is_set_for_one_unit_alone(world_size):
    run_ranks(one_unit_without_sync, world_size, kind="gloo")


def steps_without_sync():
    model = sharded_layers()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: full(param).clone() for name, param in model.named_parameters()}
    model.set_requires_gradient_sync(False)
    backward(model, 0)
    with pytest.raises(StateError, match="would step without the gradients that were kept back"):
        optim.step()
    for name, param in model.named_parameters():
        same(full(param), before[name], name)

    def last_backward():
        model.set_requires_gradient_sync(True)
        backward(model, 1)

    optim.step(last_backward)
    assert not torch.equal(full(model.first.weight), before["first.weight"])
    # What reduces more seldom is stepped when it does.
    optim.zero_grad()
    before = {name: full(param).clone() for name, param in model.named_parameters()}
    model.set_requires_gradient_sync(False, recurse=False)
    backward(model, 2)
    optim.step()
    for name, param in model.named_parameters():
        assert torch.equal(full(param), before[name]) == (not name.startswith("layers")), name


def test_a_step_that_no_gradient_was_reduced_for_is_refused():
    run_ranks(steps_without_sync, 2)


def no_replicas():
    model = sharded_layers()
    model.set_requires_all_reduce(False)
    with CommDebugMode() as mode:
        backward(model)
    assert set(counted(mode)) == {GATHER, REDUCE}
    check_gradients(model, [0])


@both_kinds
def test_requires_all_reduce_changes_nothing_without_replicas(kind):
    if kind == "gloo":
        run_ranks(no_replicas, 2, kind=kind)
    else:
        run_ranks(accumulate, 2, lambda model: model.set_requires_all_reduce(False))


def accumulate(change, tolerance=0.0):
    """A setting that must not change results: two micro-batches, then a few steps beside the plain model."""
    model = sharded_layers()
    change(model)
    for step in range(2):
        backward(model, step)
    check_gradients(model, [0, 1], tolerance)

    def shard(module):
        for unit in (*module.layers, module):
            fully_shard(unit)
        change(module)

    def loss_of(module, step, rank):
        return module(data(step, rank, 2, 6)).sum()

    match_plain(Layers, shard, loss_of, steps=3, tolerance=tolerance)


# --- resharding -------------------------------------------------------------------------------------------------------


def one_unit_kept_after_forward():
    model = sharded_layers()
    model.layers[1].set_reshard_after_forward(False, recurse=False)
    with record(model) as recorder:
        loss = model(data(0, dist.get_rank(), 2, 6)).sum()
        assert [is_sharded(layer.in_proj) for layer in model.layers] == [True, False, True]
        loss.backward()
    again = [unit for _, unit, phase in recorder.of("unshard") if phase == "pre_backward"]
    assert again == ["layers.2", "layers.0"]
    check_gradients(model, [0])


def test_a_unit_kept_after_forward_is_not_gathered_in_backward():
    run_ranks(one_unit_kept_after_forward, 2, kind="gloo")


def kept_after_backward():
    model, plain = sharded_layers(), seeded(Layers())
    optim, plain_optim = sgd(model.parameters()), sgd(plain.parameters())
    shards = list(model.parameters())
    model.set_reshard_after_backward(False)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        with seen_weights(model.layers[0].in_proj) as weights, CommDebugMode() as gathering:
            loss = model(data(step, rank, 2, 6)).sum()
        assert counted(gathering) == {GATHER: 4}, "an optimizer's step makes kept weights stale"
        loss.backward()
        assert is_gathered(model.layers[0].in_proj)
        assert is_sharded(model.layers[0].in_proj), "whoever looks now means the shards"
        assert held_bytes(weights) > 0
        with torch.no_grad(), CommDebugMode() as idle:
            again = model(data(step, rank, 2, 6)).sum()
        # The forward frees what it is told to free after forward; what it used it had.
        assert counted(idle) == {}, "weights that nobody changed are gathered again"
        same(again, loss.detach(), f"step {step}: loss with kept weights")
        losses = average_gradients(plain, lambda r: plain(data(step, r, 2, 6)).sum(), world_size)  # noqa: B023
        same(loss.detach(), losses[rank], f"step {step}: loss")
        for each in (optim, plain_optim):
            each.step()
            each.zero_grad()
    model.set_reshard_after_backward(True)
    backward(model, 5)
    assert is_sharded(model.layers[0].in_proj)
    for shard in shards:
        assert isinstance(shard, DTensor)
    for each in (optim, plain_optim):
        each.zero_grad()
    same_parameters(model, plain)


@two_and_four
def test_weights_kept_after_backward_are_used_until_an_optimizer_changes_them(world_size):
    run_ranks(kept_after_backward, world_size, kind="gloo")


def kept_after_backward_for_one_unit():
    model = sharded_layers()
    model.set_reshard_after_backward(False, recurse=False)
    backward(model)
    assert is_gathered(model.first)
    assert not is_gathered(model.layers[0].in_proj)


def test_without_recurse_reshard_after_backward_is_set_for_one_unit_alone():
    run_ranks(kept_after_backward_for_one_unit, 2, kind="gloo")


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Linear(6, 6)
        self.right = nn.Linear(6, 6)

    def forward(self, x):
        return self.left(x).sum(), self.right(x).sum()


def two_backwards(is_last):
    """The first backward prefetches a unit that only the second one uses."""
    model = seeded(TwoHeads())
    fully_shard(model.left)
    fully_shard(model.right)
    fully_shard(model)
    model.left.set_modules_to_backward_prefetch([model.right])
    model.right.set_modules_to_backward_prefetch([])
    left, right = model(data(0, dist.get_rank(), 2, 6))
    with record(model) as recorder:
        model.set_is_last_backward(is_last)
        left.backward()
        model.set_is_last_backward(True)
        right.backward()
    plain = seeded(TwoHeads())
    average_gradients(plain, lambda r: sum(plain(data(0, r, 2, 6))), dist.get_world_size())
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        same_shard(param.grad, expected.grad, name)
    return [(kind, unit) for kind, unit, _ in recorder.of("unshard", "reshard")]


def test_before_the_last_backward_a_prefetched_unit_is_left_for_the_next():
    for events in run_ranks(two_backwards, 2, False, kind="gloo"):
        assert events == [
            ("unshard", "left"),
            ("unshard", "right"),
            ("reshard", "left"),
            ("reshard", "right"),
        ]


def test_the_last_backward_frees_what_was_prefetched_in_vain():
    for events in run_ranks(two_backwards, 2, True, kind="gloo"):
        assert events.count(("unshard", "right")) == 2
        assert events.count(("reshard", "right")) == 2


class Embedded(nn.Module):
    """Backward through an embedding does not read its weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layer = nn.Linear(6, 6)

    def forward(self, tokens):
        return self.layer(self.embed(tokens))


def embedding_is_not_gathered_in_backward(gathers):
    def shard(model):
        fully_shard(model.embed)
        fully_shard(model.layer)
        fully_shard(model)
        model.embed.set_unshard_in_backward(gathers)

    def loss_of(model, step, rank):
        return model(torch.tensor([rank, 3, step % 7])).square().sum()

    model = match_plain(Embedded, shard, loss_of, steps=3)
    with record(model) as recorder:
        loss_of(model, 0, dist.get_rank()).backward()
    return [unit for _, unit, phase in recorder.of("unshard") if phase == "pre_backward"]


@both_kinds
def test_a_unit_that_backward_does_not_need_is_not_gathered_for_it(kind):
    for again in run_ranks(embedding_is_not_gathered_in_backward, 2, False, kind=kind):
        assert again == ["layer"]
    for again in run_ranks(embedding_is_not_gathered_in_backward, 2, True, kind=kind):
        assert sorted(again) == ["embed", "layer"]


# --- dividing ---------------------------------------------------------------------------------------------------------


def divided(slopes, factors, dtypes):
    found = {}
    for dtype in dtypes:
        module = fully_shard(Slope(5, 3), mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        for factor in factors:
            module.set_gradient_divide_factor(factor)
            found[dtype, factor] = reduced(module, slopes[dist.get_rank()])
    return found


@both_kinds
@two_and_four
def test_a_divide_factor_takes_the_place_of_the_number_of_ranks(world_size, kind):
    slopes = [1.0, 2.0, 4.0, 8.0][:world_size]
    dtypes, factors = (torch.float32, torch.bfloat16, torch.float16), (1.0, 3.0, 16.0)
    # The sums are exact; so is a division by a power of two, and any other is rounded once, in the reduce dtype.
    want = {
        (dtype, factor): float((torch.tensor(sum(slopes), dtype=dtype) / factor).float())
        for dtype in dtypes
        for factor in factors
    }
    assert run_ranks(divided, world_size, slopes, factors, dtypes, kind=kind) == [want] * world_size


def test_with_a_divide_factor_fp16_sums_do_not_overflow():
    # 4 × 30000 is beyond fp16's 65504.
    found = run_ranks(divided, 4, [30000.0] * 4, (16.0,), (torch.float16,), kind="gloo")
    assert found == [{(torch.float16, 16.0): 7500.0}] * 4


def divide_factor_of_one_unit():
    model = sharded_layers()
    model.set_gradient_divide_factor(1.0)
    backward(model)
    plain = seeded(Layers())
    average_gradients(plain, lambda r: plain(data(0, r, 2, 6)).sum(), 2)
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        factor = 1 if name.startswith("layers") else 2
        same_shard(param.grad, factor * expected.grad, name)


def test_a_divide_factor_holds_for_one_unit():
    run_ranks(divide_factor_of_one_unit, 2, kind="gloo")


def old_name():
    module = fully_shard(Slope(4))
    with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
        module.set_reduce_scatter_divide_factor(8.0)
    return reduced(module, 4.0)


def test_the_old_name_of_the_divide_factor_works_and_warns():
    assert run_ranks(old_name, 2, kind="gloo") == [1.0, 1.0]


def factors_that_divide_nothing():
    module = fully_shard(Slope(4))
    for factor in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="divide factor"):
            module.set_gradient_divide_factor(factor)
    return reduced(module, 4.0)


def test_a_divide_factor_that_is_not_above_zero_is_refused_and_changes_nothing():
    assert run_ranks(factors_that_divide_nothing, 2, kind="gloo") == [4.0, 4.0]


def force_sum(model):
    for unit in units(model):
        unit.set_force_sum_reduction_for_comms(True)


@two_and_four
def test_sums_divided_afterwards_give_the_same_averages(world_size):
    run_ranks(accumulate, world_size, force_sum, kind="gloo")


def test_sums_divided_afterwards_give_the_same_averages_with_ranks_as_threads():
    run_ranks(accumulate, 4, force_sum, FOUR_THREADS)


# --- hooks and events -------------------------------------------------------------------------------------------------


def hooked(mesh_shape):
    """What the hook saw, and what became of a gradient whose row it halved."""
    mesh = init_device_mesh("cpu", mesh_shape)
    module = fully_shard(Slope(8), mesh=mesh)
    seen = []

    def hook(row):
        seen.append(sorted(set(row.tolist()) - {0.0}))
        row.div_(2)

    module.set_all_reduce_hook(hook)
    return seen, reduced(module, 2.0 ** dist.get_rank())


def test_an_all_reduce_hook_sees_the_sum_before_its_division_and_may_change_it():
    for seen, value in run_ranks(hooked, 2, (2,), kind="gloo"):
        assert seen == [[3.0]]
        assert value == 3 / 2 / 2


@both_kinds
def test_with_replicas_the_all_reduce_hook_sees_their_sum(kind):
    for seen, value in run_ranks(hooked, 4, (2, 2), kind=kind):
        assert seen == [[15.0]]
        assert value == 15 / 2 / 4


def stream_with_replicas():
    module = fully_shard(Slope(8), mesh=init_device_mesh("cpu", (2, 1)))
    with pytest.raises(
        ConfigError, match="stream was given for the all-reduce hook of a unit that has replicas"
    ):
        module.set_all_reduce_hook(lambda row: row.zero_(), stream=object())
    return reduced(module, 4.0)


def test_a_stream_for_the_hook_is_refused_with_replicas_and_changes_nothing():
    assert run_ranks(stream_with_replicas, 2, kind="gloo") == [4.0, 4.0]


def post_optim_event():
    model = sharded_layers()
    backward(model)
    event = torch.Event("cpu")
    model.set_post_optim_event(event)
    kept = weakref.ref(event)
    del event
    assert kept() is not None
    for param in model.parameters():
        param.grad = None
    backward(model, 1)
    assert kept() is None, "the event is used once"
    check_gradients(model, [1])


def test_an_event_after_the_optimizer_is_used_once():
    run_ranks(post_optim_event, 2, kind="gloo")


# --- how things travel ------------------------------------------------------------------------------------------------


class Comm:
    """A collective of a user's own, which says what it was asked for."""

    def __init__(self):
        self.allocated = []
        self.calls = []

    def allocate(self, size, *, dtype, device):
        self.allocated.append(torch.empty(size, dtype=dtype, device=device))
        return self.allocated[-1]

    def note(self, output, rows, group, async_op):
        assert isinstance(group, dist.ProcessGroup)
        assert any(output is made for made in self.allocated)
        assert any(rows is made for made in self.allocated)
        self.calls.append((group.size(), async_op))


class GatherComm(Comm):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.note(output_tensor, input_tensor, group, async_op)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


class ReduceComm(Comm):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.note(output_tensor, input_tensor, group, async_op)
        assert op == dist.ReduceOp.SUM
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


class BlockingReduceComm(ReduceComm):
    """Returns no work: the sum is there when it returns."""

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        work = super().__call__(output_tensor, input_tensor, group, op, async_op)
        work.wait()


# Not bitwise from three ranks on: a reduce-scatter of the user's adds up in an order of its own.
def custom(tolerance):
    gather, reduce, blocking = GatherComm(), ReduceComm(), BlockingReduceComm()

    def change(model):
        model.layers[0].set_custom_all_gather(gather)
        model.layers[0].set_custom_reduce_scatter(reduce)
        model.layers[1].set_custom_reduce_scatter(blocking)

    accumulate(change, tolerance)
    world_size = dist.get_world_size()
    assert reduce.calls == blocking.calls == [(world_size, True)] * 5
    assert gather.calls == [(world_size, True)] * 10
    for comm, calls in ((gather, 10), (reduce, 5), (blocking, 5)):
        assert len(comm.allocated) == 2 * calls
    assert {made.dtype for made in reduce.allocated} == {torch.float32}


@two_and_four
def test_collectives_of_a_users_own_run_between_buffers_of_their_own(world_size):
    run_ranks(custom, world_size, 0.0 if world_size == 2 else FOUR_THREADS, kind="gloo")


class GroupsOf(TorchDispatchMode):
    """The groups that collectives run over, by kind."""

    def __init__(self):
        super().__init__()
        self.names = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            kind = func.__name__.split(".")[0]
            self.names.setdefault(kind, set()).add(dist.ProcessGroup.unbox(args[2]).group_name)
        return func(*args, **(kwargs or {}))


def groups_used(separate):
    model = sharded_layers()
    model.set_separate_reduce_scatter_group(separate)
    loss = model(data(0, dist.get_rank(), 2, 6)).sum()
    with GroupsOf() as groups:
        loss.backward()
    check_gradients(model, [0])
    (gathers,) = groups.names["_allgather_base_"]
    (reduces,) = groups.names["_reduce_scatter_base_"]
    return gathers != reduces


def separate_group(model):
    model.set_separate_reduce_scatter_group()


@two_and_four
def test_reduces_may_have_a_group_of_their_own(world_size):
    assert run_ranks(groups_used, world_size, True, kind="gloo") == [True] * world_size
    assert run_ranks(groups_used, world_size, False, kind="gloo") == [False] * world_size
    run_ranks(accumulate, world_size, separate_group, kind="gloo")


def back_to_the_shared_group():
    model = sharded_layers()
    model.set_separate_reduce_scatter_group()
    backward(model)
    model.set_separate_reduce_scatter_group(False)
    model.zero_grad()
    loss = model(data(1, dist.get_rank(), 2, 6)).sum()
    with GroupsOf() as groups:
        loss.backward()
    assert groups.names["_allgather_base_"] == groups.names["_reduce_scatter_base_"]
    check_gradients(model, [1])


def test_reduces_may_go_back_to_the_shared_group():
    run_ranks(back_to_the_shared_group, 2, kind="gloo")


def memory_of_the_group():
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        def change(model):
            for unit in units(model):
                unit.set_allocate_memory_from_process_group_for_comm(True)

        accumulate(change)


def test_where_the_group_has_no_memory_of_its_own_ordinary_memory_serves():
    run_ranks(memory_of_the_group, 2, kind="gloo")


def symmetric_memory():
    model = sharded_layers()
    for backend in ("NCCL", "NVSHMEM"):
        with pytest.raises(ConfigError, match=f"'{backend}' was asked for on a 'gloo' group"):
            model.set_symm_mem_for_comm(backend)
    backward(model)
    check_gradients(model, [0])


def test_symmetric_memory_is_refused_on_gloo_and_changes_nothing():
    run_ranks(symmetric_memory, 2, kind="gloo")


def several_inputs(model):
    model.set_reduce_scatter_max_input_buffers(2)


@two_and_four
def test_several_reduces_in_flight_give_the_same_results(world_size):
    run_ranks(accumulate, world_size, several_inputs, kind="gloo")


def unwaited_reduces(max_input_buffers):
    """How many reduce-scatters are under way at once, at most."""
    model = sharded_layers()
    model.set_reduce_scatter_max_input_buffers(max_input_buffers)
    under_way, most = [], []

    class Counted(ReduceComm):
        def __call__(self, *args, **kwargs):
            work = super().__call__(*args, **kwargs)
            under_way.append(work)
            most.append(len(under_way))

            class Waited:
                def wait(self):
                    under_way.remove(work)
                    work.wait()

            return Waited()

    for unit in units(model):
        unit.set_custom_reduce_scatter(Counted())
    backward(model)
    assert under_way == []
    check_gradients(model, [0])
    return max(most)


def test_as_many_reduces_are_under_way_as_there_may_be_inputs():
    for allowed in (1, 2, 3):
        assert run_ranks(unwaited_reduces, 2, allowed, kind="gloo") == [allowed] * 2


def bad_numbers_of_inputs():
    model = sharded_layers()
    for bad in (0, -1):
        with pytest.raises(ValueError, match=f"max_input_buffers is {bad}"):
            model.set_reduce_scatter_max_input_buffers(bad)
    for bad in (1.5, "2", True, None):
        with pytest.raises(TypeError, match=r"max_input_buffers is .*, not an int"):
            model.set_reduce_scatter_max_input_buffers(bad)
    with pytest.raises(TypeError, match="takes a bool, not 2"):
        model.set_reshard_after_forward(2)
    backward(model)
    check_gradients(model, [0])


def test_numbers_of_input_buffers_that_make_no_sense_are_refused():
    run_ranks(bad_numbers_of_inputs, 2, kind="gloo")


# --- ranks that use different parameters ------------------------------------------------------------------------------


class Either(DoubleLinear):
    """Uses one of two layers of a unit."""

    def forward(self, x):
        return (self.lin2 if self.use_second else self.lin1)(x)


def different_parameters(within_root):
    model, plain = (
        seeded(nn.Sequential(nn.Linear(8, 8), Either())),
        seeded(nn.Sequential(nn.Linear(8, 8), Either())),
    )
    if not within_root:
        fully_shard(model[1])
    fully_shard(model)
    model.set_reduce_scatter_unused_params(True)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optim, plain_optim = sgd(model.parameters()), sgd(plain.parameters())

    def loss_of(module, step, r):
        module[1].use_second = (r + step) % 2 == 1
        return module(data(step, r, 2, 8)).sum()

    for step in range(4):
        loss_of(model, step, rank).backward()
        average_gradients(plain, lambda r: loss_of(plain, step, r), world_size)  # noqa: B023
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert param.grad is not None, f"{name} has no gradient"
            same_shard(param.grad, expected.grad, f"step {step}: {name}")
        for each in (optim, plain_optim):
            each.step()
            each.zero_grad()
        same_shards(model, plain, f"step {step}: ")


@two_and_four
def test_ranks_may_use_different_parameters_of_a_unit(world_size):
    run_cases(different_parameters, world_size, cases_of(within_root=[True, False]), kind="gloo")


def unused_on_all_ranks(includes):
    model = fully_shard(seeded(DoubleLinear(use_second=False)))
    model.set_reduce_scatter_unused_params(includes)
    model(data(0, dist.get_rank(), 2, 8)).sum().backward()
    gradient = model.lin2.weight.grad
    assert model.lin1.weight.grad is not None
    return None if gradient is None else full(gradient).unique().tolist()


def test_an_unused_parameter_has_a_gradient_of_zeros_if_asked_and_none_else():
    assert run_ranks(unused_on_all_ranks, 2, True, kind="gloo") == [[0.0]] * 2
    assert run_ranks(unused_on_all_ranks, 2, False, kind="gloo") == [None] * 2


class Bypass(nn.Module):
    """The layer always runs; whether its output counts is a rank's own affair."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layer = nn.Linear(6, 6)

    def forward(self, x, uses_layer):
        x = self.first(x)
        y = self.layer(x)
        return (x + y if uses_layer else x).sum()


def unit_that_one_rank_does_not_use():
    model, plain = seeded(Bypass()), seeded(Bypass())
    # Kept after forward: a gather in backward would need all ranks.
    fully_shard(model.layer, reshard_after_forward=False)
    fully_shard(model)
    model.set_reduce_scatter_unused_params(True)

    def loss_of(module, step, r):
        return module(data(step, r, 2, 6), (r + step) % 2 == 0)

    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        loss_of(model, step, rank).backward()
        average_gradients(plain, lambda r: loss_of(plain, step, r), world_size)  # noqa: B023
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        same_shard(param.grad, expected.grad, name)
    return [is_sharded(model.layer), is_sharded(model.first)]


@two_and_four
def test_a_unit_that_a_ranks_backward_does_not_reach_joins_with_zeros(world_size):
    run_ranks(unit_that_one_rank_does_not_use, world_size, kind="gloo")


# --- forgetting -------------------------------------------------------------------------------------------------------


def reset_in_the_middle():
    model = sharded_layers()
    model.set_requires_gradient_sync(False)
    backward(model, 0)
    with seen_weights(model.layers[0].in_proj, model.first) as weights:
        model(data(1, dist.get_rank(), 2, 6))
    assert held_bytes(weights) > 0
    model.reset_iter_state()
    assert held_bytes(weights) == 0
    assert all(isinstance(param, DTensor) for param in model.parameters())
    model.set_requires_gradient_sync(True)
    backward(model, 2)
    check_gradients(model, [2])


@both_kinds
def test_reset_frees_weights_and_drops_stashed_gradients(kind):
    run_ranks(reset_in_the_middle, 2, kind=kind)
