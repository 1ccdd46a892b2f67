"""What a recipe's model must do, and a module of your own as one; `llama` and `hugging_face` have the other kinds.

A model source builds an unsharded module and knows nothing about ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError

__all__ = ["ModelSource", "OwnModel", "segment_mask", "segment_positions"]


class ModelSource(ABC):
    """Builds the model of a run, a module that computes logits from tokens."""

    context: int
    vocabulary: int
    builds_on_meta = False
    """Whether parameters are built without values, which ``fill`` writes once they are sharded."""

    @abstractmethod
    def build(self) -> nn.Module:
        """Builds the module, the same on every rank; the default random generator is seeded."""

    @abstractmethod
    def units(self, module: nn.Module) -> tuple[type[nn.Module], ...]:
        """Returns the classes whose instances are each sharded, recomputed and compiled as a unit."""

    def check(self) -> None:
        for name in ("context", "vocabulary"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"model.{name} is {getattr(self, name)}", where="the model", fix="use 1 or more"
                )

    def resolved(self) -> ModelSource:
        """Returns the source with everything that its files say filled in.

        Raises:
            ConfigError: there are no such files, or they contradict the settings.
        """
        return self

    def fill(self, name: str, values: Tensor, generator: torch.Generator) -> None:
        """Writes the initial values of a whole parameter."""
        raise NotImplementedError

    def logits(self, output: Any) -> Tensor:
        """Returns the logits from the module's output: a tensor, a tuple that has them, or what has ``.logits``.

        Raises:
            ConfigError: it is none of these.
        """
        found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if found is None and isinstance(output, Mapping):
            found = output.get("logits")
        if found is None and isinstance(output, tuple | list):
            # (logits, loss), or (loss, logits, ...)
            found = next((each for each in output if isinstance(each, Tensor) and each.dim() == 3), None)
        if not isinstance(found, Tensor):
            raise ConfigError(
                f"the model returned {_described(output)}, which has no logits",
                where=type(self).__name__,
                fix="return the logits of every token, or an object whose attribute 'logits' has them",
            )
        return found

    def check_logits(self, logits: Tensor, tokens: Tensor) -> None:
        """Raises ConfigError if these are not the logits of every one of ``tokens``."""
        if logits.shape[:-1] != tokens.shape or logits.size(-1) < self.vocabulary:
            raise ConfigError(
                f"the model returned logits of shape {tuple(logits.shape)} for tokens of shape {tuple(tokens.shape)} "
                f"and a vocabulary of {self.vocabulary}",
                where=type(self).__name__,
                fix="return one logit per token of the vocabulary, at every position; if the vocabulary is another, "
                "set model.vocabulary",
            )

    def extend(self, module: nn.Module, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Returns the logits after the last of ``tokens``, which follow those of ``cache``, and the new cache.

        For a model that keeps no keys and values, the cache is all tokens so far, and all of them run again.
        """
        tokens = tokens if cache is None else torch.cat((cache, tokens), dim=1)
        return self.logits(module(tokens))[:, -1], tokens

    def segment_arguments(self, segments: Tensor) -> dict[str, Any]:
        """Returns the arguments that make the module keep the segments of packed sequences apart."""
        raise ConfigError(
            f"{type(self).__name__} does not keep packed conversations apart",
            where="data.packing",
            fix="use data.packing=false, which pads instead, or override segment_arguments",
        )

    def flops_of_token(self, module: nn.Module) -> float:
        """Returns the FLOPs of forward and backward for one token: six per parameter."""
        return 6.0 * sum(param.numel() for param in module.parameters())

    def hugging_face_config(self) -> dict[str, Any] | None:
        """Returns the ``config.json`` to write beside exported weights, if there is one."""
        return None


@dataclass(frozen=True)
class OwnModel(ModelSource):
    """A module of your own.

    Args:
        make: builds the module; called once on each rank, with the random generator seeded.
        unit: the class, or classes, of its blocks.
        context: tokens in a sequence.
        vocabulary: the number of different tokens.
    """

    make: Callable[[], nn.Module]
    unit: type[nn.Module] | tuple[type[nn.Module], ...]
    context: int = 128
    vocabulary: int = 256

    def build(self) -> nn.Module:
        return self.make()

    def units(self, module: nn.Module) -> tuple[type[nn.Module], ...]:
        return self.unit if isinstance(self.unit, tuple) else (self.unit,)


def _described(output: Any) -> str:
    """Returns what an output is, in words: its type, and what it contains."""
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} of {', '.join(map(str, output)) or 'nothing'}"
    if isinstance(output, tuple | list):
        return f"a {type(output).__name__} of {', '.join(map(_described, output)) or 'nothing'}"
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    return "None" if output is None else f"a {type(output).__name__}"


# --- packed sequences ---------------------------------------------------------------------------------------------


def segment_positions(segments: Tensor) -> Tensor:
    """Returns the position of each token in its segment; segments are numbers that do not repeat along a row."""
    places = torch.arange(segments.size(1), device=segments.device).expand_as(segments)
    is_first = torch.ones_like(segments, dtype=torch.bool)
    is_first[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return places - places.where(is_first, 0).cummax(dim=1).values


def segment_mask(segments: Tensor) -> Tensor:
    """Returns which tokens each token sees, for all heads: itself, and those before it in its segment."""
    same = segments[:, None, :, None] == segments[:, None, None, :]
    return same.tril()
