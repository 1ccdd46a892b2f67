"""Times forward and backward of a transformer: plain, torch FSDP2, FSDP1 and shardwise in one run; or their memory.

    PYTHONPATH=. python benchmarks/step_time.py --device cuda --model 1b             # tiny, 1b or 8b
    PYTHONPATH=. python benchmarks/step_time.py --device cuda --model 1b --compile   # blocks compiled
    PYTHONPATH=. python benchmarks/step_time.py --device cuda --model 8b --memory    # peak memory instead of time

bf16 compute, float32 reduces, a fake group of 8 (or `--world-size 64`): communication takes no time, so what remains is
what sharding costs a rank. Plain is the same model in bf16, unsharded. FSDP2 and shardwise hold the same shards, and a
fake group gathers the same from them, so their losses must be bitwise equal in every step. After every step all
parameters must have a gradient, and an untimed step must issue the expected number of collectives.

*Plain, and the group's own*: the plain model while a side stream does what no library can avoid on this group: it casts
shards, issues the collectives where a unit begins or ends, and copies gradients into rows of float32; nothing waits
for it before the end of the step. The time it adds to plain is the floor of what sharding costs here.

With `--memory` each contender runs in its own process with torch's default allocator, and the figures are its peaks
of allocated and reserved memory over whole steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from measuring import Contender, expect, parser, take_turns, wait_for, write
from models import SIZES, build, start_group, tokens_for
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

GATHER, REDUCE = "c10d._allgather_base_", "c10d._reduce_scatter_base_"
GATHER_EACH = "c10d.allgather_into_tensor_coalesced_"
EVERYONE = ["plain", "FSDP2", "FSDP1", "shardwise"]
FLOOR = "plain, and the group's own"


class Runner:
    """A contender's model and its losses."""

    def __init__(self, name: str, args: Any, device: torch.device) -> None:
        size = SIZES[args.model]
        self.name = name
        self.model = build(name, size, device, args.world_size, compiles=args.compile)
        self.inputs = tokens_for(size, device)
        self.num_blocks = size.blocks
        self.loss = torch.zeros(())

    def step(self) -> None:
        self.loss = self.model(*self.inputs)
        self.loss.backward()

    def clear(self) -> None:
        self.model.zero_grad()

    def check(self) -> None:
        for param in self.model.parameters():
            has_elements = param.numel() > 0
            expect(param.grad is not None or not has_elements, f"{self.name}: a parameter has no gradient")

    def check_counts(self) -> None:
        self.clear()
        with CommDebugMode() as mode:
            self.step()
        counts = {str(op): count for op, count in mode.get_comm_counts().items()}
        # Large units are gathered directly into their parameters, by one collective for many tensors.
        counts[GATHER] = counts.get(GATHER, 0) + counts.pop(GATHER_EACH, 0)
        # Rows of more than 1 GiB (an embedding and an output layer, say) are reduced in slices of that size.
        rest = [param for name, param in self.model.named_parameters() if not name.startswith("blocks.")]
        num_slices = -(-4 * sum(param.numel() for param in rest) // (1 << 30))
        expected = {GATHER: 2 * self.num_blocks + 1, REDUCE: self.num_blocks + num_slices}
        expect(counts == expected, f"{self.name}: collectives {counts}, expected {expected}")

    def contender(self) -> Contender:
        return Contender(self.name, self.step, before=self.clear, after=self.check)


class GroupBeside:
    """Does on a side stream what any library must do for a model on a fake group.

    All units share one buffer: only the number of bytes moved matters, not their values.
    """

    def __init__(self, runner: Runner, world_size: int, device: torch.device) -> None:
        self._runner = runner
        self._model: Any = runner.model
        self._blocks = list(self._model.blocks)
        in_blocks = {param for block in self._blocks for param in block.parameters()}
        rest = [param for param in self._model.parameters() if param not in in_blocks]
        self._numels = {block: padded_numel(block.parameters(), world_size) for block in self._blocks}
        self._numels[self._model] = padded_numel(rest, world_size)
        most = max(self._numels.values())
        self._world_size = world_size
        self._full = torch.empty(most, dtype=torch.bfloat16, device=device)
        self._rows = torch.empty(most, device=device)
        self._shards = torch.empty(most // world_size, device=device)
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None
        self._handles: list[Any] = []

    def contender(self) -> Contender:
        return Contender(FLOOR, self.step, before=self._prepare, after=self._check)

    def step(self) -> None:
        self._gather(self._model, self._blocks[0])
        self._runner.step()
        self._reduce(self._model)

    def _prepare(self) -> None:
        # Only for this step: the model is also the plain contender's, which has no hooks.
        blocks, handles = self._blocks, self._handles
        for number, block in enumerate(blocks):
            after, before = blocks[number + 1 : number + 2], blocks[max(0, number - 1) : number]
            handles += [
                block.register_forward_pre_hook(lambda *_, units=after: self._gather(*units)),
                block.register_full_backward_pre_hook(lambda *_, units=before: self._gather(*units)),
                block.register_full_backward_hook(lambda block, *_: self._reduce(block)),
            ]
        handles.append(self._model.norm.register_full_backward_pre_hook(lambda *_: self._gather(blocks[-1])))
        self._runner.clear()

    def _check(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._runner.check()

    def _beside(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _gather(self, *units: nn.Module) -> None:
        with self._beside(), torch.no_grad():
            for unit in units:
                numel = self._numels[unit]
                own = self._shards[: numel // self._world_size].bfloat16()
                dist.all_gather_into_tensor(self._full[:numel], own)

    def _reduce(self, unit: nn.Module) -> None:
        with self._beside(), torch.no_grad():
            numel = self._numels[unit]
            rows = self._rows[:numel].copy_(self._full[:numel])
            dist.reduce_scatter_tensor(self._shards[: numel // self._world_size], rows)


def padded_numel(params: Any, world_size: int) -> int:
    return -(-sum(param.numel() for param in params) // world_size) * world_size


def measure_time(args: Any, device: torch.device) -> None:
    runners = {name: Runner(name, args, device) for name in args.contenders}
    contenders = [runner.contender() for runner in runners.values()]
    # Hooks of a compiled block would be compiled, too.
    if "plain" in runners and not args.compile:
        contenders.append(GroupBeside(runners["plain"], args.world_size, device).contender())
    times = take_turns(contenders, wait_for(device), args.rounds, args.iterations, args.warmup)
    if {"FSDP2", "shardwise"} <= set(runners):
        one, other = runners["FSDP2"].loss, runners["shardwise"].loss
        expect(torch.equal(one, other), f"losses differ: {one} and {other}")
    if "shardwise" in runners and not args.compile:
        runners["shardwise"].check_counts()
    write(
        "step_time",
        args,
        args.out,
        f"step_time_{args.model}_{args.world_size}{'_compiled' if args.compile else ''}_{args.device}",
        step_ms=times.summary(),
        figures={f"{name} / plain": times.ratio(name, "plain") for name in times.rounds if name != "plain"},
    )


# --- memory -----------------------------------------------------------------------------------------------------------


def measure_memory(args: Any) -> None:
    peaks = {name: peaks_of(name, args) for name in args.contenders}
    figures = {
        f"{name}: reserved / allocated": {"value": peak["reserved"] / max(1, peak["allocated"])}
        for name, peak in peaks.items()
    }
    for kind in ("reserved", "allocated"):
        ratio = peaks["shardwise"][kind] / max(1, peaks["FSDP2"][kind])
        figures[f"shardwise / FSDP2: {kind}"] = {"value": ratio}
    name = f"step_memory_{args.model}_{args.world_size}_{args.device}"
    write("step_memory", args, args.out, name, step_ms={}, figures=figures, peak_bytes=peaks)


def peaks_of(name: str, args: Any) -> dict[str, int]:
    """Runs this file in a process for one contender and returns its peak memory."""
    command = [sys.executable, __file__, "--only", name, "--device", args.device, "--model", args.model]
    command += ["--world-size", str(args.world_size), "--iterations", str(args.iterations)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    expect(ended.returncode == 0, f"{name} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    peaks: dict[str, int] = json.loads(ended.stdout.splitlines()[-1])
    print(name, {kind: f"{value / 2**30:.2f} GiB" for kind, value in peaks.items()}, flush=True)
    return peaks


def run_alone(args: Any, device: torch.device) -> None:
    runner = Runner(args.only, args, device)
    freed: list[int] = []
    for _ in range(max(3, args.iterations)):
        runner.clear()
        wait_for(device)()
        freed.append(torch.cuda.memory_allocated() if device.type == "cuda" else 0)
        runner.step()
        runner.check()
    # Memory must not grow from step to step.
    expect(freed[1] == freed[-1], f"{args.only}: memory between steps grows: {freed}")
    on_gpu = device.type == "cuda"
    peaks = {
        "allocated": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "reserved": torch.cuda.max_memory_reserved() if on_gpu else 0,
    }
    print(json.dumps(peaks))


def main() -> int:
    options = parser(__doc__, rounds=5, iterations=4)
    options.add_argument("--model", choices=list(SIZES), default="tiny")
    options.add_argument("--world-size", type=int, default=8)
    options.add_argument("--compile", action="store_true", help="compile the blocks")
    options.add_argument("--memory", action="store_true", help="measure peak memory")
    options.add_argument("--contenders", nargs="+", choices=EVERYONE, help="default: all; FSDP1 needs a GPU")
    options.add_argument("--only", choices=EVERYONE, help="print the peak memory of this one")
    args = options.parse_args()
    # FSDP1 cannot build a model of 8 billion parameters shard by shard on a fake group.
    has_fsdp1 = args.device == "cuda" and args.model != "8b"
    args.contenders = args.contenders or [name for name in EVERYONE if has_fsdp1 or name != "FSDP1"]
    warnings.simplefilter("ignore")
    device = torch.device(args.device)
    if args.memory:
        measure_memory(args)
        return 0
    if device.type == "cuda":
        torch.cuda.set_device(0)
    start_group("fake", args.world_size, device)
    (run_alone if args.only else measure_time)(args, device)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
