"""The models that benchmarks run, and how contenders shard them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise


class Size(NamedTuple):
    blocks: int
    width: int
    hidden: int
    heads: int
    vocab: int
    tokens: int
    kv_heads: int | None = None


SIZES = {
    "toy": Size(2, 32, 64, 4, 64, 16, 2),
    "tiny": Size(24, 256, 704, 4, 1000, 256),
    "1b": Size(16, 2048, 5632, 16, 32000, 8192),
    "8b": Size(32, 4096, 14336, 32, 128256, 8192, 8),
}


class Block(nn.Module):
    """A transformer block with nine parameters."""

    def __init__(self, width: int, hidden: int, heads: int, kv_heads: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads or heads
        kv_width = width // heads * self.kv_heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, kv_width, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        normed = self.norm1(x)
        q = self.q(normed).view(batch, length, self.heads, -1).transpose(1, 2)
        k = self.k(normed).view(batch, length, self.kv_heads, -1).transpose(1, 2)
        v = self.v(normed).view(batch, length, self.kv_heads, -1).transpose(1, 2)
        is_grouped = self.kv_heads != self.heads
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
        x = x + self.o(attended.transpose(1, 2).reshape(batch, length, width))
        normed = self.norm2(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Language(nn.Module):
    """A language model that takes tokens and targets and returns the loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocab, size.width)
        self.blocks = nn.ModuleList(
            Block(size.width, size.hidden, size.heads, size.kv_heads) for _ in range(size.blocks)
        )
        self.norm = nn.RMSNorm(size.width)
        self.out = nn.Linear(size.width, size.vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.out(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def start_group(backend: str, world_size: int, device: torch.device) -> None:
    """Starts a process group with this process alone: torch's fake group of any size, or a real one of one rank."""
    if backend == "fake":
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    else:
        where = torch.device("cuda", device.index or 0) if device.type == "cuda" else None
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore(), device_id=where)


def tokens_for(size: Size, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    tokens, targets = (
        torch.randint(size.vocab, (1, size.tokens), device=device, generator=generator) for _ in range(2)
    )
    return tokens, targets


def fill(model: nn.Module, seed: int = 0) -> None:
    """Fills the weights from the seed; shards of the same parameter get the same values if they have the same size."""
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            local = param.to_local() if hasattr(param, "to_local") else param
            if param.dim() == 1:
                local.fill_(1.0)
                continue
            generator = torch.Generator(local.device).manual_seed(1000 * seed + number)
            local.normal_(0.0, 0.02, generator=generator)


Shard = Callable[..., Any]


class Way(NamedTuple):
    """One of the two implementations of `fully_shard`."""

    fully_shard: Shard
    mixed_precision: Callable[..., Any]
    cpu_offload: Callable[..., Any]


WAYS = {
    "FSDP2": Way(fsdp.fully_shard, fsdp.MixedPrecisionPolicy, fsdp.CPUOffloadPolicy),
    "shardwise": Way(shardwise.fully_shard, shardwise.MixedPrecisionPolicy, shardwise.CPUOffloadPolicy),
}


def build(
    name: str,
    size: Size,
    device: torch.device,
    world_size: int,
    *,
    compiles: bool = False,
    offloads: bool = False,
) -> nn.Module:
    """Builds a contender's model: "plain" (bf16), "FSDP1", "FSDP2" or "shardwise" (bf16 compute, float32 reduces)."""
    if name in ("plain", "FSDP1"):
        with device:
            model = Language(size)
        if name == "plain":
            model = model.bfloat16()
        fill(model)
    else:
        with torch.device("meta"):
            model = Language(size)
    if compiles:
        for block in model.blocks:
            block.compile()
    if name == "plain":
        return model
    mesh = init_device_mesh(device.type, (world_size,))
    if name == "FSDP1":
        return _wrapped(model, mesh, device)
    way = WAYS[name]
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": way.mixed_precision(torch.bfloat16, torch.float32)}
    if offloads:
        options["offload_policy"] = way.cpu_offload(pin_memory=device.type == "cuda")
    shard_blocks(model, way.fully_shard, **options)
    model.to_empty(device="cpu" if offloads else device)
    fill(model)
    return model


def shard_blocks(model: Any, fully_shard: Shard, **options: Any) -> Any:
    """Makes each block a unit, and the rest of the model another."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def _wrapped(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    return fsdp.FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        auto_wrap_policy=fsdp.wrap.ModuleWrapPolicy({Block}),
        mixed_precision=fsdp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=device if device.type == "cuda" else None,
        use_orig_params=True,
    )
