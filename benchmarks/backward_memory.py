"""Measures the peak memory of forward and backward in blocks of weights, beside FSDP2's and beside what was planned.

    PYTHONPATH=. python benchmarks/backward_memory.py     # needs a GPU

Six equal blocks, hardly any activations, a fake group of 2 and of 8: what is left is what sharding itself holds. Each
contender runs in a process of its own. *planned* is `shardwise.planned_memory`, which must equal what shardwise
allocates, but for activations and the allocator's rounding.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from measuring import expect, parser, write
from models import start_group
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

import shardwise

WIDTH, NUM_BLOCKS = 2048, 6
BLOCK_BYTES = 8 * WIDTH * WIDTH * 4
# Activations, and what the allocator rounds up.
MOST_OFF = 2 << 20
# Processes beside each other.
AT_ONCE = 8

MODES: dict[str, dict[str, Any]] = {
    "freed after forward": {},
    "kept after forward": {"reshard_after_forward": False},
    "offloaded": {"offload": True},
    "bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "bf16, reduced in bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
}
CONTENDERS = ("FSDP2", "shardwise")
PHASES = ("idle", "forward", "backward", "after_backward")


def build(api: Any, mode: str, world_size: int) -> nn.Module:
    settings = dict(MODES[mode])
    policy = api.CPUOffloadPolicy() if settings.pop("offload", False) else api.OffloadPolicy()
    reshard = settings.pop("reshard_after_forward", True)
    options = {
        "mesh": init_device_mesh("cuda", (world_size,)),
        "reshard_after_forward": reshard,
        "offload_policy": policy,
        "mp_policy": api.MixedPrecisionPolicy(**settings),
    }
    model = nn.Sequential(
        *(
            nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH, bias=False)
            )
            for _ in range(NUM_BLOCKS)
        )
    )
    for block in model:
        api.fully_shard(block, **options)
    api.fully_shard(model, **options)
    return model


def workspaces() -> None:
    """Makes kernels allocate their workspaces, which stay."""
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(WIDTH, WIDTH, device="cuda", dtype=dtype)
        layer(torch.ones(4, WIDTH, device="cuda", dtype=dtype)).sum().backward()


def run_alone(contender: str, mode: str, world_size: int) -> None:
    device = torch.device("cuda")
    start_group("fake", world_size, device)
    workspaces()
    before = torch.cuda.memory_allocated()
    model = build(shardwise if contender == "shardwise" else fsdp, mode, world_size)
    x = torch.ones(4, WIDTH, device=device)
    measured: dict[str, int] = {}
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        measured["idle"] = torch.cuda.memory_allocated() - before
        loss = model(x).float().sum()
        torch.cuda.synchronize()
        measured["forward"] = torch.cuda.max_memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        torch.cuda.synchronize()
        measured["backward"] = torch.cuda.max_memory_allocated() - before
        measured["after_backward"] = torch.cuda.memory_allocated() - before
        model.zero_grad()
    if contender == "shardwise":
        planned = shardwise.planned_memory(model)
        totals = (planned.idle, planned.forward.total, planned.backward.total, planned.after_backward)
        for phase, total in zip(PHASES, totals, strict=True):
            off = measured[phase] - total
            expect(abs(off) <= MOST_OFF, f"{mode}, {phase}: {measured[phase]} bytes, {total} planned")
    print(json.dumps(measured))


def measured_in_a_process(contender: str, mode: str, world_size: int) -> dict[str, int]:
    command = [sys.executable, __file__, "--only", contender, "--mode", mode, "--world-size", str(world_size)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    expect(
        ended.returncode == 0,
        f"{contender}, {mode}: ended with {ended.returncode}:\n{ended.stderr[-2000:]}",
    )
    found: dict[str, int] = json.loads(ended.stdout.splitlines()[-1])
    return found


def main() -> int:
    options = parser(__doc__, rounds=1, iterations=3)
    options.set_defaults(device="cuda")
    options.add_argument("--only", choices=CONTENDERS, help="print the memory of this one")
    options.add_argument("--mode", choices=list(MODES), default="freed after forward")
    options.add_argument("--world-size", type=int, default=8)
    args = options.parse_args()
    if args.only:
        run_alone(args.only, args.mode, args.world_size)
        return 0
    cases = list(itertools.product(CONTENDERS, MODES, (2, 8)))
    # Bytes are counted, not time: processes may run beside each other.
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = dict(zip(cases, pool.map(lambda case: measured_in_a_process(*case), cases), strict=True))
    figures: dict[str, dict[str, float]] = {}
    blocks: dict[str, dict[str, float]] = {}
    for world_size, mode in itertools.product((2, 8), MODES):
        for contender in CONTENDERS:
            peaks = found[contender, mode, world_size]
            in_blocks = {phase: round(peaks[phase] / BLOCK_BYTES, 2) for phase in PHASES}
            blocks[f"{contender}, {world_size} ranks, {mode}"] = in_blocks
            print(f"{contender}, {world_size} ranks, {mode}: {in_blocks}")
        theirs, ours = (found[contender, mode, world_size]["backward"] for contender in CONTENDERS)
        figures[f"backward, shardwise / FSDP2, {world_size} ranks, {mode}"] = {"value": ours / theirs}
    write(
        "backward_memory", args, args.out, "backward_memory_cuda", step_ms={}, figures=figures, blocks=blocks
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
