"""Chooses the next token from a model's logits: pure arithmetic, the same on every machine for the same logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ConfigError, StateError

__all__ = ["Sampling", "draw", "probabilities", "tokens_after"]

Extend = Callable[[list[int], Any], tuple[Tensor, Any]]
"""Returns the logits after the last of these tokens, which follow those of the cache, and the new cache."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Args:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: only the so many most likely tokens; 0: all.
        top_p: only the most likely tokens that together have this probability.
        seed: the seed of the draws, any whole number.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, holds, fix in (
            ("temperature", self.temperature, 0 <= self.temperature < math.inf, "use 0 or more, such as 0.8"),
            ("top-k", self.top_k, self.top_k >= 0, "use 0 for all tokens, or a number such as 40"),
            ("top-p", self.top_p, 0 < self.top_p <= 1, "use a fraction such as 0.95, or 1 for all tokens"),
        ):
            if not holds:
                raise ConfigError(f"{name} is {value}", where=f"--{name}", fix=fix)


def probabilities(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Returns the tokens that may be drawn, the most likely first, and their probabilities.

    Raises:
        StateError: a logit is not a number.
    """
    values = logits.detach().to("cpu", torch.float64)
    if bool(values.isnan().any()):
        raise StateError(
            "the model's output is not a number",
            where="generation",
            fix="use a checkpoint from before the loss became nan",
        )
    # Sorted stably: of equal logits, the lower token comes first on every machine.
    values, tokens = values.sort(descending=True, stable=True)
    if sampling.temperature == 0:
        return tokens[:1], torch.ones(1, dtype=torch.float64)
    chances = torch.softmax(values / sampling.temperature, dim=0)
    count = chances.numel()
    if sampling.top_k:
        count = min(count, sampling.top_k)
    if sampling.top_p < 1:
        before = chances.cumsum(0) - chances
        count = min(count, int((before < sampling.top_p).sum()))
    chances = chances[:count]
    return tokens[:count], chances / chances.sum()


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draws a token; uses one random number, whatever the settings."""
    tokens, chances = probabilities(logits, sampling)
    number = torch.rand((), dtype=torch.float64, generator=generator)
    return int(tokens[min(int((chances.cumsum(0) <= number).sum()), tokens.numel() - 1)])


def tokens_after(
    prompt: list[int], extend: Extend, context: int, choose: Callable[[Tensor], int]
) -> Iterator[int]:
    """Yields tokens after a prompt, without end.

    When the text is longer than the model's context, generation goes on from its last half, which runs again.
    """
    seen, new, cache = prompt[-context:], prompt[-context:], None
    while True:
        logits, cache = extend(new, cache)
        token = choose(logits)
        yield token
        seen.append(token)
        new = [token]
        if len(seen) > context:
            seen = seen[-max(1, context // 2) :]
            new, cache = list(seen), None
