"""Every wait between streams is needed: with it results are right whatever is slow, without it they are wrong.

A wait is named by the engine's function it stands in and by the method that makes it. Lanes are wrapped: one may be
*slow* (whatever is issued on it sleeps first), and the wrapper may be *deaf* to one wait. All numbers are small
integers, so right means equal. That the table names every wait is checked on the source, and needs no GPU; so is the
arithmetic of the scenarios, on a device where nothing can come too late.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    OffloadPolicy,
    fully_shard,
)
from shardwise.engine.unit.membership import units_of
from shardwise.testing import run_ranks

NUMEL = 1 << 18
# A few hundredths of a second, far longer than the host takes to issue a step; more where other work slows it down.
SLEEP_CYCLES = (50_000_000, 400_000_000, 3_200_000_000)
WEIGHTS = (
    1.0,
    2.0,
    3.0,
    4.0,
    5.0,
)  # of the root and its layers: no two alike, so that none can pass for another


class Site(NamedTuple):
    """Where a wait stands."""

    function: str
    method: str


class Delay:
    cycles = SLEEP_CYCLES[0]


def sleep() -> None:
    if torch.cuda.is_available():
        torch.cuda._sleep(Delay.cycles)


class LateLane:
    """A lane that may be slow, and deaf to one wait."""

    def __init__(self, stream: Any, name: str, streams: LateLanes) -> None:
        self._stream, self._name, self._streams = stream, name, streams
        self._is_entered = False

    def __enter__(self) -> None:
        self._stream.__enter__()
        self._is_entered = True
        self._dawdle()

    def __exit__(self, *exception: object) -> None:
        self._is_entered = False
        self._stream.__exit__(*exception)

    def _dawdle(self) -> None:
        if self._is_entered and self._name in self._streams.slow:
            sleep()

    def wait_compute(self) -> None:
        if self._streams.hears("wait_compute"):
            self._stream.wait_compute()

    def wait_event(self, event: Any) -> None:
        if self._streams.hears("wait_event"):
            self._stream.wait_event(event)

    def record_event(self) -> Any:
        event = self._stream.record_event()
        # Whoever waits for the mark has not waited for what comes behind it.
        self._dawdle()
        return event


class LateLanes:
    def __init__(self, streams: Any, deaf_to: Site | None) -> None:
        self._streams = streams
        self._deaf_to = deaf_to
        self.slow: set[str] = set()
        self.host_runs_ahead = streams.host_runs_ahead
        self.gather = LateLane(streams.gather, "gather", self)
        self.reduce = LateLane(streams.reduce, "reduce", self)
        self.replicate = LateLane(streams.replicate, "replicate", self)

    def hears(self, method: str) -> bool:
        return Site(sys._getframe(2).f_code.co_name, method) != self._deaf_to

    def record_compute(self) -> Any:
        return self._streams.record_compute()

    def compute_waits_for(self, event: Any) -> None:
        if self.hears("compute_waits_for"):
            self._streams.compute_waits_for(event)

    def host_waits_for(self, event: Any) -> None:
        if self.hears("host_waits_for"):
            self._streams.host_waits_for(event)


class Scale(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((NUMEL,), value))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Scale(WEIGHTS[0])
        self.layers = nn.ModuleList(Scale(value) for value in WEIGHTS[1:])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


class SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        sleep()
        return gradient.clone()


class Stage:
    """A sharded chain after one step, beside a plain one; memory of that step lies around with other values in it."""

    def __init__(
        self,
        deaf_to: Site | None,
        *,
        replicas: bool = False,
        offload: bool = False,
        exact: bool = False,
        own_rows: bool = False,
    ) -> None:
        self.on_cuda = torch.cuda.is_available()
        self.device = "cuda" if self.on_cuda else "cpu"
        self.model: Any = Chain().to(self.device)
        self.plain = Chain()
        world_size = dist.get_world_size()
        mesh = init_device_mesh(self.device, (world_size, 1) if replicas else (world_size,))
        policy = CPUOffloadPolicy() if offload else OffloadPolicy()
        for unit in (*self.model.layers, self.model):
            fully_shard(unit, mesh=mesh, offload_policy=policy, exact=exact)
        if own_rows:
            # More reduces at once: their rows cannot lie in the memory of parameters, which later gathers need.
            self.model.set_reduce_scatter_max_input_buffers(2)
        self.params = list(self.model.parameters())
        self.model(self.input(1.0)).sum().backward()
        self.model.zero_grad()
        self.finish()
        root = units_of(self.model)[0].root
        self.streams = LateLanes(root.streams, deaf_to)
        root.streams = self.streams

    def input(self, value: float, rank: int | None = None) -> Tensor:
        """Ranks differ."""
        rank = dist.get_rank() if rank is None else rank
        return torch.full((NUMEL,), value * (rank + 1), device=self.device)

    def double(self) -> None:
        with torch.no_grad():
            for param, expected in zip(self.params, self.plain.parameters(), strict=True):
                param.to_local().mul_(2)
                expected.mul_(2)

    def event(self) -> Any:
        event = torch.cuda.Event() if self.on_cuda else torch.Event("cpu")
        if self.on_cuda:
            event.record()
        return event

    def finish(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()

    def output(self, value: float) -> Tensor:
        return self.plain(self.input(value).cpu()).detach()

    def gradients(self, value: float) -> Tensor:
        """The averages over ranks, all parameters in a row."""
        world_size = dist.get_world_size()
        losses = [self.plain(self.input(value, rank).cpu()).sum() / world_size for rank in range(world_size)]
        return torch.cat(torch.autograd.grad(sum(losses), list(self.plain.parameters())))

    def read_gradients(self) -> Tensor:
        return torch.cat([param.grad.to_local() for param in self.params])


Outcome = tuple[Tensor, Tensor]


# --- one scenario a wait: returns what came out and what should have ------------------------------------------------


def gathers_arrive_late(deaf_to: Site | None) -> Outcome:
    stage = Stage(deaf_to)
    stage.double()
    stage.finish()
    stage.streams.slow = {"gather"}
    return stage.model(stage.input(3.0)), stage.output(3.0)


def optimizer_writes_late(deaf_to: Site | None) -> Outcome:
    stage = Stage(deaf_to)
    sleep()
    stage.double()
    return stage.model(stage.input(3.0)), stage.output(3.0)


def optimizer_writes_late_on_a_stream_of_its_own(deaf_to: Site | None) -> Outcome:
    stage = Stage(deaf_to)
    sleep()
    stage.double()
    stage.model.set_post_optim_event(stage.event())
    return stage.model(stage.input(3.0)), stage.output(3.0)


def weights_are_written_late_before_unshard(deaf_to: Site | None) -> Outcome:
    stage = Stage(deaf_to)
    sleep()
    stage.double()
    stage.model.layers[0].unshard()
    return stage.model.layers[0].weight.detach(), stage.plain.layers[0].weight.detach()


def weights_are_replaced_late(deaf_to: Site | None) -> Outcome:
    stage = Stage(deaf_to)
    stage.double()
    state = {name: value.clone() for name, value in stage.model.state_dict().items()}
    stage.model.load_state_dict(state, assign=True)
    # Not in the root's forward, whose beginning waits for all this; in that of the unit whose weights are replaced.
    stage.model.first.register_forward_hook(lambda module, args, output: sleep())
    return stage.model(stage.input(3.0)), stage.output(3.0)


def compute_uses_weights_late(deaf_to: Site | None) -> Outcome:
    stage = Stage(deaf_to)
    stage.model.layers[0].register_forward_pre_hook(lambda module, args: sleep())
    return stage.model(stage.input(3.0)), stage.output(3.0)


def weights_reach_the_device_late_in_eval(deaf_to: Site | None) -> Outcome:
    stage = Stage(deaf_to, offload=True)
    stage.streams.slow = {"gather"}
    expected = stage.output(3.0)
    with torch.no_grad():
        output = stage.model(stage.input(3.0))
    stage.double()
    return output, expected


def backward_computes_late(deaf_to: Site | None) -> Outcome:
    stage = Stage(deaf_to)
    SleepInBackward.apply(stage.model(stage.input(3.0))).sum().backward()
    return stage.read_gradients(), stage.gradients(3.0)


def reduces_run_late(deaf_to: Site | None) -> Outcome:
    stage = Stage(deaf_to)
    stage.streams.slow = {"reduce"}
    stage.model(stage.input(3.0)).sum().backward()
    return stage.read_gradients(), stage.gradients(3.0)


def reduces_of_rows_with_their_own_memory_run_late(deaf_to: Site | None) -> Outcome:
    stage = Stage(deaf_to, own_rows=True)
    stage.streams.slow = {"reduce"}
    stage.model(stage.input(3.0)).sum().backward()
    return stage.read_gradients(), stage.gradients(3.0)


def a_backward_raises_while_reduces_run(deaf_to: Site | None) -> Outcome:
    """Gradients that were given out are dropped, and their memory used again, while reduces still write there."""
    stage = Stage(deaf_to)
    stage.streams.slow = {"reduce"}

    def fail(module: Any, gradients: Any) -> None:
        raise ValueError("planned")

    # In the root, the last unit: reduces of the others are under way.
    stage.model.first.register_full_backward_pre_hook(fail)
    loss = stage.model(stage.input(3.0)).sum()
    with pytest.raises(ValueError, match="planned"):
        loss.backward()
    stage.model.zero_grad()
    tensors = [stage.input(7.0, 0) for _ in range(4 * len(WEIGHTS))]
    stage.finish()
    used = torch.stack(tensors)
    return used, torch.full_like(used, 7.0)


def gradients_are_added_late(deaf_to: Site | None) -> Outcome:
    stage = Stage(deaf_to)
    stage.model(stage.input(3.0)).sum().backward()
    stage.streams.slow = {"reduce"}
    stage.model(stage.input(5.0)).sum().backward()
    return stage.read_gradients(), stage.gradients(3.0) + stage.gradients(5.0)


def shard_sums_arrive_late(deaf_to: Site | None) -> Outcome:
    stage = Stage(deaf_to, replicas=True)
    stage.streams.slow = {"reduce"}
    stage.model(stage.input(3.0)).sum().backward()
    return stage.read_gradients(), stage.gradients(3.0)


def replica_sums_arrive_late(deaf_to: Site | None) -> Outcome:
    stage = Stage(deaf_to, replicas=True)
    stage.streams.slow = {"replicate"}
    stage.model(stage.input(3.0)).sum().backward()
    return stage.read_gradients(), stage.gradients(3.0)


def optimizer_in_a_hook_writes_late(deaf_to: Site | None) -> Outcome:
    stage = Stage(deaf_to)

    def step(param: Any) -> None:
        sleep()
        with torch.no_grad():
            param.to_local().mul_(2)

    for param in stage.params:
        param.register_post_accumulate_grad_hook(step)
    event = stage.event()
    stage.model(stage.input(1.0)).sum().backward()
    with torch.no_grad():
        for expected in stage.plain.parameters():
            expected.mul_(2)
    # The gathers wait for an event that does not know of the hooks.
    stage.model.set_post_optim_event(event)
    return stage.model(stage.input(3.0)), stage.output(3.0)


def a_hook_uses_gradients_late_and_drops_them(deaf_to: Site | None) -> Outcome:
    # Rows with memory of their own are what compute allocates where those gradients were.
    stage = Stage(deaf_to, own_rows=True)
    expected = torch.cat([param.detach() for param in stage.plain.parameters()]) + stage.gradients(3.0)

    def step(param: Any) -> None:
        sleep()
        with torch.no_grad():
            param.to_local().add_(param.grad.to_local())
        param.grad = None

    for param in stage.params:
        param.register_post_accumulate_grad_hook(step)
    stage.model(stage.input(3.0)).sum().backward()
    return torch.cat([param.to_local() for param in stage.params]), expected


def gradients_reach_the_host_late(deaf_to: Site | None) -> Outcome:
    stage = Stage(deaf_to, offload=True)
    stage.streams.slow = {"reduce"}
    stage.model(stage.input(3.0)).sum().backward()
    return stage.read_gradients(), stage.gradients(3.0)


def gradients_reach_the_hosts_hooks_late(deaf_to: Site | None) -> Outcome:
    stage = Stage(deaf_to, offload=True)
    seen: dict[int, Tensor] = {}
    for param in stage.params:
        param.register_post_accumulate_grad_hook(lambda p: seen.update({id(p): p.grad.to_local().clone()}))
    stage.streams.slow = {"reduce"}
    stage.model(stage.input(3.0)).sum().backward()
    return torch.cat([seen[id(param)] for param in stage.params]), stage.gradients(3.0)


def gradients_reach_the_hosts_tensor_hooks_late(deaf_to: Site | None) -> Outcome:
    stage = Stage(deaf_to, offload=True)
    for param in stage.params:
        param.register_hook(lambda gradient: gradient.clone())
    stage.streams.slow = {"reduce"}
    stage.model(stage.input(3.0)).sum().backward()
    return stage.read_gradients(), stage.gradients(3.0)


def gradients_reach_the_hosts_sum_late(deaf_to: Site | None) -> Outcome:
    stage = Stage(deaf_to, offload=True)
    stage.streams.slow = {"reduce"}
    for value in (3.0, 5.0):
        stage.model(stage.input(value)).sum().backward()
    return stage.read_gradients(), stage.gradients(3.0) + stage.gradients(5.0)


def exact_gradients_reach_the_hosts_sum_late(deaf_to: Site | None) -> Outcome:
    """Gradients that somebody wrote to are added to on the host."""
    stage = Stage(deaf_to, offload=True, exact=True)
    stage.model(stage.input(3.0)).sum().backward()
    stage.finish()
    for param in stage.params:
        param.grad.to_local().mul_(2)
    stage.streams.slow = {"reduce"}
    stage.model(stage.input(5.0)).sum().backward()
    return stage.read_gradients(), 2 * stage.gradients(3.0) + stage.gradients(5.0)


def summoned_weight(deaf_to: Site | None, *, slow: set[str], writes_late: bool) -> Outcome:
    """The whole weight of a wrapped module, after its shard was doubled."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = FullyShardedDataParallel(Scale(3.0).to(device))
    root = units_of(model)[0].root
    root.streams = streams = LateLanes(root.streams, deaf_to)
    if writes_late:
        sleep()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    if not writes_late and torch.cuda.is_available():
        torch.cuda.synchronize()
    streams.slow = slow
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return model.module.weight.detach().clone(), torch.full((NUMEL,), 6.0)


def shards_are_written_late_before_a_summon(deaf_to: Site | None) -> Outcome:
    return summoned_weight(deaf_to, slow=set(), writes_late=True)


def summoned_weights_arrive_late(deaf_to: Site | None) -> Outcome:
    return summoned_weight(deaf_to, slow={"gather"}, writes_late=False)


class Wait(NamedTuple):
    site: Site
    scenario: Callable[[Site | None], Outcome]
    world_size: int = 1


WAITS = {
    "weights arrive before compute reads them": Wait(
        Site("wait_gather", "compute_waits_for"), gathers_arrive_late
    ),
    "the optimizer writes before a step gathers": Wait(
        Site("begin_forward", "wait_compute"), optimizer_writes_late
    ),
    "the optimizer's event comes before a step gathers": Wait(
        Site("begin_forward", "wait_event"), optimizer_writes_late_on_a_stream_of_its_own
    ),
    "weights are written before unshard gathers": Wait(
        Site("make_room", "wait_compute"), weights_are_written_late_before_unshard
    ),
    "replaced weights are in the unit's buffer before it is gathered": Wait(
        Site("catch_up", "wait_compute"), weights_are_replaced_late
    ),
    "compute leaves weights before their memory is gathered into": Wait(
        Site("_reclaim", "wait_event"), compute_uses_weights_late
    ),
    "an eval's transfers are done before the host writes shards": Wait(
        Site("end_forward", "host_waits_for"), weights_reach_the_device_late_in_eval
    ),
    "gradients are computed before they are reduced": Wait(
        Site("issue", "wait_compute"), backward_computes_late
    ),
    "rows are reduced before their memory is reused": Wait(
        Site("_return_to_compute", "compute_waits_for"), reduces_of_rows_with_their_own_memory_run_late
    ),
    "rows are reduced before what they lie in is gathered into": Wait(
        Site("return_memory", "wait_event"), reduces_run_late
    ),
    "gradients are complete before users may drop them": Wait(
        Site("finish", "compute_waits_for"), a_backward_raises_while_reduces_run
    ),
    "gradients are added before what follows backward": Wait(
        Site("end_backward", "compute_waits_for"), gradients_are_added_late
    ),
    "shards are summed before replicas": Wait(
        Site("_receive_own_row", "wait_event"), shard_sums_arrive_late, 2
    ),
    "replicas are summed before gradients are given out": Wait(
        Site("_receive_replicas", "wait_event"), replica_sums_arrive_late, 2
    ),
    "an optimizer in a hook writes before later gathers": Wait(
        Site("_run_hooks", "wait_event"), optimizer_in_a_hook_writes_late
    ),
    "a hook is through with gradients before their memory is reused": Wait(
        Site("_run_hooks", "compute_waits_for"), a_hook_uses_gradients_late_and_drops_them
    ),
    "gradients are on the host before backward returns": Wait(
        Site("end_backward", "host_waits_for"), gradients_reach_the_host_late
    ),
    "gradients are on the host before hooks read them": Wait(
        Site("_run_hooks", "host_waits_for"), gradients_reach_the_hosts_hooks_late
    ),
    "gradients are on the host before hooks change them": Wait(
        Site("_assign_through_hooks", "host_waits_for"), gradients_reach_the_hosts_tensor_hooks_late
    ),
    "gradients are on the host before it adds them": Wait(
        Site("_add_to_existing", "host_waits_for"), gradients_reach_the_hosts_sum_late
    ),
    "exact sums are on the host before it adds them": Wait(
        Site("_with_base", "host_waits_for"), exact_gradients_reach_the_hosts_sum_late
    ),
    "shards are written before wholes are gathered": Wait(
        Site("gather_segment", "wait_compute"), shards_are_written_late_before_a_summon
    ),
    "wholes arrive before they are read": Wait(
        Site("gather_segment", "compute_waits_for"), summoned_weights_arrive_late
    ),
}


def is_right(outcome: Outcome) -> bool:
    got, want = (value.detach().cpu() for value in outcome)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # before the model's memory goes
    return got.dtype == want.dtype and torch.equal(got, want)


def with_and_without(name: str, cycles: int) -> tuple[bool, bool]:
    wait, Delay.cycles = WAITS[name], cycles
    return is_right(wait.scenario(None)), is_right(wait.scenario(wait.site))


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", WAITS)
def test_results_are_right_with_the_wait_and_wrong_without_it(name):
    for cycles in SLEEP_CYCLES:
        outcomes = run_ranks(
            with_and_without, WAITS[name].world_size, name, cycles, kind="nccl", timeout_seconds=120
        )
        assert all(right for right, _ in outcomes), "wrong with all waits in place"
        if not all(right for _, right in outcomes):
            return
    pytest.fail("right without the wait: nothing shows that it is needed")


# --- a user's stream for the all-reduce hook --------------------------------------------------------------------------


def hook_on_a_stream(deaf: str | None) -> Outcome:
    """The hook doubles the row, on a stream that may be deaf, or unheard."""
    plain_stream: Any = torch.cuda.Stream

    class Stream(plain_stream):
        def wait_stream(self, other: Any) -> None:
            if deaf != "hook":
                super().wait_stream(other)

        def record_event(self, event: Any = None) -> Any:
            # An event that was never recorded holds nobody up.
            return torch.cuda.Event() if deaf == "lane" else super().record_event(event)

    stage = Stage(None)
    stream = Stream()

    def double(row: Tensor) -> None:
        sleep()
        row.mul_(2)

    for module in (stage.model, *stage.model.layers):
        module.set_all_reduce_hook(row_doubled if deaf == "hook" else double, stream=stream)
    if deaf == "hook":
        stage.streams.slow = {"reduce"}
    stage.model(stage.input(3.0)).sum().backward()
    return stage.read_gradients(), 2 * stage.gradients(3.0)


def row_doubled(row: Tensor) -> None:
    row.mul_(2)


def hook_streams(deaf: str, cycles: int) -> tuple[bool, bool]:
    Delay.cycles = cycles
    return is_right(hook_on_a_stream(None)), is_right(hook_on_a_stream(deaf))


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("deaf", ["hook", "lane"])
def test_an_all_reduce_hook_on_a_stream_of_its_own_waits_and_is_waited_for(deaf):
    for cycles in SLEEP_CYCLES:
        ((right, right_if_deaf),) = run_ranks(hook_streams, 1, deaf, cycles, kind="nccl", timeout_seconds=120)
        assert right, "wrong with both waits in place"
        if not right_if_deaf:
            return
    pytest.fail("right without the wait: nothing shows that it is needed")


# --- what needs no GPU ------------------------------------------------------------------------------------------------

METHODS = ("wait_compute", "compute_waits_for", "host_waits_for", "wait_stream", "wait_event")
ENGINE = Path(__file__).parents[2] / "shardwise" / "engine"


def waits_in(source: str) -> Counter[Site]:
    found: Counter[Site] = Counter()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            method = getattr(node.func, "attr", None) if isinstance(node, ast.Call) else None
            if method in METHODS:
                found[Site(function.name, method)] += 1
    return found


def test_every_wait_in_the_engine_has_its_test():
    found: Counter[Site] = Counter()
    for path in ENGINE.rglob("*.py"):
        found.update(waits_in(path.read_text()))
    tested = Counter(wait.site for wait in WAITS.values())
    tested[Site("_run_all_reduce_hook", "wait_stream")] = 2
    tested[Site("join_streams", "compute_waits_for")] = 1  # in test_capture_gpu.py
    assert found == tested


def test_a_wait_without_a_test_is_noticed():
    assert waits_in("def f(stream):\n    stream.wait_compute()\n") == {Site("f", "wait_compute"): 1}


def scenarios_for(world_size: int) -> list[str]:
    """The names of those that come out wrong."""
    chosen = {name: wait for name, wait in WAITS.items() if wait.world_size == world_size}
    return [name for name, wait in chosen.items() if not is_right(wait.scenario(None))]


@pytest.mark.skipif(torch.cuda.is_available(), reason="scenarios run with delays here")
@pytest.mark.parametrize("world_size", [1, 2])
def test_scenarios_come_out_right_where_nothing_can_be_late(world_size):
    assert run_ranks(scenarios_for, world_size, world_size, kind="gloo") == [[]] * world_size
