"""Models made of torch's own modules, each with something about it that sharding could trip over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import checkpoint_sequential

WIDTH = 8


def sequences() -> Tensor:
    return torch.randn(2, 5, WIDTH)


def images() -> Tensor:
    return torch.randn(2, 3, 8, 8)


def numbers() -> Tensor:
    return torch.randint(0, 20, (4, 3))


class Pair(nn.Module):
    """Some module, and a layer that takes what ``between`` makes of its output."""

    def __init__(
        self, first: nn.Module, second: nn.Module, between: Callable[[nn.Module, Any], Tensor]
    ) -> None:
        super().__init__()
        self.first, self.second = first, second
        self._between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self._between(self.first, x))


def pair(first: nn.Module, between: Callable[[Any, Any], Any], width: int = WIDTH) -> nn.Module:
    return Pair(first, nn.Linear(width, 3), between)


def called(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


def output_of(recurrent: nn.Module, x: Tensor) -> Tensor:
    return recurrent(x)[0]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        return sum(shares[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Lists(nn.Module):
    """Parameters in containers, beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(3))
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.randn(WIDTH))})
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.listed:
            x = torch.tanh(x @ weight)
        return self.layer(x) + self.named["shift"]


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.fft.fft(self.layer(x)) @ self.weight)


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(list(self.layers), 2, x, use_reentrant=False)


class Hooked(nn.Module):
    """Users' hooks that change what they see."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.first.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
        self.first.register_forward_hook(lambda module, args, output: output * 1.5)
        self.second.register_forward_pre_hook(lambda module, args: (args[0] + 1,))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(torch.tanh(x)))


class Empty(nn.Module):
    """Parameters without elements: of units that have others, and of one that has none."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Linear(WIDTH, 0)
        self.something = nn.Linear(WIDTH, 3)
        self.columns = nn.Parameter(torch.empty(3, 0))

    def forward(self, x: Tensor) -> Tensor:
        return self.something(x) + self.nothing(x).sum() + self.columns.sum()


class Vocabulary(nn.Module):
    """Its rarest words are projected to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 30, [5, 15])

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, WIDTH)
        return self.softmax(x, torch.arange(len(x), device=x.device) * 3 % 30).loss


class In(NamedTuple):
    make: Callable[[], nn.Module]
    inputs: Callable[[], Tensor] = sequences


def _attend(attention: Any, x: Tensor) -> Tensor:
    return attention(x, x, x)[0]


def _lowered(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return layer(x).relu().float()


def _again(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.tanh(layer(torch.tanh(layer(x)) + x))


MODELS = {
    "LSTM": In(lambda: pair(nn.LSTM(WIDTH, 6, 2, bidirectional=True, batch_first=True), output_of, 12)),
    "LSTM, projected": In(lambda: pair(nn.LSTM(WIDTH, 6, proj_size=4, batch_first=True), output_of, 4)),
    "GRU": In(lambda: pair(nn.GRU(WIDTH, 6, 2, batch_first=True), output_of, 6)),
    "LSTMCell, twice": In(
        lambda: pair(nn.LSTMCell(WIDTH, WIDTH), lambda cell, x: cell(x[:, 0], cell(x[:, 1]))[0])
    ),
    "MultiheadAttention": In(lambda: pair(nn.MultiheadAttention(WIDTH, 2, batch_first=True), _attend)),
    "MultiheadAttention, weights apart": In(
        lambda: pair(
            nn.MultiheadAttention(WIDTH, 2, kdim=WIDTH, vdim=WIDTH, add_bias_kv=True, batch_first=True),
            _attend,
        )
    ),
    "Transformer": In(
        lambda: pair(
            nn.Transformer(WIDTH, 2, 1, 1, 16, dropout=0.0, batch_first=True), lambda model, x: model(x, x)
        )
    ),
    "EmbeddingBag": In(lambda: pair(nn.EmbeddingBag(20, WIDTH), called), numbers),
    "Embedding, padded": In(lambda: pair(nn.Embedding(20, WIDTH, padding_idx=0), called), numbers),
    "weight_norm": In(lambda: pair(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), called)),
    "orthogonal": In(lambda: pair(parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), called)),
    "spectral_norm": In(lambda: pair(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), called)),
    "spectral_norm, by a hook": In(lambda: pair(spectral_norm(nn.Linear(WIDTH, WIDTH)), called)),
    "BatchNorm": In(lambda: pair(nn.BatchNorm1d(5), called)),
    "convolutions": In(
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.PReLU(6), nn.ConvTranspose2d(6, 4, 3)
        ),
        images,
    ),
    "Bilinear": In(lambda: pair(nn.Bilinear(WIDTH, WIDTH, 4), lambda layer, x: layer(x, x), 4)),
    "parameters in containers": In(Lists),
    "complex": In(Spectrum),
    "autocast": In(lambda: pair(nn.Linear(WIDTH, WIDTH), _lowered)),
    "checkpoint_sequential": In(Recomputed),
    "a layer, twice": In(lambda: pair(nn.Linear(WIDTH, WIDTH), _again)),
    "experts": In(Experts),
    "in place": In(
        lambda: nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)
        )
    ),
    "hooks": In(Hooked, lambda: sequences().requires_grad_()),
    "without elements": In(Empty),
    "AdaptiveLogSoftmax": In(Vocabulary),
}


def losses(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer | None = None) -> Tensor:
    """Of three steps and of a forward for evaluation after them."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=1e-2)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    model.eval()
    with torch.no_grad():
        found.append(model(x).square().mean())
    return torch.stack(found).cpu()
