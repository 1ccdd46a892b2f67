"""The models on which parity is checked: small, each with its own difficulties.

Every model is initialised, and every batch drawn, from its own generator, so that all ranks (processes or
threads) get the same model, and any rank's slice of the data can be drawn anywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["TIED_ACROSS_UNITS", "WORKLOADS", "Batch", "Workload", "seeded"]

Batch: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class Workload:
    """A model, the modules that become units (bottom-up, without the root, which is last), and its data."""

    name: str
    build: Callable[[], nn.Module]
    units: Callable[[Any], list[nn.Module]]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Any, Batch], Tensor]

    def model(self, device: torch.device | str = "cpu") -> nn.Module:
        """Returns a new model, with the same values on every call and every rank."""
        return seeded(self.build()).to(device)

    def data(self, step: int, micro_batch: int, rank: int, device: torch.device | str = "cpu") -> Batch:
        """Returns one rank's slice of the data, the same on every call."""
        generator = torch.Generator().manual_seed((step * 97 + micro_batch) * 1009 + rank + 1)
        return tuple(
            value.to(device) if isinstance(value, Tensor) else value for value in self.batch(generator)
        )


def seeded(module: nn.Module, seed: int = 0) -> nn.Module:
    """Fill the parameters from a generator of their own: ranks that are threads share the global generator."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in module.named_parameters():
            values = torch.randn(param.shape, generator=generator, device="cpu")
            if param.dim() > 1:
                values /= (param.numel() / param.shape[0]) ** 0.5
            else:
                values = 0.1 * values + (1.0 if name.endswith("weight") else 0.0)
            param.copy_(values)
    return module


def _normal(*shape: int) -> Callable[[torch.Generator], Batch]:
    return lambda generator: (torch.randn(shape, generator=generator),)


def _classify(output: Any, batch: Batch) -> Tensor:
    """Cross-entropy with sample i in class i (modulo the number of classes): a loss that stays away from zero."""
    classes = torch.arange(output.shape[0], device=output.device) % output.shape[1]
    return functional.cross_entropy(output.float(), classes)


class OddMLP(nn.Module):
    """Sizes that no small world size divides, and a layer whose dim 0 has size 1."""

    def __init__(self) -> None:
        super().__init__()
        widths = (5, 7, 13, 1, 11)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(batch, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class TiedTransformer(nn.Module):
    """A transformer whose output layer shares the embedding's weight."""

    VOCAB = 19

    def __init__(self, width: int = 12, heads: int = 2, num_layers: int = 3, max_length: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.VOCAB, width)
        self.positions = nn.Embedding(max_length, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, self.VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def _tokens(generator: torch.Generator) -> Batch:
    return (torch.randint(0, TiedTransformer.VOCAB, (2, 6), generator=generator),)


def _next_token(logits: Any, batch: Batch) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), batch[0][:, 1:].flatten())


class ConvNet(nn.Module):
    """Four-dimensional weights, a norm that is a unit by itself, and a floating-point buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3, padding=1)
        self.norm = nn.GroupNorm(1, 5)
        self.body = nn.Sequential(nn.Conv2d(5, 7, 3, stride=2, bias=False), nn.ReLU(), nn.Conv2d(7, 6, 2))
        self.head = nn.Linear(6, 3)
        self.register_buffer("scale", torch.tensor([0.5, 1.0, 1.5, 2.0, 2.5]).view(5, 1, 1))

    def forward(self, image: Tensor) -> Tensor:
        x = self.norm(functional.relu(self.stem(image)))
        x = self.body(x * self.scale)
        return self.head(x.mean(dim=(2, 3)).to(self.head.weight.dtype))  # type: ignore[no-any-return]


class Halves(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass
class Report:
    """An output type that torch's pytree does not traverse."""

    main: Tensor
    extras: dict[str, list[Tensor]]


class Trunk(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Halves:
        left, right = torch.tanh(self.lin(x)).chunk(2, dim=-1)
        return Halves(left, right)


class Branch(nn.Module):
    """Takes a namedtuple and returns a dict of lists and tuples; one of its outputs is never used."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin1 = nn.Linear(width, width)
        self.lin2 = nn.Linear(width, width)

    def forward(self, halves: Halves) -> dict[str, Any]:
        first, second = self.lin1(halves.left), self.lin2(halves.right)
        return {
            "pair": (first, second),
            "list": [first * second, [torch.sin(first)]],
            "unused": second.exp(),
            "n": 3,
        }


class Gather(nn.Module):
    """Takes nested structures and returns a dataclass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)

    def forward(self, parts: dict[str, Any], *, scale: Tensor) -> Report:
        first, second = parts["pair"]
        product, (sine,) = parts["list"]
        return Report(self.lin(first + product) * scale, {"more": [sine, self.lin(second)]})


class Branches(nn.Module):
    """A model with branches, a module that runs three times, and outputs in nested structures."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.trunk = Trunk(width)
        self.branch = Branch(width)
        self.again = nn.Linear(width, width)
        self.gather = Gather(width)
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Any]:
        parts = self.branch(self.trunk(x))
        report = self.gather(parts, scale=scale)
        y = report.main
        for _ in range(3):
            y = torch.tanh(self.again(y))
        return {
            "main": self.last(y),
            "side": [report.extras["more"][0], (report.extras["more"][1],)],
            "note": "kept",
        }


def _branch_loss(output: Any, batch: Batch) -> Tensor:
    result: Tensor = output["main"].float().square().mean() + output["side"][1][0].float().abs().mean()
    return result


class Adapted(nn.Module):
    """A frozen layer with a small trainable adapter."""

    def __init__(self, width: int, rank: int = 3) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class Adapters(nn.Module):
    """A LoRA-like model: frozen parameters in every layer, and a first unit whose input requires no grad."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(TiedTransformer.VOCAB, width).requires_grad_(False)
        self.layers = nn.ModuleList(Adapted(width) for _ in range(3))
        self.head = nn.Linear(width, TiedTransformer.VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("odd MLP", OddMLP, lambda m: [*m.layers[:3]], _normal(4, 5), _classify),
        Workload("tied transformer", TiedTransformer, lambda m: [*m.layers], _tokens, _next_token),
        Workload("conv net", ConvNet, lambda m: [m.stem, m.norm, m.body], _normal(2, 3, 6, 6), _classify),
        Workload(
            "branches",
            Branches,
            lambda m: [m.trunk, m.branch.lin1, m.branch, m.again, m.gather],
            lambda generator: (torch.randn(4, 7, generator=generator), torch.randn(7, generator=generator)),
            _branch_loss,
        ),
        Workload("adapters", Adapters, lambda m: [*m.layers], _tokens, _next_token),
    )
}

TIED_ACROSS_UNITS = Workload(
    "tied across units", TiedTransformer, lambda m: [m.embed, *m.layers, m.head], _tokens, _next_token
)
