"""Predicts the steps that TorchTitan publishes for Llama 3.1 8B: another library on another machine.

Published (TorchTitan, docs/performance.md and arXiv 2410.06511; H100 SXM 96 GB, local batch 2, sequence 8192, selective
checkpointing of single operations, AdamW, bfloat16 parameters in compute, float32 reduces). No price was taken from it:

    8 GPUs: 5,762 tokens/s a GPU at 82.4 GiB; compiled 6,667 at 77.0
    128 GPUs: 5,605 tokens/s a GPU at 67.0 GiB; compiled 6,514 at 62.0

Assumed: FlashAttention-2, which torch's attention then was, at 35 % of the peak as its successor's authors measured
it (arXiv 2407.08608), where torch 2.11 reaches 46 % on an H200; a clock that falls with the square root of the power
limit; their model as below, of single operations; 8 GPUs on a node, and between nodes the links of
`devices/h100-96gb.json`; our schedule for FSDP2's, which allocates the same. FSDP2 reserves more of what it
allocates: the second row of memory takes what it reserved for each byte of the 8B model on an H200
(results/step_memory_8b_8_cuda.json and step_memory_8b_64_cuda.json). Its step is longer than ours, too: the second
row of throughput adds what it took more on an H200 (step_time_8b_8_cuda.json, and compiled), which is copies, at the
bandwidth of theirs. Not predicted: clipping, their logging, and what the allocator does in a run of thousands of
steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import shardwise
from shardwise.forecast.plan import Plan, plan

WIDTH, HIDDEN, HEADS, KV_HEADS, LAYERS, VOCABULARY, LENGTH, BATCH = 4096, 14336, 32, 8, 32, 128256, 8192, 2
H200_BYTES_PER_SECOND = 4.8e12
RESULTS = Path(__file__).parent / "results"
MIXED = shardwise.MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary embedding with complex numbers, in float32, as theirs."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None, :]).flatten(3).type_as(x)


class Norm(nn.Module):
    """Their norm, of single operations in float32: torch's own was no single kernel then, either."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class TitanBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        head = WIDTH // HEADS
        self.attention_norm, self.ffn_norm = Norm(), Norm()
        self.wq, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(WIDTH, KV_HEADS * head, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, length, _ = x.shape
        normed = self.attention_norm(x)
        q, k, v = self.wq(normed), self.wk(normed), self.wv(normed)
        q = q.view(batch, length, HEADS, -1)
        k, v = k.view(batch, length, KV_HEADS, -1), v.view(batch, length, KV_HEADS, -1)
        q, k = rotated(q, turns), rotated(k, turns)
        # They repeat keys and values for each group of heads.
        k, v = (repeated(each) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(mixed.transpose(1, 2).contiguous().view(batch, length, -1))
        normed = self.ffn_norm(x)
        return x + self.w2(functional.silu(self.w1(normed)) * self.w3(normed))


def repeated(x: Tensor) -> Tensor:
    times = HEADS // KV_HEADS
    batch, length, heads, head = x.shape
    return x[:, :, :, None, :].expand(batch, length, heads, times, head).reshape(batch, length, -1, head)


class Titan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(TitanBlock() for _ in range(LAYERS))
        self.norm = Norm()
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("turns", torch.empty(LENGTH, WIDTH // HEADS // 2, dtype=torch.complex64))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.turns)
        logits = self.output(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))


aten = torch.ops.aten
SAVED = {
    aten.mm.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
}


def selective_contexts() -> Any:
    """Keeps the outputs of attention and of every second matrix product."""
    counts = {True: 0, False: 0}

    def choose(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if function is aten.mm.default:
            counts[context.is_recompute] += 1
        is_second = function is aten.mm.default and counts[context.is_recompute] % 2 == 0
        kept = function in SAVED and not is_second
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


def recomputed(forward: Any) -> Any:
    def run(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=selective_contexts)

    return run


def shard(model: Any, mesh: Any, compiles: bool = False) -> None:
    for layer in model.layers:
        layer.forward = recomputed(layer.forward)
        if compiles:
            layer.compile()
        shardwise.fully_shard(layer, mesh=mesh, mp_policy=MIXED)
    shardwise.fully_shard(model, mesh=mesh, mp_policy=MIXED)


def predicted(ranks: int, compiles: bool = False, device: str = "h100-96gb") -> Plan:
    tokens = torch.empty(BATCH, LENGTH, dtype=torch.long, device="meta")
    return plan(
        Titan,
        (tokens, tokens),
        ranks=ranks,
        nodes=ranks // 8,
        device=device,
        shard=partial(shard, compiles=compiles),
        name="Llama 3.1 8B as in TorchTitan",
    )


def reserved_by_torch(ranks: int) -> float:
    """What FSDP2 reserves for each byte that it allocates, on 8 and on many ranks."""
    file = RESULTS / f"step_memory_8b_{8 if ranks == 8 else 64}_cuda.json"
    ratio: float = json.loads(file.read_text())["figures"]["FSDP2: reserved / allocated"]["value"]
    return ratio


def seconds_of_torch(made: Plan, compiles: bool) -> float:
    """What FSDP2's step takes: its copies beside ours, which move the same bytes whatever the batch, at 2.4 TB/s."""
    file = RESULTS / f"step_time_8b_8{'_compiled' if compiles else ''}_cuda.json"
    times = json.loads(file.read_text())["step_ms"]
    more = times["FSDP2"]["wall"]["median"] - times["shardwise"]["wall"]["median"]
    return made.seconds + more / 1e3 * H200_BYTES_PER_SECOND / made.question.device.memory_bytes_per_second


PUBLISHED = (
    (8, False, 5762, 82.4),
    (8, True, 6667, 77.0),
    (128, False, 5605, 67.0),
    (128, True, 6514, 62.0),
)


def rows() -> Iterator[tuple[str, str, float, float]]:
    for ranks, compiles, tokens, reserved in PUBLISHED:
        made = predicted(ranks, compiles)
        gib = 2**30
        name = f"TorchTitan, {ranks} GPUs{', compiled' if compiles else ''}"
        yield name, "tokens/s a GPU", made.tokens_per_second, tokens
        by_torch = made.question.tokens / seconds_of_torch(made, compiles)
        yield f"{name}, as by FSDP2", "tokens/s a GPU", by_torch, tokens
        yield f"{name}, reserved, as by us", "GiB", made.memory.reserved / gib, reserved
        by_torch = made.memory.allocated * reserved_by_torch(ranks) / gib
        yield f"{name}, reserved, as by FSDP2", "GiB", by_torch, reserved


if __name__ == "__main__":
    for number, is_compiled, *_ in PUBLISHED:
        print(predicted(number, is_compiled).text(), end="\n\n")
