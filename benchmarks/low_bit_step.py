"""Times torchao's 8-bit and 4-bit AdamW on shards: on FSDP2's, on shardwise's, and through `shardwise.optim.flat`.

    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/low_bit_step.py                   # CPU
    PYTHONPATH=. python benchmarks/low_bit_step.py --device cuda --model 1b --compile

It needs torchao. The shards are one rank's of a model of transformer blocks without biases, in a fake group of 2, so
that the shards of all matrices have quantized states. All contenders get the same gradients, and must have the same
values at the end, bit for bit. Without ``--compile`` torchao's step runs operator by operator.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from measuring import Contender, expect, parser, take_turns, wait_for, write
from models import SIZES, WAYS, Language, Size, fill, shard_blocks, start_group
from torch import nn

from shardwise.optim import flat

CLASSES = ("AdamW8bit", "AdamW4bit")
CONTENDERS = ("FSDP2", "shardwise", "flat")
LR = 1e-3


def make(name: str, optimizer_class: Any, size: Size, device: torch.device) -> tuple[nn.Module, Any]:
    with torch.device(device):
        model = Language(size)
    shard_blocks(model, WAYS["FSDP2" if name == "FSDP2" else "shardwise"].fully_shard)
    fill(model)
    for number, param in enumerate(model.parameters()):
        param.grad = torch.zeros_like(param)
        local: Any = param.grad
        local.to_local().normal_(generator=torch.Generator(device).manual_seed(number))
    if name == "flat":
        return model, flat(model, optimizer_class, lr=LR)
    return model, optimizer_class(model.parameters(), lr=LR)


def check(models: dict[str, Any]) -> None:
    expected = list(models["FSDP2"].parameters())
    for name in ("shardwise", "flat"):
        for one, other in zip(models[name].parameters(), expected, strict=True):
            equal = torch.equal(one.detach().to_local(), other.detach().to_local())
            expect(equal, f"{name} has left FSDP2")


def states_bytes(optimizer: Any) -> int:
    """The bytes of a rank's states; those of a run are counted by its parameters."""
    total = 0
    for state in optimizer.state.values():
        for value in state.values():
            local = value.to_local() if hasattr(value, "to_local") else value
            parts = [local.codes, local.scale] if hasattr(local, "codes") else [local]
            total += sum(part.nbytes for part in parts)
    return total


def main() -> int:
    options = parser(__doc__, rounds=5, iterations=2, warmup=1)
    options.add_argument("--model", choices=["small", *SIZES], default="small")
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--compile", action="store_true", help="let torchao compile its step")
    args = options.parse_args()
    if not args.compile:
        torch.compile = lambda function=None, **_: function or (lambda inner: inner)  # type: ignore[assignment]
    from torchao import optim

    device = torch.device(args.device)
    start_group("fake", args.ranks, device)
    size = Size(4, 128, 256, 4, 512, 64) if args.model == "small" else SIZES[args.model]
    step_ms: dict[str, Any] = {}
    figures: dict[str, Any] = {}
    for kind in CLASSES:
        made = {name: make(name, getattr(optim, kind), size, device) for name in CONTENDERS}
        contenders = [Contender(name, optimizer.step) for name, (_, optimizer) in made.items()]
        times = take_turns(contenders, wait_for(device), args.rounds, args.iterations, args.warmup)
        check({name: model for name, (model, _) in made.items()})
        step_ms.update({f"{kind}, {name}": value for name, value in times.summary().items()})
        for name, clock in (("", "wall"), (", CPU time", "cpu")):
            figures[f"{kind}: flat / as it is{name}"] = times.ratio("flat", "shardwise", clock)
            figures[f"{kind}: as it is / FSDP2{name}"] = times.ratio("shardwise", "FSDP2", clock)
        sizes = [states_bytes(optimizer) for _, optimizer in made.values()]
        expect(len(set(sizes)) == 1, f"states take {sizes} bytes")
        elements = sum(param.to_local().numel() for param in made["flat"][0].parameters())  # type: ignore[attr-defined]
        figures[f"{kind}: bytes of state an element"] = {"value": sizes[0] / elements}
    write("low_bit_step", args, args.out, f"low_bit_step_{args.device}", step_ms=step_ms, figures=figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
