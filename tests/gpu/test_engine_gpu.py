"""The engine on GPUs: four ranks, replicas, shards on the host, memory in steady state, a host that never waits.

`test_parity_gpu.py` holds the basics to the oracle, `test_stream_order_gpu.py` the waits between streams.
"""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from shardwise import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from shardwise.engine.gather import unit_gather
from shardwise.testing import run_ranks
from shardwise.testing.parity import (
    BF16,
    FP32,
    ONE_BATCH,
    Accumulation,
    differences,
    gather_histories,
    run_plain,
    run_sharded,
)
from shardwise.testing.workloads import WORKLOADS, seeded
from tests.ranks.models import Layers

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

EACH_OF_TWO = Accumulation(2)
LAST_OF_THREE = Accumulation(3, sync_each=False)
BF16_POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def mesh_of(*sizes: int) -> Any:
    return init_device_mesh("cuda", sizes)


# --- parity ---------------------------------------------------------------------------------------------------------


def parity(names, replicas, runs, tolerance, steps):
    """Sharded runs of workloads against the oracle on the same GPU; returns what is wrong."""
    world_size = dist.get_world_size()
    mesh = mesh_of(replicas, world_size // replicas) if replicas else mesh_of(world_size)
    cases = [(name, *run) for name in names for run in runs]
    local = []
    for name, reshard, accumulation, precision, offload in cases:
        shard = partial(
            fully_shard,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=MixedPrecisionPolicy(precision.param_dtype, precision.reduce_dtype),
            offload_policy=offload,
        )
        local.append(
            run_sharded(WORKLOADS[name], shard, accumulation=accumulation, steps=steps, device="cuda")
        )
    wrong = []
    for (name, reshard, accumulation, precision, offload), history in zip(
        cases, gather_histories(local), strict=True
    ):
        expected = run_plain(
            WORKLOADS[name],
            world_size,
            precision=precision,
            accumulation=accumulation,
            steps=steps,
            device="cuda",
        )
        if found := differences(expected, history, tolerance=tolerance):
            case = f"{name}, reshard {reshard}, {accumulation.label}, {precision.label}, {offload}"
            wrong.append(f"{case}: {len(found)} differences, first: {found[0]}")
    return wrong


def check_parity(world_size, replicas, runs, tolerance, kind="nccl", steps=3):
    wrong = run_ranks(
        parity, world_size, list(WORKLOADS), replicas, runs, tolerance, steps, kind=kind, timeout_seconds=140
    )
    assert not any(wrong), "\n".join(wrong[0])


# Not bitwise: on a GPU the kernel that is chosen, and with it the order of its sums, may depend on how a weight is
# aligned in memory; some backward kernels add atomically; and a backend adds ranks up in an order of its own.


def test_four_ranks_match_the_oracle():
    runs = [(True, ONE_BATCH), (2, ONE_BATCH), (False, LAST_OF_THREE)]
    check_parity(4, 0, [(*run, FP32, OffloadPolicy()) for run in runs], 1e-5)


def test_two_replicas_of_two_shards_match_the_oracle():
    runs = [(True, ONE_BATCH), (False, LAST_OF_THREE)]
    check_parity(4, 2, [(*run, FP32, OffloadPolicy()) for run in runs], 1e-5)


def test_two_replicas_match_the_oracle_on_gloo_with_cuda_tensors():
    check_parity(2, 2, [(True, LAST_OF_THREE, FP32, OffloadPolicy())], 1e-5, kind="gloo-cuda")


def in_place_and_by_rows(precision):
    """Losses and shards with gathers into place and with gathers by rows, and what the first were counted as."""
    found, counts = [], {}
    for smallest in (0, 1 << 40):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(unit_gather, "_IN_PLACE_BYTES", smallest)
            torch.manual_seed(0)
            model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)]).cuda()
            for layer in model:
                fully_shard(layer, mesh=mesh_of(dist.get_world_size()), mp_policy=precision)
            fully_shard(model, mesh=mesh_of(dist.get_world_size()), mp_policy=precision)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
            for step in range(4):
                x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step)).cuda()
                with CommDebugMode() as counted:
                    loss = model(x).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.detach())
            if smallest == 0:
                counts = {str(op): count for op, count in counted.get_comm_counts().items()}
            found += [param.to_local().clone() for param in model.parameters()]
    half = len(found) // 2
    return [torch.equal(a, b) for a, b in zip(found[:half], found[half:], strict=True)], counts


# One rank's row lies as the full parameters do: it is gathered there at once.
@pytest.mark.parametrize(
    ("world_size", "gather_each"),
    [(1, "c10d._allgather_base_"), (2, "c10d.allgather_into_tensor_coalesced_")],
)
def test_parameters_gathered_into_their_places_are_those_gathered_by_rows(world_size, gather_each):
    for precision in (MixedPrecisionPolicy(), BF16_POLICY):
        for same, counts in run_ranks(in_place_and_by_rows, world_size, precision, kind="nccl"):
            assert all(same)
            assert counts == {gather_each: 3}


@pytest.mark.parametrize("pin_memory", [True, False])
def test_shards_on_the_host_match_the_oracle(pin_memory):
    policy = CPUOffloadPolicy(pin_memory=pin_memory)
    accumulations = (ONE_BATCH, EACH_OF_TWO, LAST_OF_THREE)
    check_parity(2, 0, [(True, accumulation, FP32, policy) for accumulation in accumulations], 1e-5)


def test_shards_on_the_host_match_the_oracle_in_bf16():
    check_parity(2, 0, [(2, LAST_OF_THREE, BF16, CPUOffloadPolicy())], 1e-2)


# --- bitwise the same with shards on the host -----------------------------------------------------------------------


def powers_of_two(params):
    """Products with powers of two are exact, so that host and device, fused or not, round alike."""
    return torch.optim.SGD(params, lr=2.0**-6, momentum=0.5)


def trained(steps, micro_batches, sync_each, offload, replicas, width=48):
    """Parameters after each tenth step, all on the host."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    mesh = mesh_of(replicas, world_size // replicas) if replicas else mesh_of(world_size)
    model: Any = seeded(Layers(num_layers=2, width=width)).to("cuda")
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh, offload_policy=offload)
    optim = powers_of_two(model.parameters())
    generator = torch.Generator("cuda").manual_seed(rank)
    seen = []
    for step in range(steps):
        for micro_batch in range(micro_batches):
            model.set_requires_gradient_sync(sync_each or micro_batch == micro_batches - 1)
            inputs = torch.randn(4, width, device="cuda", generator=generator)
            torch.tanh(model(inputs)).square().mean().backward()
        optim.step()
        optim.zero_grad()
        if step % 10 == 9:
            seen.append(
                torch.cat([param.to_local().detach().flatten().cpu() for param in model.parameters()])
            )
    return torch.stack(seen)


def host_and_device(steps, micro_batches, sync_each, replicas, pin_memory):
    """The first checkpoint at which they part, if any."""
    on_device = trained(steps, micro_batches, sync_each, OffloadPolicy(), replicas)
    on_host = trained(steps, micro_batches, sync_each, CPUOffloadPolicy(pin_memory=pin_memory), replicas)
    assert bool(on_device.isfinite().all())
    assert not torch.equal(on_device[0], on_device[-1]), "nothing was trained"
    same = (on_device == on_host).all(dim=1)
    return None if same.all() else int(same.logical_not().nonzero()[0])


def within_a_budget():
    """The first unit fits on the device, the others go to the host; training is the same."""
    width = 48
    model: Any = seeded(Layers(num_layers=2, width=width)).to("cuda")
    world_size = dist.get_world_size()
    first = sum(-(-param.numel() // world_size) for param in model.layers[0].parameters())
    budget = 4 * 4 * first / 2**30
    policy = CPUOffloadPolicy(device_budget_gb=budget)
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh_of(world_size), offload_policy=policy)
    devices = [
        {param.device.type for param in unit.parameters()}
        for unit in (*model.layers, model.first, model.last)
    ]
    assert devices == [{"cuda"}, {"cpu"}, {"cpu"}, {"cpu"}], devices
    on_device = trained(10, 1, True, OffloadPolicy(), 0, width)
    in_part = trained(10, 1, True, CPUOffloadPolicy(device_budget_gb=budget), 0, width)
    assert torch.equal(on_device, in_part)


def test_only_what_does_not_fit_a_device_budget_goes_to_the_host():
    run_ranks(within_a_budget, 2, kind="nccl", timeout_seconds=100)


@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize(("micro_batches", "sync_each"), [(1, True), (3, True), (3, False)])
def test_shards_on_the_host_train_bitwise_as_on_the_device(pin_memory, micro_batches, sync_each):
    results = run_ranks(
        host_and_device, 2, 20, micro_batches, sync_each, 0, pin_memory, kind="nccl", timeout_seconds=120
    )
    assert results == [None, None]


def test_200_steps_with_replicas_and_shards_on_the_host_are_bitwise_those_on_the_device():
    results = run_ranks(host_and_device, 4, 200, 1, True, 2, True, kind="nccl", timeout_seconds=140)
    assert results == [None] * 4


# --- steady state ---------------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "bf16": {"mp_policy": BF16_POLICY},
    "kept": {"reshard_after_forward": False},
    "replicas": {"replicas": True},
    "host": {"offload_policy": CPUOffloadPolicy()},
}


class Loop:
    """A model, its optimizer and the inputs of a step, all on the device."""

    def __init__(self, replicas: bool = False, width: int = 256, num_layers: int = 6, **options: Any) -> None:
        mesh = mesh_of(dist.get_world_size(), 1) if replicas else mesh_of(dist.get_world_size())
        self.model: Any = seeded(Layers(num_layers=num_layers, width=width)).to("cuda")
        self.full_bytes = sum(param.numel() * param.element_size() for param in self.model.parameters())
        for unit in (*self.model.layers, self.model):
            fully_shard(unit, mesh=mesh, **options)
        self.params = list(self.model.parameters())
        self.optim = torch.optim.SGD(self.params, lr=1e-3, momentum=0.9)
        self.inputs = torch.randn(8, width, device="cuda")

    def forward_and_backward(self) -> None:
        self.model(self.inputs).square().mean().backward()

    def step(self) -> None:
        self.forward_and_backward()
        self.optim.step()
        self.optim.zero_grad()


COUNTERS = ("num_device_alloc", "num_device_free", "num_alloc_retries", "reserved_bytes.all.current")


def memory_of_50_steps(way):
    """The level after each step, and the allocators' counters early and late.

    The host runs ahead of these small steps as far as it likes, and a kernel's arguments stay in page-locked memory
    until it has run: that memory is counted over steps that wait for the device, as a loop that reads its loss does.
    """
    loop = Loop(**WAYS[way])
    levels, counters, pinned = [], [], []
    for step in range(50):
        loop.step()
        if step in (4, 49):
            torch.cuda.synchronize()
            stats = torch.cuda.memory_stats()
            counters.append({name: stats[name] for name in COUNTERS})
        levels.append(torch.cuda.memory_allocated())
    for step in range(25):
        loop.step()
        torch.cuda.synchronize()
        if step in (4, 24):
            pinned.append(torch.cuda.host_memory_stats()["num_host_alloc"])
    return levels[4:], counters, pinned


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_50_steps_hold_no_more_memory_and_ask_the_driver_for_none(world_size, way):
    results = run_ranks(memory_of_50_steps, world_size, way, kind="nccl", timeout_seconds=120)
    for levels, (early, late), (pinned_early, pinned_late) in results:
        assert len(set(levels)) == 1, f"memory held after a step changes: {levels}"
        assert early == late
        assert pinned_early == pinned_late


def levels_after_a_step():
    """Bytes held by the model and its optimizer after a step, beside what shards and their momentum take."""
    # What matrix libraries keep for good comes with a process's first step.
    Loop(width=64).step()
    gc.collect()
    before = torch.cuda.memory_allocated()
    loop = Loop(width=1024)
    for _ in range(3):
        loop.step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    shard_bytes = sum(param.to_local().numel() * param.element_size() for param in loop.params)
    return held, shard_bytes, loop.full_bytes


@pytest.mark.parametrize("world_size", [2, 4])
def test_after_a_step_shards_and_the_optimizers_state_are_all_that_is_held(world_size):
    for held, shard_bytes, full_bytes in run_ranks(levels_after_a_step, world_size, kind="nccl"):
        # Beside them stand the inputs and workspaces of matrix libraries: less than a quarter of the model.
        assert held <= 2 * shard_bytes + full_bytes / 4, f"{held} held, {shard_bytes} in shards"


# --- the host runs ahead --------------------------------------------------------------------------------------------

SLEEP_CYCLES = 2_000_000_000  # about a second: the host issues several steps meanwhile


def host_never_waits():
    """For each way, what made the host wait, if anything did."""
    found = {}
    ways = {name: options for name, options in WAYS.items() if name != "host"}
    for name, options in ways.items():
        loop = Loop(num_layers=3, **options)
        for _ in range(3):
            loop.step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            loop.forward_and_backward()
            loop.step()
        except RuntimeError as error:
            found[name] = str(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        # What torch's mode does not know of would hold the host up until the device has woken up.
        asleep = torch.cuda.Event()
        torch.cuda._sleep(SLEEP_CYCLES)
        asleep.record()
        loop.forward_and_backward()
        loop.step()
        with torch.no_grad():
            loop.model(loop.inputs)
        if asleep.query():
            found[name] = "the host waited for the compute stream"
        torch.cuda.synchronize()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_does_not_make_the_host_wait(world_size):
    assert run_ranks(host_never_waits, world_size, kind="nccl", timeout_seconds=120) == [{}] * world_size


def one_wait_is_noticed():
    loop = Loop(num_layers=3)
    loop.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loop.model(loop.inputs).sum().item()
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def test_a_wait_of_the_host_would_be_noticed():
    (message,) = run_ranks(one_wait_is_noticed, 1, kind="nccl", timeout_seconds=120)
    assert "synchroniz" in message


# --- settings that need a device ------------------------------------------------------------------------------------


def settings_on_nccl():
    """Each setting leaves the results as they are; returns the names of those that do not."""

    def results(change):
        loop = Loop(width=64, num_layers=3)
        loop.inputs = torch.full((8, 64), 1.0 + dist.get_rank(), device="cuda")
        change(loop.model)
        for _ in range(3):
            loop.step()
        return torch.cat([param.to_local().detach().flatten().cpu() for param in loop.params])

    def for_all(model, call):
        for module in (model, *model.layers):
            call(module)

    world_size = float(dist.get_world_size())
    changes = {
        "two input buffers": lambda model: model.set_reduce_scatter_max_input_buffers(2),
        "a separate group": lambda model: model.set_separate_reduce_scatter_group(),
        "sums": lambda model: for_all(model, lambda m: m.set_force_sum_reduction_for_comms(True)),
        "a divide factor": lambda model: for_all(model, lambda m: m.set_gradient_divide_factor(world_size)),
        "memory of the group": lambda model: for_all(
            model, lambda m: m.set_allocate_memory_from_process_group_for_comm(True)
        ),
        "kept after backward": lambda model: model.set_reshard_after_backward(False),
    }
    expected = results(lambda model: None)
    return [name for name, change in changes.items() if not torch.equal(results(change), expected)]


def test_settings_about_how_gradients_travel_leave_results_alone():
    # Two ranks and a division by two: sums, averages and their order are exact to the bit.
    assert run_ranks(settings_on_nccl, 2, kind="nccl", timeout_seconds=120) == [[], []]


class Recording:
    """A reduce-scatter that notes which reduction it was asked for."""

    def __init__(self):
        self.ops = set()

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.ops.add("average" if op == dist.ReduceOp.AVG else "sum")
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def reductions_asked_for(forces_sums):
    loop = Loop(width=64, num_layers=1)
    comm = Recording()
    loop.model.layers[0].set_custom_reduce_scatter(comm)
    loop.model.layers[0].set_force_sum_reduction_for_comms(forces_sums)
    loop.step()
    torch.cuda.synchronize()
    return comm.ops


def test_the_group_averages_unless_sums_are_forced():
    assert run_ranks(reductions_asked_for, 2, False, kind="nccl", timeout_seconds=120) == [{"average"}] * 2
    assert run_ranks(reductions_asked_for, 2, True, kind="nccl", timeout_seconds=120) == [{"sum"}] * 2


class FromAnywhere(torch.nn.Module):
    """Takes a tensor and a dict of them, from whatever device."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))

    def forward(self, x, *, more=None):
        assert x.device.type == "cuda"
        x = self.layers(x)
        return x if more is None else x + more["offset"]


def inputs_on_the_host(make):
    model: Any = seeded(FromAnywhere()).to("cuda")
    model = make(model)
    x, more = torch.randn(4, 6), {"offset": torch.randn(6)}
    assert torch.equal(model(x), model(x.to("cuda")))
    on_device = model(x.to("cuda"), more={"offset": more["offset"].to("cuda")})
    assert torch.equal(model(x, more=more), on_device)
    model(x, more=more).sum().backward()
    assert more["offset"].device.type == "cpu", "the caller's own dict must stay as it is"


def sharded(model):
    return fully_shard(model, wrap=torch.nn.Linear)


@pytest.mark.parametrize("make", [sharded, FullyShardedDataParallel])
def test_what_enters_a_model_is_moved_to_its_device(make):
    run_ranks(inputs_on_the_host, 1, make, kind="nccl", timeout_seconds=120)
