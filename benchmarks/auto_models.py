"""Models of `auto_plan.py`, each described by a few numbers, and how they are drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from models import SIZES, Language, Size
from torch import Tensor, nn

from shardwise import MixedPrecisionPolicy

GRIDS: dict[str, dict[str, Any]] = {
    "tiny": {
        "kind": "language",
        "size": list(SIZES["tiny"]),
        "batch": 4,
        "length": 256,
        "dtype": "bfloat16",
    },
    "1b": {"kind": "language", "size": list(SIZES["1b"]), "batch": 4, "length": 2048, "dtype": "bfloat16"},
}


class Encoder(nn.Module):
    """torch's own encoder layers, with dropout and layer norms."""

    def __init__(
        self, blocks: int, width: int, hidden: int, heads: int, classes: int, dropout: float
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, hidden, dropout=dropout, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x.mean(1)).float().logsumexp(-1).mean()
        return out


class PerceptronBlock(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.relu(self.up(self.norm(x))))
        return out


class Perceptrons(nn.Module):
    def __init__(self, blocks: int, width: int, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(PerceptronBlock(width, hidden) for _ in range(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).float().square().mean()


class ConvolutionBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = (nn.GroupNorm(8, channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(torch.relu(self.norm2(self.first(torch.relu(self.norm1(x))))))
        return out


class Convolutions(nn.Module):
    def __init__(self, blocks: int, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 7, stride=2, padding=3)
        self.blocks = nn.ModuleList(ConvolutionBlock(channels) for _ in range(blocks))
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3))).float().logsumexp(-1).mean()


def build(spec: dict[str, Any]) -> nn.Module:
    kind, size = spec["kind"], spec["size"]
    made: dict[str, Callable[[], nn.Module]] = {
        "language": lambda: Language(Size(*size)),
        "encoder": lambda: Encoder(*size),
        "perceptrons": lambda: Perceptrons(*size),
        "convolutions": lambda: Convolutions(*size),
    }
    return made[kind]()


def precision(spec: dict[str, Any]) -> MixedPrecisionPolicy:
    if spec["dtype"] == "float32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def inputs(spec: dict[str, Any], batch: int, device: torch.device) -> tuple[Tensor, ...]:
    """One micro-batch. Values do not matter, but tokens must be in the vocabulary."""
    length = spec["length"]
    if spec["kind"] == "language":
        vocabulary = spec["size"][4]
        tokens = torch.arange(batch * length, device=device).view(batch, length) % vocabulary
        return tokens, tokens.clone()
    shape = {
        "encoder": (batch, length, spec["size"][1]),
        "perceptrons": (batch, length, spec["size"][1]),
        "convolutions": (batch, 3, length, length),
    }[spec["kind"]]
    return (torch.empty(shape, device=device).fill_(0.5),)


def draw(random_: random.Random) -> dict[str, Any]:
    """Draws a model: two of five are language models; up to some gigabytes of weights."""
    kind = random_.choice(("language", "language", "encoder", "perceptrons", "convolutions"))
    dtype = random_.choice(("bfloat16", "bfloat16", "float32"))
    head = random_.choice((32, 64, 128))
    heads = random_.choice((6, 8, 12, 16, 24, 32))
    blocks, width = random_.randint(2, 28), head * heads
    batch = random_.choice((1, 2, 3, 4, 8))
    if kind == "language":
        kv_heads = random_.choice((heads, heads, heads // 2))
        vocabulary = random_.choice((1000, 32000, 50257, 128256))
        hidden = 64 * round(width * random_.uniform(2, 4) / 64)
        length = random_.choice((128, 384, 512, 1000, 1024, 2048, 4096))
        size: list[Any] = [blocks, width, hidden, heads, vocabulary, length, kv_heads]
        # Grouped heads in float32 have no fused kernel.
        if dtype == "float32":
            size[6] = heads
    elif kind == "encoder":
        length = random_.choice((128, 197, 256, 512, 1024))
        size = [blocks, width, 4 * width, heads, 1000, random_.choice((0.0, 0.1))]
    elif kind == "perceptrons":
        length = random_.choice((256, 1024, 3000))
        size = [blocks, width, width * random_.choice((2, 4, 8))]
    else:
        length = random_.choice((64, 96, 128))
        size = [blocks, random_.choice((64, 128, 256)), 1000]
    return {"kind": kind, "size": size, "batch": batch, "length": length, "dtype": dtype}
