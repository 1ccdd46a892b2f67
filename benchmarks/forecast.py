"""Predicts steps that were measured on a GPU, and writes both beside each other. Needs no GPU.

    PYTHONPATH=. python benchmarks/forecast.py
    PYTHONPATH=. python benchmarks/forecast.py --only memory       # or time, published

Measured are the results files in `results/` of one H200, with torch's fake process group: memory to the byte, and the
time of steps in which communication takes none. Rows marked *fit* have set a price of `forecast/devices/h200.json`; the
others judge. *Published* are throughput and memory of TorchTitan's Llama 3.1 8B on H100s, runs of another library
(torch's FSDP2) on another machine, of which no price was taken; `titan.py` has their model and its assumptions.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Nothing here computes: torch must not look for a GPU.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import torch
from models import SIZES, Block, Language
from torch import Tensor, nn

import shardwise
from shardwise.forecast.device_files import load_device, with_links
from shardwise.forecast.plan import Plan, plan

RESULTS = Path(__file__).parent / "results"
MIXED = shardwise.MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Row(NamedTuple):
    what: str
    unit: str
    predicted: float
    measured: float
    source: str
    is_fit: bool = False

    def as_json(self) -> dict[str, Any]:
        return {
            **self._asdict(),
            "ratio": round(self.predicted / self.measured, 4) if self.measured else None,
        }


def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def median_ms(name: str, contender: str) -> float:
    median: float = results(name)["step_ms"][contender]["wall"]["median"]
    return median


def on_fake_group(model: Callable[[], nn.Module], inputs: Any, ranks: int = 8, **settings: Any) -> Plan:
    device = with_links(load_device("h200"), within="fake", between="fake")
    return plan(
        model, inputs, ranks=ranks, device=device, **{"optimizer": None, "mp_policy": MIXED, **settings}
    )


def language(size_name: str, **settings: Any) -> Plan:
    size = SIZES[size_name]
    tokens = torch.empty(1, size.tokens, dtype=torch.long, device="meta")
    is_plain = settings.get("api") == "none"
    return on_fake_group(
        lambda: Language(size).bfloat16() if is_plain else Language(size), (tokens, tokens), **settings
    )


# --- memory -------------------------------------------------------------------------------------------------------


def step_memory() -> Iterator[Row]:
    """Peaks over whole steps, with everything that torch's allocator holds."""
    for world in (8, 64):
        file = f"step_memory_8b_{world}_cuda"
        measured = results(file)["peak_bytes"]["shardwise"]
        memory = language("8b", ranks=world).memory
        yield Row(
            f"8B, {world} ranks, allocated",
            "bytes",
            memory.allocated,
            measured["allocated"],
            file,
            world == 8,
        )
        yield Row(f"8B, {world} ranks, reserved", "bytes", memory.reserved, measured["reserved"], file)


WIDTH = 2048
BLOCK_BYTES = 8 * WIDTH * WIDTH * 4
MODES: dict[str, dict[str, Any]] = {
    "freed after forward": {},
    "kept after forward": {"reshard_after_forward": False},
    "offloaded": {"offload": True},
    "bf16": {"mp_policy": MIXED},
}


def stack() -> nn.Module:
    """The model of `backward_memory.py`."""
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH, bias=False)
            )
            for _ in range(6)
        )
    )


def backward_memory() -> Iterator[Row]:
    """What the engine holds, with next to no activations; the file rounds to hundredths of a block."""
    file = "backward_memory_cuda"
    blocks = results(file)["blocks"]
    x = torch.empty(4, WIDTH, device="meta")
    for world in (2, 8):
        for mode, settings in MODES.items():
            found = on_fake_group(
                stack,
                x,
                world,
                wrap=lambda module: isinstance(module, nn.Sequential) and len(module) == 3,
                loss=lambda output: output.float().sum(),
                **{"mp_policy": shardwise.MixedPrecisionPolicy(), **settings},
            ).memory
            workspaces = found.by_kind["workspaces"]
            predicted = {
                "idle": found.idle,
                "forward": found.by_phase["forward"],
                "backward": found.by_phase["backward"],
                "after_backward": found.by_phase["optimizer"],
            }
            for phase, measured in blocks[f"shardwise, {world} ranks, {mode}"].items():
                value = round((predicted[phase] - workspaces) / BLOCK_BYTES, 2)
                yield Row(f"stack, {world} ranks, {mode}, {phase}", "blocks", value, measured, file)


# --- time ---------------------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    """The model of `host_overhead.py`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 256, bias=False)
        self.blocks = nn.ModuleList(Block(256, 704, 4) for _ in range(24))
        self.last = nn.Linear(256, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out


def host_bound_steps() -> Iterator[Row]:
    x = torch.empty(1, 256, 256, dtype=torch.bfloat16, device="meta")
    plain = 1e3 * on_fake_group(lambda: Tiny().bfloat16(), x, api="none").seconds
    ours = 1e3 * on_fake_group(Tiny, x).seconds
    wrapped = 1e3 * on_fake_group(Tiny, x, api="wrapper").seconds
    joined = 1e3 * on_fake_group(Tiny, x, wrap=Block, group_bytes=13_000_000).seconds
    for file in ("host_profile_cuda", "host_overhead_cuda"):
        yield Row("tiny, plain", "ms", plain, median_ms(file, "plain"), file, True)
    for file in ("host_profile_cuda", "host_overhead_cuda"):
        yield Row("tiny, fully_shard", "ms", ours, median_ms(file, "shardwise"), file, "profile" in file)
    for file in ("host_profile_wrapper_cuda", "host_overhead_wrapper_cuda"):
        yield Row("tiny, wrapper", "ms", wrapped, median_ms(file, "shardwise"), file)
    # Runs differ by how fast their host was; what is left of that beside the plain steps of the same run:
    for file, step in (
        ("host_profile_cuda", ours),
        ("host_overhead_cuda", ours),
        ("host_profile_wrapper_cuda", wrapped),
        ("host_overhead_wrapper_cuda", wrapped),
    ):
        name = "wrapper" if step is wrapped else "fully_shard"
        measured = median_ms(file, "shardwise") / median_ms(file, "plain")
        yield Row(f"tiny, {name} / plain", "ratio", step / plain, measured, file, file == "host_profile_cuda")
    file = "host_overhead_cuda_joined"
    measured = (median_ms(file, "joined") - median_ms(file, "plain")) / (
        median_ms(file, "shardwise") - median_ms(file, "plain")
    )
    predicted = (joined - plain) / (ours - plain)
    yield Row("tiny, what four blocks a unit add / one", "ratio", predicted, measured, file, True)


def compute_bound_steps() -> Iterator[Row]:
    for size, files in (
        ("1b", ("step_time_1b_8_cuda", "step_time_1b_8_cuda_again")),
        ("8b", ("step_time_8b_8_cuda",)),
    ):
        plain = 1e3 * language(size, api="none").seconds
        ours = 1e3 * language(size).seconds
        for file in files:
            # Prices of kernels come from profiles of these plain steps (step_profile_1b, step_profile_8b).
            yield Row(f"{size}, plain", "ms", plain, median_ms(file, "plain"), file, True)
            yield Row(f"{size}, fully_shard", "ms", ours, median_ms(file, "shardwise"), file)


def compiled_steps() -> Iterator[Row]:
    """Blocks compiled: how fast fused kernels are was fitted to the plain steps."""
    for size in ("1b", "8b"):
        file = f"step_time_{size}_8_compiled_cuda"
        plain = 1e3 * language(size, compile=True, api="none").seconds
        yield Row(f"{size}, compiled, plain", "ms", plain, median_ms(file, "plain"), file, True)
        ours = 1e3 * language(size, compile=True).seconds
        yield Row(f"{size}, compiled, fully_shard", "ms", ours, median_ms(file, "shardwise"), file)


def offloaded_steps() -> Iterator[Row]:
    ours = 1e3 * language("1b", ranks=1, offload=True, optimizer="adamw-in-backward").seconds
    for file in ("offload_step_1b_cuda", "offload_step_1b_cuda_again"):
        yield Row("1b, offloaded, with AdamW on the host", "ms", ours, median_ms(file, "shardwise"), file)


def published() -> Iterator[Row]:
    from titan import rows

    for what, unit, predicted, reported in rows():
        yield Row(what, unit, predicted, reported, "TorchTitan's performance.md")


GROUPS: dict[str, tuple[Callable[[], Iterator[Row]], ...]] = {
    "memory": (step_memory, backward_memory),
    "time": (host_bound_steps, compute_bound_steps, compiled_steps, offloaded_steps),
    "published": (published,),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=list(GROUPS))
    parser.add_argument("--out", type=Path, default=RESULTS / "forecast.json")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[str, list[dict[str, Any]]] = {}
    for name, groups in GROUPS.items():
        if args.only in (None, name):
            found[name] = []
            for row in (row for group in groups for row in group()):
                shown = row.as_json()
                found[name].append(shown)
                fit = "  (fit)" if row.is_fit else ""
                print(
                    f"{row.what:<52} {row.predicted:>15,.2f} {row.measured:>15,.2f} {shown['ratio']}{fit}",
                    flush=True,
                )
    if args.only is None:
        args.out.write_text(
            json.dumps({"benchmark": "forecast", "torch": torch.__version__, "rows": found}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
