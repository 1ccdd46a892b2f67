"""Measures the host time that sharding adds to forward and backward: plain, torch's FSDP and shardwise in one run.

    python benchmarks/host_overhead.py                  # CPU, 24 tiny blocks, fake group of 8
    python benchmarks/host_overhead.py --device cuda    # the same model, wider, on a GPU
    python benchmarks/host_overhead.py --face wrapper   # FullyShardedDataParallel; the peer is FSDP1
    python benchmarks/host_overhead.py --group-bytes 200000    # beside it, blocks that share units of that size

The model is so small that host time dominates. torch's fake process group moves no data between ranks, so no
communication time is included; the cost of the group's own calls is measured and printed with the result. The
contenders take turns, round by round, in one process. In every round each sharded model also runs one untimed step
under `CommDebugMode`, which must issue the expected number of gathers and reduces. After every step, timed
or not, the full weights must have been freed and every parameter must have its sharded gradient.

The figure is (shardwise - plain) / (peer - plain), where the peer is FSDP2, or FSDP1 for the wrapper. It is computed
from the medians over all timed steps; the spread is that of the same figure round by round. It is given for wall-clock
time and for the CPU time of the process, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import RESULTS, Timing, expect, machine, summary
from models import Block, shard_blocks
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise

GATHER, REDUCE = "c10d._allgather_base_", "c10d._reduce_scatter_base_"


class Model(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.first = nn.Linear(args.width, args.width, bias=False)
        self.blocks = nn.ModuleList(Block(args.width, args.hidden, args.heads) for _ in range(args.blocks))
        self.last = nn.Linear(args.width, args.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Contender:
    """A model that takes timed steps; sharded models are checked between them."""

    def __init__(
        self, name: str, model: nn.Module, inputs: Tensor, num_units: int | None, full_numel: int
    ) -> None:
        self.name = name
        self.full_numel = full_numel
        self.model = model
        self.inputs = inputs
        self.num_units = num_units
        self.rounds: list[list[Timing]] = []
        self.weights: list[Tensor] = []

    def step(self) -> None:
        self.model(self.inputs).sum().backward()

    def time_step(self, wait: Callable[[], None]) -> Timing:
        self.model.zero_grad()
        wait()
        wall, cpu = time.perf_counter(), time.process_time()
        self.step()
        wait()
        timing = Timing(wall=1000 * (time.perf_counter() - wall), cpu=1000 * (time.process_time() - cpu))
        self.check_after_step()
        return timing

    def check_after_step(self) -> None:
        """Checks that the step did its work: weights are freed, and all gradients exist and are sharded."""
        numel = 0
        for param in self.model.parameters():
            # If a rank has no element of a parameter, torch's wrapper gives the parameter no gradient there.
            expect(param.grad is not None or not param.numel(), f"{self.name}: a parameter has no gradient")
            if param.grad is not None:
                local = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
                numel += local.numel()
        if self.num_units is not None:
            expect(numel < self.full_numel / 2, f"{self.name}: gradients are not sharded")
        for weight in self.weights:
            expect(weight.untyped_storage().size() == 0, f"{self.name}: a full weight was not freed")

    def check_counts(self) -> dict[str, dict[str, int]] | None:
        """Checks the collectives of one step under `CommDebugMode`, in the same process and on the same model."""
        if self.num_units is None:
            return None
        self.model.zero_grad()
        self.weights = []
        handles = [
            module.register_forward_pre_hook(lambda module, args: self.weights.append(module.weight))
            for module in self.model.modules()
            if isinstance(module, nn.Linear)
        ]
        with CommDebugMode() as forward:
            loss = self.model(self.inputs).sum()
        for handle in handles:
            handle.remove()
        expect(bool(self.weights), f"{self.name}: no weight was seen")
        # The root keeps its weights (the first and the last) for backward; those of the blocks must be free.
        for weight in self.weights[1:-1]:
            expect(
                weight.untyped_storage().size() == 0, f"{self.name}: a block's weight outlives its forward"
            )
        with CommDebugMode() as backward:
            loss.backward()
        counts = {
            label: {str(op): count for op, count in mode.get_comm_counts().items()}
            for label, mode in (("forward", forward), ("backward", backward))
        }
        units = self.num_units
        expected = {"forward": {GATHER: units}, "backward": {GATHER: units - 1, REDUCE: units}}
        if self.name != "FSDP1":  # FSDP1 issues other collectives
            expect(counts == expected, f"{self.name}: collectives {counts}, expected {expected}")
        self.check_after_step()
        return counts

    def times(self, clock: str) -> list[float]:
        return [getattr(timing, clock) for timings in self.rounds for timing in timings]

    def medians_by_round(self, clock: str) -> list[float]:
        return [statistics.median(getattr(timing, clock) for timing in timings) for timings in self.rounds]


def contenders(args: argparse.Namespace, device: torch.device) -> list[Contender]:
    dtype = {"own": None, "bf16": torch.bfloat16}[args.precision]
    reduce_dtype = torch.float32 if dtype else None
    inputs = torch.randn(1, args.tokens, args.width, device=device)
    torch.manual_seed(0)
    plain, peer, ours = (Model(args).to(device) for _ in range(3))
    full_numel = sum(param.numel() for param in plain.parameters())
    shard = {"fully_shard": in_place, "wrapper": wrapped}[args.face]
    peer, ours = shard(args, device, dtype, reduce_dtype, peer, ours)
    num_units = args.blocks + 1
    everyone = [
        Contender("plain", plain.to(dtype), inputs.to(dtype), None, full_numel),
        Contender(PEERS[args.face], peer, inputs, num_units, full_numel),
        Contender("shardwise", ours, inputs, num_units, full_numel),
    ]
    if args.group_bytes:
        torch.manual_seed(0)
        joined = Model(args).to(device)
        mesh = init_device_mesh(device.type, (args.world_size,))
        policy = shardwise.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
        shardwise.fully_shard(joined, wrap=Block, group_bytes=args.group_bytes, mesh=mesh, mp_policy=policy)
        per_unit = args.group_bytes // max(_bytes_of(block) for block in plain.blocks)
        everyone.append(Contender(JOINED, joined, inputs, -(-args.blocks // per_unit) + 1, full_numel))
    return everyone


def _bytes_of(block: nn.Module) -> int:
    return sum(param.numel() * 4 for param in block.parameters())


PEERS = {"fully_shard": "FSDP2", "wrapper": "FSDP1"}
JOINED = "joined"


def in_place(
    args: argparse.Namespace, device: torch.device, dtype: Any, reduce_dtype: Any, peer: Any, ours: Any
) -> tuple[nn.Module, nn.Module]:
    mesh = init_device_mesh(device.type, (args.world_size,))
    peer_policy = fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
    our_policy = shardwise.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
    shard_blocks(peer, fsdp.fully_shard, mesh=mesh, mp_policy=peer_policy)
    shard_blocks(ours, shardwise.fully_shard, mesh=mesh, mp_policy=our_policy)
    return peer, ours


def wrapped(
    args: argparse.Namespace, device: torch.device, dtype: Any, reduce_dtype: Any, peer: Any, ours: Any
) -> tuple[nn.Module, nn.Module]:
    # FSDP1 needs an explicit device on a CPU.
    options = {
        "device_id": device if device.type == "cpu" else torch.cuda.current_device(),
        "use_orig_params": args.use_orig_params,
    }
    return tuple(
        library.FullyShardedDataParallel(
            model,
            auto_wrap_policy=policies.ModuleWrapPolicy({Block}),
            mixed_precision=library.MixedPrecision(dtype, reduce_dtype) if dtype else None,
            **options,
        )
        for library, policies, model in ((fsdp, fsdp.wrap, peer), (shardwise, shardwise, ours))
    )


def group_cost_us(args: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Returns the host time of one call of the fake group alone, at the size of a block."""
    block = Block(args.width, args.hidden, args.heads)
    numel = sum(param.numel() for param in block.parameters()) // args.world_size * args.world_size
    full = torch.empty(numel, device=device)
    shard = torch.empty(numel // args.world_size, device=device)

    def median_us(call: Callable[[], object]) -> float:
        times = []
        for _ in range(200):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e6

    return {
        "all_gather": median_us(lambda: dist.all_gather_into_tensor(full, shard)),
        "reduce_scatter": median_us(lambda: dist.reduce_scatter_tensor(shard, full)),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(args.device)
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    dist.init_process_group("fake", rank=0, world_size=args.world_size, store=FakeStore())
    everyone = contenders(args, device)
    for contender in everyone:
        for _ in range(args.warmup):
            contender.time_step(wait)
    counts = {}
    for index in range(args.rounds):
        # Turns rotate, so that no contender always runs right after the same one.
        turn = index % len(everyone)
        for contender in everyone[turn:] + everyone[:turn]:
            found = contender.check_counts()
            if found:
                counts[contender.name] = found
            contender.rounds.append([contender.time_step(wait) for _ in range(args.iterations)])
    group = group_cost_us(args, device)
    dist.destroy_process_group()
    return report(args, everyone, counts, group)


def overhead(plain: float, peer: float, ours: float) -> float:
    return (ours - plain) / (peer - plain)


def report(
    args: argparse.Namespace, everyone: list[Contender], counts: dict[str, Any], group: dict[str, float]
) -> dict[str, Any]:
    # The part of each sharded model's time that is the group's own, not the implementation's.
    num_gathers, num_reduces = 2 * args.blocks + 1, args.blocks + 1
    group_ms = (num_gathers * group["all_gather"] + num_reduces * group["reduce_scatter"]) / 1000
    return {
        "benchmark": "host_overhead",
        "settings": {key: value for key, value in vars(args).items() if key != "output"},
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(args.device),
        "step_ms": {
            contender.name: {clock: summary(contender.times(clock)) for clock in Timing._fields}
            for contender in everyone
        },
        "collectives_a_step": counts,
        "fake_group_us_a_call": group,
        "fake_group_ms_a_step": group_ms,
        "overhead_ratio": {clock: ratios(everyone[:3], clock) for clock in Timing._fields},
        "overhead_ratio_joined": {
            clock: ratios([*everyone[:2], joined], clock)
            for joined in everyone[3:]
            for clock in Timing._fields
        },
    }


def ratios(everyone: list[Contender], clock: str) -> dict[str, Any]:
    """Returns the overhead of the third contender, where the first is plain and the second the peer."""
    by_round = zip(*(contender.medians_by_round(clock) for contender in everyone), strict=True)
    return {
        "of_medians": overhead(*(statistics.median(contender.times(clock)) for contender in everyone)),
        "of_minima": overhead(*(min(contender.times(clock)) for contender in everyone)),
        "by_round": sorted(overhead(*medians) for medians in by_round),
    }


def show(result: dict[str, Any]) -> None:
    for name, step in result["step_ms"].items():
        wall, cpu = step["wall"], step["cpu"]
        low, high = wall["quartiles"]
        print(
            f"{name:>10}: {wall['median']:8.2f} ms a step   (quartiles {low:.2f} to {high:.2f}; "
            f"CPU time {cpu['median']:.2f})"
        )
    group = result["fake_group_us_a_call"]
    print(
        f"fake group: {result['fake_group_ms_a_step']:8.2f} ms a step of both sharded models   "
        f"(all-gather {group['all_gather']:.0f} us, reduce-scatter {group['reduce_scatter']:.0f} us a call)"
    )
    peer = PEERS[result["settings"]["face"]]
    for name, ratios_of in (
        ("shardwise", result["overhead_ratio"]),
        (JOINED, result["overhead_ratio_joined"]),
    ):
        for clock, ratio in ratios_of.items():
            rounds = ratio["by_round"]
            print(
                f"({name} - plain) / ({peer} - plain) = {ratio['of_medians']:.3f} in {LABELS[clock]} time   "
                f"(rounds {rounds[0]:.3f} to {rounds[-1]:.3f}; of the fastest steps {ratio['of_minima']:.3f})"
            )


LABELS = {"wall": "wall-clock", "cpu": "CPU"}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--face", choices=["fully_shard", "wrapper"], default="fully_shard")
    parser.add_argument("--use-orig-params", action="store_true", help="of the wrapper, ours and torch's")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", choices=["own", "bf16"], help="default: own on the CPU, bf16 on a GPU")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, help="default: 32 on the CPU, 256 on a GPU")
    parser.add_argument("--tokens", type=int, help="default: 16 on the CPU, 256 on a GPU")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument(
        "--group-bytes", type=int, default=0, help="also shard a model whose units are groups of blocks"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--iterations", type=int, default=8, help="timed steps a contender and round")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument(
        "--output", "--out", type=Path, help="default: results/host_overhead_[wrapper_]DEVICE.json"
    )
    args = parser.parse_args(arguments)
    if args.group_bytes and args.face == "wrapper":
        parser.error("--group-bytes is a setting of fully_shard")
    on_gpu = args.device == "cuda"
    args.precision = args.precision or ("bf16" if on_gpu else "own")
    args.width = args.width or (256 if on_gpu else 32)
    args.tokens = args.tokens or (256 if on_gpu else 16)
    args.hidden = args.width * 11 // 4
    face = "wrapper_" if args.face == "wrapper" else ""
    args.output = args.output or RESULTS / f"host_overhead_{face}{args.device}.json"
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    torch.set_num_threads(1)
    # torch warns about its own names and FSDP2's hooks, which does not matter here.
    warnings.simplefilter("ignore")
    result = measure(args)
    show(result)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {os.path.relpath(args.output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
