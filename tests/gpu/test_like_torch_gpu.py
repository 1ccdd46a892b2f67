"""The programs of the differential tests on NCCL; and what concerns devices, streams and memory, beside torch.

Each program runs with torch's library and with shardwise on the same two ranks, which share the GPU.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.testing import run_ranks
from tests.ranks import test_beside_ddp as ddp
from tests.ranks import test_like_torch as composable
from tests.ranks import test_wrapper_like_torch as wrapper
from tests.ranks import test_wrapper_state_peer as states
from tests.ranks.side_by_side import device, failures, on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200), pytest.mark.filterwarnings("ignore")]


def assert_none(function, *args):
    for differences in run_ranks(on_gpu, 2, function, *args, kind="nccl", timeout_seconds=180):
        assert not differences, "\n".join(differences)


# --- the programs of tests/ranks --------------------------------------------------------------------------------------


def test_programs_give_what_they_give_with_torch():
    assert_none(
        composable.all_programs, composable.here(composable.PROGRAMS, composable.USES), composable.both
    )


def test_misuses_raise_errors_of_the_kind_that_torch_raises():
    misuses = composable.here(composable.MISUSES, composable.MISUSES_USE)
    assert_none(composable.all_programs, misuses, composable.both_raise)


def test_the_wrapper_does_what_torchs_does():
    assert_none(wrapper.beside_torch, wrapper.CHECKS)


def test_states_have_torchs_keys_shapes_and_values():
    assert_none(states.all_tables)


def beside_ddp():
    bodies = (
        ddp.replicated_around_a_sharded_part,
        ddp.ddp_around_a_sharded_part,
        ddp.sharded_around_a_replicated_part,
        ddp.trained_with_gathers_ahead,
    )
    return failures((body, body.__name__) for body in bodies)


def test_sharded_modules_train_beside_replicated_ones():
    assert_none(beside_ddp)


# --- devices, streams and memory: fully_shard -------------------------------------------------------------------------


def kinds_of_memory(model):
    """Where shards and their gradients are."""
    found = []
    for param in model.parameters():
        local = param.to_local()
        found.append((local.device.type, local.is_pinned(), param.grad is None or param.grad.device.type))
    return found


def a_model_on_the_host(api):
    # Sharded over NCCL, it is moved.
    with torch.device("cpu"):
        model = composable.Stack()
    composable.shard(api, model)
    return kinds_of_memory(model), composable.train(model)


def inputs_on_the_host(api):
    model = composable.shard(api)
    return composable.train(model, run=lambda x: model(x.cpu()))


def shards_on_the_host(api):
    seen = []
    for is_pinned in (True, False):
        with torch.device("cpu"):
            model = composable.Stack()
        composable.shard(api, model, offload_policy=api.CPUOffloadPolicy(pin_memory=is_pinned))
        model(composable.rows(0)).sum().backward()
        seen.append((kinds_of_memory(model), composable.gradients(model), model(composable.rows(1)).detach()))
        seen.append([value.device.type for value in model.state_dict().values()])
    return seen


def a_hook_on_a_stream(api):
    stream = torch.cuda.Stream()
    seen = []

    def hook(reduced):
        seen.append(torch.cuda.current_stream() == stream)
        reduced.mul_(2.0)

    model = api.fully_shard(composable.Block(), mesh=api.mesh)
    model.set_all_reduce_hook(hook, stream=stream)
    model(composable.rows(0, 6)).sum().backward()
    return seen, composable.gradients(model)


def an_event_after_the_optimizer(api):
    model = composable.shard(api)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        loss = model(composable.rows(step)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        event = torch.cuda.Event()
        event.record()
        model.set_post_optim_event(event)
        losses.append(loss.detach())
    return losses


def gathered_on_another_stream(api):
    model = composable.shard(api)
    side = torch.cuda.Stream()
    # The shards were written on the current stream.
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        handle = model.blocks[0].unshard(async_op=True)
    handle.wait()
    torch.cuda.current_stream().wait_stream(side)
    first = [param.detach().clone() for param in model.blocks[0].parameters()]
    model.blocks[0].reshard()
    return first, composable.train(model)


def steps_on_another_stream(api):
    model = composable.shard(api)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = composable.train(model)
    torch.cuda.current_stream().wait_stream(side)
    return found


def moved_after_sharding(api):
    model = composable.shard(api)
    return kinds_of_memory(model.cpu()), kinds_of_memory(model.cuda()), composable.train(model)


def shards_on_meta_that_get_memory(api):
    with torch.device("meta"):
        model = composable.Stack()
    composable.shard(api, model)
    model.to_empty(device="cuda")
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.fill_(0.1 * (number % 3))
    return kinds_of_memory(model), composable.train(model)


def memory_of_the_group(api):
    model = composable.shard(api)
    for module in (model, *model.blocks):
        module.set_allocate_memory_from_process_group_for_comm(True)
    return composable.train(model)


PROGRAMS = [
    a_model_on_the_host,
    inputs_on_the_host,
    shards_on_the_host,
    a_hook_on_a_stream,
    an_event_after_the_optimizer,
    gathered_on_another_stream,
    steps_on_another_stream,
    moved_after_sharding,
    shards_on_meta_that_get_memory,
    memory_of_the_group,
]


def test_devices_and_streams_are_used_as_torch_uses_them():
    assert_none(composable.all_programs, PROGRAMS, composable.both)


# --- devices and memory: the wrapper ----------------------------------------------------------------------------------


def on_host():
    with torch.device("cpu"):
        return wrapper.net()


def devices(model):
    return [(param.device.type, param.grad is None or param.grad.device.type) for param in model.parameters()]


def a_device_as_a_number(lib):
    model = lib.FSDP(on_host(), device_id=torch.cuda.current_device())
    wrapper.step(model)
    return devices(model), str(model.compute_device)


def a_device_without_a_number(lib):
    model = lib.FSDP(on_host(), device_id=torch.device("cuda"))
    wrapper.step(model)
    return devices(model), str(model.compute_device)


def moved_after_wrapping(lib):
    # Ours has moved it already; torch's would not run without.
    model = lib.FSDP(on_host()).cuda()
    wrapper.step(model)
    return devices(model)


def synchronized_on_its_device(lib):
    model = lib.FSDP(on_host(), sync_module_states=True, device_id=torch.cuda.current_device())
    wrapper.step(model)
    return devices(model)


def inputs_and_keywords_on_the_host(lib):
    model = wrapper.nested(lib)
    output = model(torch.ones(2, 4, device="cpu"))
    return output.device.type


def an_ignored_module_on_the_host(lib):
    model = on_host()
    wrapped = lib.FSDP(model, ignored_modules=[model[2]], device_id=torch.cuda.current_device())
    return [param.device.type for param in model[2].parameters()], devices(wrapped)


def shards_of_the_wrapper_on_the_host(lib):
    found = []
    for orig in (False, True):
        model = wrapper.nested(lib, cpu_offload=lib.CPUOffload(offload_params=True), use_orig_params=orig)
        wrapper.step(model)
        # Which parameters have no elements on a rank, and so no gradient, depends on the padding.
        found.append(
            {
                (param.device.type, param.grad.device.type)
                for param in model.parameters()
                if param.grad is not None
            }
        )
        norm = model.clip_grad_norm_(0.5)
        found.append((float(norm), norm.device.type))
        with lib.FSDP.summon_full_params(model):
            found.append({param.device.type for param in model.parameters()})
        state = model.state_dict()
        found.append({name: value.device.type for name, value in state.items()})
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        optimizer.step()
        model.zero_grad()
        wrapper.step(model)
        found.append(float(model.clip_grad_norm_(1e9)))
    return found


def states_on_the_host(lib):
    model = wrapper.nested(lib)
    kinds, found = lib.StateDictType, []
    for kind, config in (
        (kinds.FULL_STATE_DICT, lib.FullStateDictConfig(offload_to_cpu=True)),
        (kinds.FULL_STATE_DICT, lib.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)),
        (kinds.FULL_STATE_DICT, lib.FullStateDictConfig()),
        (kinds.SHARDED_STATE_DICT, lib.ShardedStateDictConfig(offload_to_cpu=True)),
        (kinds.LOCAL_STATE_DICT, lib.LocalStateDictConfig()),
    ):
        with lib.FSDP.state_dict_type(model, kind, config):
            found.append({name: value.device.type for name, value in model.state_dict().items()})
    return found


def states_of_optimizers_on_the_host(lib):
    model = wrapper.nested(lib)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    wrapper.step(model)
    optimizer.step()
    found = []
    for offload in (True, False):
        config = lib.FullOptimStateDictConfig(offload_to_cpu=offload)
        lib.FSDP.set_state_dict_type(model, lib.StateDictType.FULL_STATE_DICT, None, config)
        state = lib.FSDP.optim_state_dict(model, optimizer)["state"]
        found.append({n: {k: v.device.type for k, v in each.items()} for n, each in state.items()})
    return found


def summoned_on_the_host(lib):
    model, found = wrapper.nested(lib), []
    for options in ({"offload_to_cpu": True}, {"offload_to_cpu": True, "rank0_only": True}):
        with lib.FSDP.summon_full_params(model, writeback=False, **options):
            found.append({param.device.type for param in model.parameters()})
    return found, devices(model)


def scaled_gradients(lib):
    precision = lib.MixedPrecision(torch.float16, torch.float16, torch.float16)
    model = wrapper.nested(lib, mixed_precision=precision)
    # torch's default group is the one of when its module was imported, which here was before there was any.
    scaler = lib.ShardedGradScaler("cuda", init_scale=2.0**10, process_group=dist.group.WORLD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        loss = model(torch.ones(2, 4)).float().sum()
        if step == 1 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(scaler.get_scale())
    return found


CHECKS = [
    a_device_as_a_number,
    a_device_without_a_number,
    moved_after_wrapping,
    synchronized_on_its_device,
    inputs_and_keywords_on_the_host,
    an_ignored_module_on_the_host,
    shards_of_the_wrapper_on_the_host,
    states_on_the_host,
    states_of_optimizers_on_the_host,
    summoned_on_the_host,
    scaled_gradients,
]


def test_the_wrapper_uses_devices_as_torchs_does():
    # Without warnings: torch's are about its own names, and about a device without a number.
    assert_none(wrapper.beside_torch, CHECKS, False)


# --- memory -----------------------------------------------------------------------------------------------------------


def wide():
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(6)))


def with_fully_shard(library):
    model = wide()
    for layer in model:
        library.fully_shard(layer)
    return library.fully_shard(model)


def with_wrapper(library, **options):
    model = wide()
    for number, layer in enumerate(model):
        model[number] = library.FullyShardedDataParallel(layer, device_id=device(), **options)
    return library.FullyShardedDataParallel(model, device_id=device(), **options)


def megabytes_of(make, library):
    """What is allocated between steps and at most, beyond what was there before, in MiB."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model = make(library)
    x = torch.randn(64, 1024)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        model(x).sum().backward()
        model.zero_grad()
    torch.cuda.synchronize()
    between, most = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    return between / 2**20, most / 2**20


def memory_beside_torch():
    import torch.distributed.fsdp as torchs

    import shardwise

    found = []
    for make in (with_fully_shard, with_wrapper):
        megabytes_of(make, torchs)  # what cuBLAS and NCCL keep for ever
        theirs, ours = megabytes_of(make, torchs), megabytes_of(make, shardwise)
        # A layer is 4 MiB, its shard 2; what is asked for in small pieces is rounded up by the allocator.
        if any(own > other + 1.0 for own, other in zip(ours, theirs, strict=True)):
            found.append(f"{make.__name__}: between steps and at most {ours} MiB, torch {theirs} MiB")
    return found


def test_no_more_memory_is_used_than_by_torch():
    assert_none(memory_beside_torch)
