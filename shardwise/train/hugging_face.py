"""A model of ``transformers`` in a recipe: what its files say about it, its units, its logits and its cache."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.train.hub import check_name, load_from_hub
from shardwise.train.model import ModelSource, segment_mask, segment_positions
from shardwise.train.optional_packages import require

__all__ = ["HuggingFaceModel"]

_USUAL_CONTEXT = 1024


@dataclass(frozen=True)
class HuggingFaceModel(ModelSource):
    """A causal language model of ``transformers``, by folder or name, with its weights or only its config.

    Args:
        path: a folder, or a name on Hugging Face's hub.
        pretrained: start from its weights; otherwise from new ones.
        context: tokens in a sequence; 0: 1024, or the longest that the model takes if that is less.
        vocabulary: the number of different tokens; 0: as many as the model knows.
    """

    path: str = ""
    pretrained: bool = True
    context: int = 0
    vocabulary: int = 0

    def check(self) -> None:
        check_name(self.path, "model")
        # 0 is for what `resolved` reads.
        for name in ("context", "vocabulary"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"model.{name} is {getattr(self, name)}", where="the model", fix="use 1 or more"
                )

    def resolved(self) -> HuggingFaceModel:
        config = self._config()
        if config.is_encoder_decoder:
            raise ConfigError(
                f"'{self.path}' is an encoder-decoder ({config.model_type}), which does not go on with a text",
                where=self._where,
                fix="pass a causal language model such as gpt2, or train it in a loop of your own",
            )
        text = config.get_text_config()
        known, longest = text.vocab_size, getattr(text, "max_position_embeddings", None) or None
        if self.vocabulary > known:
            raise ConfigError(
                f"model.vocabulary is {self.vocabulary}, but the model knows {known} tokens",
                where=self._where,
                fix="leave model.vocabulary out: it is read from the model's config",
            )
        if longest is not None and self.context > longest:
            raise ConfigError(
                f"model.context is {self.context}, but the model takes at most {longest} tokens",
                where=self._where,
                fix=f"use model.context={longest} or less",
            )
        context = self.context or min(_USUAL_CONTEXT, longest or _USUAL_CONTEXT)
        return dataclasses.replace(self, context=context, vocabulary=self.vocabulary or known)

    def build(self) -> nn.Module:
        loader = require("transformers", "a Hugging Face model").AutoModelForCausalLM
        if self.pretrained:
            module: nn.Module = load_from_hub(loader, self.path, "model", dtype=torch.float32)
        else:
            module = loader.from_config(self._config()).float()
        # The key-value cache is for generation; in training it only takes memory.
        module.config.use_cache = False  # type: ignore[union-attr]
        module.config.return_dict = True  # type: ignore[union-attr]
        return module.train()

    def units(self, module: nn.Module) -> tuple[type[nn.Module], ...]:
        names = set(getattr(module, "_no_split_modules", None) or ())
        found = {type(member) for member in module.modules() if type(member).__name__ in names}
        if not found:
            raise ConfigError(
                f"{type(module).__name__} does not say which of its modules are blocks",
                where=self._where,
                fix="write a recipe with OwnModel(make=..., unit=ItsBlock)",
            )
        return tuple(found)

    def extend(self, module: nn.Module, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        output = module(tokens, past_key_values=cache, use_cache=True)
        return self.logits(output)[:, -1], output.past_key_values

    def segment_arguments(self, segments: Tensor) -> dict[str, Any]:
        is_seen = segment_mask(segments)
        # Added to the scores, which every attention of transformers understands; some would add True and False.
        mask = torch.zeros(is_seen.shape, device=segments.device).masked_fill(~is_seen, -math.inf)
        return {"position_ids": segment_positions(segments), "attention_mask": mask}

    def hugging_face_config(self) -> dict[str, Any] | None:
        own = Path(self.path).expanduser() / "config.json"
        text = own.read_text() if own.exists() else self._config().to_json_string()
        config: dict[str, Any] = json.loads(text)
        return config

    @property
    def _where(self) -> str:
        return f"HuggingFaceModel({self.path!r})"

    def _config(self) -> Any:
        return load_from_hub(require("transformers", "a Hugging Face model").AutoConfig, self.path, "model")
