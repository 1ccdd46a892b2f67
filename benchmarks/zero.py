"""Times the optimizer step of torch's ZeroRedundancyOptimizer and of ours, in one run.

    python benchmarks/zero.py                       # gloo, 2 and 4 ranks
    python benchmarks/zero.py --backend nccl        # the same on GPUs; ranks may share one

Contenders take turns, step by step, on copies of one model with the same gradients; each step begins after a
barrier. A step's time is that of its slowest rank; its CPU time is that of all ranks together, including the
transport's threads, and is disturbed less by other work on the machine. Bytes sent are what the loopback
interface counted during a few steps of one contender: the minimum of several rounds, since other programs use
that interface too. State is the size of the local optimizer's state, on the rank with the most.

`local step alone` is one rank's part of the unsharded optimizer, stepped as torch steps it, with nothing sent. `floor`
is its fraction of torch's step: what would remain of that if communication cost nothing. Ours can be below the floor
where it steps large parameters block by block and, with views, small ones together.

After every round all contenders must have the parameters of an unsharded optimizer: bitwise where parameters are
stepped whole, up to rounding where they are split, since kernels process the ends of tensors with other instructions.

Models: `even` has layers of one size. `embedding` is a small transformer that is mostly vocabulary, so that whole
parameters cannot be distributed evenly. `small` has very many small layers. Both optimizers use AdamW, once with
torch's default kernels, which take most of the step on a CPU, and once with its fused ones.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import RESULTS, adamw_room, loopback_bytes
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

from shardwise.testing import run_ranks
from shardwise.zero import ZeroRedundancyOptimizer as OurZero

LR = 1e-3
CONTENDERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "torch": (TorchZero, {}),
    "torch, views": (TorchZero, {"parameters_as_bucket_view": True}),
    "ours": (OurZero, {}),
    "ours, views": (OurZero, {"parameters_as_bucket_view": True}),
    "ours, balanced": (OurZero, {"balanced": True}),
    "ours, balanced, views": (OurZero, {"balanced": True, "parameters_as_bucket_view": True}),
}
LOCAL = "local step alone"
# Each of ours with torch's that has the same setting for views.
PAIRS = {
    name: "torch, views" if "views" in name else "torch" for name in CONTENDERS if name.startswith("ours")
}


def even() -> nn.Module:
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(24)))


def embedding() -> nn.Module:
    block = [
        nn.Linear(256, 768),
        nn.Linear(256, 256),
        nn.Linear(256, 1024),
        nn.Linear(1024, 256),
        nn.LayerNorm(256),
    ]
    return nn.ModuleList([nn.Embedding(16384, 256), *copy.deepcopy(block * 4)])


def small() -> nn.Module:
    return nn.Sequential(*(nn.Linear(48, 48) for _ in range(150)))


OPTIMIZERS: dict[str, dict[str, Any]] = {"AdamW": {}, "fused AdamW": {"fused": True}}
MODELS: dict[str, Callable[[], nn.Module]] = {"even": even, "embedding": embedding, "small": small}


def measure(model_name: str, optimizer_name: str, rounds: int, steps: int) -> dict[str, Any]:
    """Runs all contenders on one rank and returns what it measured."""
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)
    base = MODELS[model_name]().to(device)
    reference = copy.deepcopy(base)
    kernels = OPTIMIZERS[optimizer_name]
    unsharded = torch.optim.AdamW(reference.parameters(), lr=LR, **kernels)
    models = {name: copy.deepcopy(base) for name in CONTENDERS}
    optimizers: dict[str, Any] = {
        name: make(models[name].parameters(), optimizer_class=torch.optim.AdamW, lr=LR, **kernels, **options)
        for name, (make, options) in CONTENDERS.items()
    }
    for params in zip(*(model.parameters() for model in (reference, *models.values())), strict=True):
        grad = torch.randn_like(params[0])
        for param in params:
            param.grad = grad.clone()
    optimizers[LOCAL] = local_share(optimizers["ours"], kernels)

    seconds: dict[str, list[list[float]]] = {name: [] for name in optimizers}
    cpu_seconds: dict[str, list[list[float]]] = {name: [] for name in optimizers}
    wire_bytes: dict[str, list[float]] = {name: [] for name in optimizers}
    tolerance = [torch.zeros_like(param) for param in reference.parameters()]
    for number in range(rounds + 1):
        warm_up = number == 0
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in optimizers}
        for _ in range(steps):
            for name, optimizer in optimizers.items():
                times[name].append(timed(optimizer.step, on_gpu))
        for name, optimizer in optimizers.items():
            dist.barrier()
            before = loopback_bytes()
            for _ in range(steps):
                optimizer.step()
            dist.barrier()
            if not warm_up:
                wire_bytes[name].append((loopback_bytes() - before) / steps)
                seconds[name].append([wall for wall, _ in times[name]])
                cpu_seconds[name].append([cpu for _, cpu in times[name]])
        for _ in range(2 * steps):
            step_reference(unsharded, reference, tolerance)
        for name, model in models.items():
            assert_parity(name, model, reference, tolerance)
    return {
        name: {
            "seconds": seconds[name],
            "cpu_seconds": cpu_seconds[name],
            "wire_bytes": wire_bytes[name],
            "state_bytes": state_bytes(getattr(optimizer, "optim", optimizer)),
            "total_state_bytes": state_bytes(unsharded),
        }
        for name, optimizer in optimizers.items()
    }


def local_share(ours: OurZero, kernels: dict[str, Any]) -> torch.optim.Optimizer:
    """Returns a separate optimizer for copies of what this rank owns."""
    copies = []
    for owned in ours.optim.param_groups[0]["params"]:
        copies.append(owned.detach().clone().requires_grad_())
        copies[-1].grad = owned.grad.clone()
    return torch.optim.AdamW([{"params": copies}], lr=LR, **kernels)


def timed(step: Callable[[], object], on_gpu: bool) -> tuple[float, float]:
    """Returns the wall-clock time of a step, and the CPU time until all ranks have finished it."""
    dist.barrier()
    if on_gpu:
        torch.cuda.synchronize()
    start, cpu_start = time.perf_counter(), time.process_time()
    step()
    if on_gpu:
        torch.cuda.synchronize()
    wall = time.perf_counter() - start
    dist.barrier()
    return wall, time.process_time() - cpu_start


def step_reference(unsharded: torch.optim.Optimizer, reference: nn.Module, tolerance: list[Tensor]) -> None:
    """Steps the unsharded optimizer, and adds to `tolerance` how much more each element may differ by rounding."""
    before = [param.detach().abs() for param in reference.parameters()]
    unsharded.step()
    for param, was, allowed in zip(reference.parameters(), before, tolerance, strict=True):
        step = int(unsharded.state[param]["step"])
        allowed += adamw_room(step, LR, torch.maximum(was, param.detach().abs()))


def assert_parity(name: str, model: nn.Module, reference: nn.Module, tolerance: list[Tensor]) -> None:
    for ours, theirs, allowed in zip(model.parameters(), reference.parameters(), tolerance, strict=True):
        if "balanced" in name:
            assert ((ours - theirs).abs() <= allowed).all(), f"{name} has left the unsharded optimizer"
        else:
            assert torch.equal(ours, theirs), f"{name} has left the unsharded optimizer"


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.numel() * value.element_size()
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, Tensor)
    )


def summary(by_rank: list[dict[str, Any]], world: int) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for name in by_rank[0]:
        wall = over_ranks(max, [rank[name]["seconds"] for rank in by_rank])
        cpu = over_ranks(sum, [rank[name]["cpu_seconds"] for rank in by_rank])
        quartiles = statistics.quantiles(flat(wall), n=4)
        total = by_rank[0][name]["total_state_bytes"]
        state = [rank[name]["state_bytes"] for rank in by_rank]
        report[name] = {
            "step_ms": round(1e3 * statistics.median(flat(wall)), 3),
            "step_ms_quartiles": [round(1e3 * quartiles[0], 3), round(1e3 * quartiles[2], 3)],
            "step_ms_by_round": [round(1e3 * statistics.median(of_round), 3) for of_round in wall],
            "cpu_ms": round(1e3 * statistics.median(flat(cpu)), 3),
            "wire_bytes_a_step": round(min(by_rank[0][name]["wire_bytes"])),
            "state_bytes_by_rank": state,
            "largest_state_over_fair_share": round(max(state) * world / total, 4),
        }
    for name, peer in PAIRS.items():
        ours, theirs = report[name], report[peer]
        ours["step_time_over_torch"] = round(ours["step_ms"] / theirs["step_ms"], 3)
        ours["cpu_time_over_torch"] = round(ours["cpu_ms"] / theirs["cpu_ms"], 3)
        ours["floor"] = round(report[LOCAL]["cpu_ms"] / theirs["cpu_ms"], 3)
        ours["step_time_over_torch_by_round"] = [
            round(mine / other, 3)
            for mine, other in zip(ours["step_ms_by_round"], theirs["step_ms_by_round"], strict=True)
        ]
    return report


def over_ranks(combine: Callable[[Any], float], by_rank: list[list[list[float]]]) -> list[list[float]]:
    """Combines values over ranks: takes them by rank, round and step, and returns them by round and step."""
    return [
        [combine(step) for step in zip(*of_round, strict=True)] for of_round in zip(*by_rank, strict=True)
    ]


def flat(rounds: list[list[float]]) -> list[float]:
    return [step for of_round in rounds for step in of_round]


def show(title: str, report: dict[str, Any]) -> None:
    print(f"\n{title}")
    print(
        f"  {'':22}{'step ms':>9}{'quartiles':>18}{'of torch':>10}{'cpu ms':>8}{'of torch':>10}"
        f"{'floor':>7}{'MB sent':>9}{'state/fair':>12}"
    )
    for name, figures in report.items():
        low, high = figures["step_ms_quartiles"]
        print(
            f"  {name:22}{figures['step_ms']:9.2f}{f'{low:.2f} - {high:.2f}':>18}"
            f"{figures.get('step_time_over_torch', ''):>10}{figures['cpu_ms']:8.1f}"
            f"{figures.get('cpu_time_over_torch', ''):>10}{figures.get('floor', ''):>7}"
            f"{figures['wire_bytes_a_step'] / 1e6:9.1f}"
            f"{figures['largest_state_over_fair_share']:12.3f}"
        )


def environment(backend: str) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name(0) if backend == "nccl" else None
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "load_average": os.getloadavg(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "before": environment(arguments.backend),
        "backend": arguments.backend,
        "runs": [],
    }
    for model, optimizer, world in product(arguments.models, OPTIMIZERS, arguments.worlds):
        by_rank = run_ranks(
            measure,
            world,
            model,
            optimizer,
            arguments.rounds,
            arguments.steps,
            kind=arguments.backend,
            timeout_seconds=500,
        )
        report = summary(by_rank, world)
        show(f"{model}, {optimizer}, {world} ranks", report)
        numel = sum(param.numel() for param in MODELS[model]().parameters())
        results["runs"].append(
            {
                "model": model,
                "parameters": numel,
                "optimizer": optimizer,
                "world": world,
                "contenders": report,
            }
        )
    results["load_average_after"] = os.getloadavg()
    output = arguments.output or RESULTS / f"zero_{arguments.backend}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nwritten to {output}")


if __name__ == "__main__":
    main()
