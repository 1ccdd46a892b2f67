"""Captured steps: bitwise the steps as they run by themselves, and what happens around them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from shardwise.testing import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
STEPS = 8


class Net(nn.Module):
    def __init__(self, checkpoints: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(12, 33)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(33, 40), nn.GELU(), nn.Linear(40, 33)) for _ in range(3)
        )
        self.last = nn.Linear(33, 5)
        self.checkpoints = checkpoints
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x))
            x = functional.dropout(x, self.dropout)
        return self.last(x)


def sharded(net: Net, **options: Any) -> Net:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def plainly(net: Net) -> nn.Module:
    return sharded(net)


def in_bf16(net: Net) -> nn.Module:
    return sharded(net, mp_policy=BF16)


def keeping(net: Net) -> nn.Module:
    return sharded(net, reshard_after_forward=False)


def gathering_ahead_in_vain(net: Net) -> nn.Module:
    model = sharded(net)
    # The last gather of a backward, and nobody waits for it.
    net.blocks[0].set_modules_to_backward_prefetch([net.blocks[2]])
    return model


def compiled(net: Net) -> nn.Module:
    for block in net.blocks:
        block.compile()
    return sharded(net)


def wrapped(net: Net) -> nn.Module:
    net.blocks = nn.ModuleList(FullyShardedDataParallel(block, use_orig_params=True) for block in net.blocks)
    return FullyShardedDataParallel(net, use_orig_params=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(1e-2, device="cuda"), capturable=True, fused=True
    )


def adam_by_foreach(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(
        model.parameters(), lr=torch.tensor(1e-2, device="cuda"), capturable=True, foreach=True
    )


def flat_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return shardwise.optim.flat(
        model, torch.optim.AdamW, lr=torch.tensor(1e-2, device="cuda"), capturable=True, fused=True
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


class Run:
    """A model, its optimizer, and a step over ``micro_batches``."""

    def __init__(
        self,
        shard: Callable[[Net], nn.Module],
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        micro_batches: int = 1,
        max_norm: float | None = None,
        zeroes_first: bool = False,
        **net_options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = shard(Net(**net_options).cuda())
        self.optimizer = make_optimizer(self.model)
        self.micro_batches = micro_batches
        self.max_norm = max_norm
        self.zeroes_first = zeroes_first

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        if self.zeroes_first:
            self.optimizer.zero_grad()
        total = torch.zeros((), device=x.device)
        for part, target in zip(x.chunk(self.micro_batches), y.chunk(self.micro_batches), strict=True):
            loss = functional.cross_entropy(self.model(part).float(), target)
            loss.backward()
            total = total + loss.detach()
        if self.max_norm is not None:
            shardwise.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        if not self.zeroes_first:
            self.optimizer.zero_grad()
        return total

    def values(self) -> list[Tensor]:
        states = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        return [_local(tensor).clone() for tensor in (*self.model.parameters(), *states)]


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def batches(num: int = STEPS, rows: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(dist.get_rank() + 1)
    return [
        (
            torch.randn(rows, 12, generator=generator).cuda(),
            torch.randint(5, (rows,), generator=generator).cuda(),
        )
        for _ in range(num)
    ]


def scatter_over_pinned_memory() -> None:
    """Overwrites whatever page-locked host memory is free: packing takes arguments from there, which a graph keeps."""
    junk = [
        torch.full((16 << power,), 77, dtype=torch.uint8, pin_memory=True)
        for power in range(15)
        for _ in range(8)
    ]
    del junk


def differences(label: str, ours: list[Tensor], theirs: list[Tensor]) -> list[str]:
    same = len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    return [] if same else [label]


CASES: dict[str, dict[str, Any]] = {
    "fp32": {"shard": plainly},
    "bf16": {"shard": in_bf16, "max_norm": 0.1},
    "kept after forward": {"shard": keeping},
    "micro-batches, gradients zeroed first": {"shard": plainly, "micro_batches": 3, "zeroes_first": True},
    "checkpointed": {"shard": in_bf16, "checkpoints": True},
    "dropout": {"shard": plainly, "dropout": 0.2},
    "flat optimizer": {"shard": in_bf16, "make_optimizer": flat_adamw, "max_norm": 0.1},
    "foreach": {"shard": plainly, "make_optimizer": adam_by_foreach},
    "rates from the host": {"shard": plainly, "make_optimizer": sgd},
    "gathered ahead in vain": {"shard": gathering_ahead_in_vain},
    "wrapper": {"shard": wrapped},
    "compiled": {"shard": compiled},
}


def captured_and_not(names: list[str]) -> list[str]:
    wrong = []
    for name in names:
        eager, recorded = Run(**CASES[name]), Run(**CASES[name])
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*is not captured.*")
            step = shardwise.capture(recorded.step, *batches(1)[0])
            losses = []
            for number, call in enumerate((eager.step, step)):
                torch.manual_seed(7)
                losses.append([])
                for x, y in batches():
                    losses[number].append(call(x, y))
                    scatter_over_pinned_memory()
        if not step.is_captured:
            wrong.append(f"{name}: was not captured")
        wrong += differences(f"{name}: losses", losses[0], losses[1])
        wrong += differences(f"{name}: parameters and state", eager.values(), recorded.values())
    return wrong


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_captured_step_is_bitwise_the_step_itself(world_size: int) -> None:
    names = [name for name in CASES if world_size == 1 or name != "compiled"]
    wrong = run_ranks(captured_and_not, world_size, names, kind="nccl", timeout_seconds=140)
    assert not any(wrong), wrong


def two_captured_models() -> list[str]:
    """A graph is replayed after another model was made, trained as it is, and captured; memory is handed back."""
    wrong, runs = [], []
    for case in ({"shard": in_bf16, "make_optimizer": flat_adamw}, {"shard": plainly}):
        eager, recorded = Run(**case), Run(**case)
        runs.append((eager, recorded, shardwise.capture(recorded.step, *batches(1)[0])))
        for _, _, step in runs:
            for x, y in batches():
                step(x, y)
        for one, _, _ in runs:
            for x, y in batches():
                one.step(x, y)
        scatter_over_pinned_memory()
        torch.cuda.empty_cache()
    for number, (eager, recorded, step) in enumerate(runs):
        wrong += [] if step.is_captured else [f"model {number} was not captured"]
        wrong += differences(f"model {number}", eager.values(), recorded.values())
    return wrong


def test_captured_models_do_not_disturb_one_another() -> None:
    (wrong,) = run_ranks(two_captured_models, 1, kind="nccl", timeout_seconds=100)
    assert not wrong


def capture_without_the_join() -> str | None:
    run = Run(gathering_ahead_in_vain)
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr("shardwise.training_step.cuda_graph.join_streams", lambda root: None)
        step = shardwise.capture(run.step, *batches(1)[0])
        for x, y in batches():
            step(x, y)
    return step.reason


def test_a_capture_must_wait_for_gathers_that_nobody_waited_for() -> None:
    (reason,) = run_ranks(capture_without_the_join, 1, kind="nccl", timeout_seconds=60)
    assert reason is not None
    assert "unjoined" in reason


def around_a_captured_step() -> list[str]:
    """Eval, odd batches, learning rates, options and loaded parameters between captured steps, as without capture."""
    wrong = []
    eager, recorded = Run(plainly, zeroes_first=True), Run(plainly, zeroes_first=True)
    step = shardwise.capture(recorded.step, *batches(1)[0])
    seen: dict[str, list[Tensor]] = {"eager": [], "captured": []}
    for label, run, call in (("eager", eager, eager.step), ("captured", recorded, step)):
        losses = seen[label]
        scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9)
        for number, (x, y) in enumerate(batches(16)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if number == 6:
                    losses.append(call(x[:4], y[:4]))
                losses.append(call(x, y))
            scheduler.step()
            if number == 7:
                with torch.no_grad():
                    losses.append(run.model(x).sum())
                run.optimizer.param_groups[0]["weight_decay"] = 0.3
            if number == 10:
                # As a number it would be a double here, and a float32 in the tensor that replays read.
                run.optimizer.param_groups[0]["lr"] = torch.tensor(0.005).cuda() if run is eager else 0.005
            if number == 12:
                state = {name: value.clone() for name, value in run.model.state_dict().items()}
                run.model.load_state_dict(state, assign=True)
                run.optimizer.param_groups[0]["params"] = list(run.model.parameters())
            losses += [
                _local(param.grad).clone() for param in run.model.parameters() if param.grad is not None
            ]
    for number, (one, other) in enumerate(zip(seen["eager"], seen["captured"], strict=True)):
        if not torch.equal(one, other):
            wrong.append(
                f"value {number} of {len(seen['eager'])}: {(one - other).abs().max()} apart at {one.abs().max()}"
            )
    if step.reason is not None:
        wrong.append(step.reason)
    return [*wrong[:6], f"{len(wrong)} in all"] if wrong else []


def test_what_happens_between_captured_steps_is_seen_by_them() -> None:
    (wrong,) = run_ranks(around_a_captured_step, 1, kind="nccl", timeout_seconds=100)
    assert not wrong


def refusals() -> tuple[list[str | None], list[str]]:
    """Why steps are not captured, and what is wrong after them."""
    reasons, wrong = [], []

    def reads_on_the_host(run: Run) -> Callable[..., Any]:
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = run.step(x, y)
            assert loss.item() > 0
            return loss

        return step

    def waits_for_the_device(run: Run) -> Callable[..., Any]:
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = run.step(x, y)
            torch.cuda.current_stream().synchronize()
            return loss

        return step

    offloaded = Run(lambda net: sharded(net, offload_policy=CPUOffloadPolicy()), make_optimizer=sgd)
    looking, waiting = Run(plainly), Run(plainly)
    for run, step in (
        (offloaded, offloaded.step),
        (looking, reads_on_the_host(looking)),
        (waiting, waits_for_the_device(waiting)),
    ):
        twin = Run(plainly) if run is not offloaded else None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            captured = shardwise.capture(step, *batches(1)[0])
            for x, y in batches():
                loss = captured(x, y)
                if twin is not None and not torch.equal(loss, twin.step(x, y)):
                    wrong.append("the loss after it could not be captured")
        if sum("is not captured" in str(warning.message) for warning in caught) != 1:
            wrong.append(f"reported {len(caught)} times")
        reasons.append(captured.reason)
        wrong += disturbed()
    return reasons, wrong


def disturbed() -> list[str]:
    """What a capture that failed has left behind in torch."""
    found = []
    if torch.cuda.current_stream() != torch.cuda.default_stream():
        found.append("the current stream")
    try:
        torch.rand(1, device="cuda")
    except RuntimeError as error:
        found.append(f"random numbers: {error}")
    return found


def test_a_step_that_cannot_be_captured_says_why_and_goes_on() -> None:
    (((offload, looking, waiting), wrong),) = run_ranks(refusals, 1, kind="nccl", timeout_seconds=100)
    assert wrong == []
    assert "live on the host" in str(offload)
    for reason in (looking, waiting):
        assert "captur" in str(reason)
        assert "test_capture_gpu.py, line" in str(reason)
