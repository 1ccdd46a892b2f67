"""Our own Llama: its sizes, which a recipe chooses, and its modules.

The modules have the names of Hugging Face's Llama, so that exported checkpoints load there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the name everyone knows
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.train.model import ModelSource, segment_mask, segment_positions

__all__ = ["KeyValueCache", "Llama", "LlamaBlock", "LlamaModel"]


@dataclass(frozen=True)
class Llama(ModelSource):
    layers: int = 4
    """Transformer blocks."""
    width: int = 128
    """The width of the residual stream; a multiple of 2 × heads."""
    heads: int = 4
    """Attention heads."""
    kv_heads: int = 4
    """Heads of keys and values, which ``heads`` is a multiple of; fewer is grouped-query attention."""
    hidden: int = 352
    """The width inside the feed-forward layers."""
    vocabulary: int = 256
    """The number of different tokens."""
    context: int = 128
    """Tokens in a sequence."""
    tied: bool = False
    """Whether the embedding and the output layer share their weight."""
    theta: float = 10000.0
    """The base of the rotary embedding's wavelengths."""
    eps: float = 1e-5
    """The epsilon of the norms."""

    builds_on_meta = True

    @staticmethod
    def of_hugging_face(config: Mapping[str, Any]) -> Llama | None:
        """Returns the Llama that a ``config.json`` describes; None if it is another model, or has what ours has not."""
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        unlike = (
            config.get("model_type") != "llama"
            or rope.get("rope_type", rope.get("type", "default")) != "default"
            or config.get("attention_bias")
            or config.get("mlp_bias")
            or config.get("hidden_act", "silu") != "silu"
        )
        if unlike:
            return None
        try:
            width, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            if config.get("head_dim", width // heads) != width // heads:
                return None
            return Llama(
                layers=int(config["num_hidden_layers"]),
                width=width,
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                hidden=int(config["intermediate_size"]),
                vocabulary=int(config["vocab_size"]),
                context=int(config["max_position_embeddings"]),
                tied=bool(config.get("tie_word_embeddings", False)),
                theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
                eps=float(config.get("rms_norm_eps", 1e-6)),
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            return None

    def check(self) -> None:
        super().check()
        for name in ("layers", "width", "heads", "kv_heads", "hidden"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"model.{name} is {getattr(self, name)}", where="Llama", fix="use 1 or more"
                )
        if self.width % (2 * self.heads) or self.heads % self.kv_heads:
            raise ConfigError(
                f"a width of {self.width} cannot be divided among {self.heads} heads and {self.kv_heads} kv_heads",
                where="Llama",
                fix="make width a multiple of 2 × heads, and heads a multiple of kv_heads",
            )

    def build(self) -> nn.Module:
        return LlamaModel(self)

    def units(self, module: nn.Module) -> tuple[type[nn.Module], ...]:
        return (LlamaBlock,)

    def fill(self, name: str, values: Tensor, generator: torch.Generator) -> None:
        if values.dim() == 1:
            values.fill_(1.0)
            return
        # Layers that write to the residual stream start smaller, so that its variance does not grow with depth.
        into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = 0.02 / math.sqrt(2 * self.layers) if into_stream else 0.02
        values.normal_(0.0, std, generator=generator)

    def extend(self, module: nn.Module, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        cache = KeyValueCache(self.layers) if cache is None else cache
        return module(tokens, cache)[:, -1], cache

    def segment_arguments(self, segments: Tensor) -> dict[str, Any]:
        return {"segments": segments}

    def flops_of_token(self, module: nn.Module) -> float:
        embedding = 0 if self.tied else self.vocabulary * self.width
        multiplied = sum(param.numel() for param in module.parameters()) - embedding
        return 6.0 * multiplied + 12.0 * self.layers * self.width * self.context

    def hugging_face_config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "hidden_act": "silu",
            "hidden_size": self.width,
            "intermediate_size": self.hidden,
            "max_position_embeddings": self.context,
            "mlp_bias": False,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "tie_word_embeddings": self.tied,
            "vocab_size": self.vocabulary,
        }


# --- modules ------------------------------------------------------------------------------------------------------


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class LayerCache:
    """The keys and values that one layer has computed, for the tokens after them."""

    def __init__(self) -> None:
        self._keys_and_values: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        return 0 if self._keys_and_values is None else self._keys_and_values[0].size(2)

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the keys and values of new tokens, and returns those of all tokens."""
        if self._keys_and_values is not None:
            keys, values = self._keys_and_values
            key, value = torch.cat((keys, key), dim=2), torch.cat((values, value), dim=2)
        self._keys_and_values = key, value
        return key, value


class KeyValueCache:
    """The keys and values of all layers, so that generation computes each token once."""

    def __init__(self, num_layers: int) -> None:
        self.layers = [LayerCache() for _ in range(num_layers)]

    @property
    def length(self) -> int:
        return self.layers[0].length


class _Attention(nn.Module):
    def __init__(self, config: Llama) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.head_width = config.width // config.heads
        kv_width = self.kv_heads * self.head_width
        self.q_proj = _linear(config.width, config.width)
        self.k_proj = _linear(config.width, kv_width)
        self.v_proj = _linear(config.width, kv_width)
        self.o_proj = _linear(config.width, config.width)

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: LayerCache | None, mask: Tensor | None
    ) -> Tensor:
        batch, length, _ = x.shape
        # With tensor parallelism, each rank has some of the heads.
        query = self.q_proj(x).view(batch, length, -1, self.head_width).transpose(1, 2)
        key = self.k_proj(x).view(batch, length, -1, self.head_width).transpose(1, 2)
        value = self.v_proj(x).view(batch, length, -1, self.head_width).transpose(1, 2)
        query, key = _rotated(query, *rotation), _rotated(key, *rotation)
        if cache is not None and cache.length:
            mask = _causal_mask(length, cache.length, x.device)
        if cache is not None:
            key, value = cache.extend(key, value)
        shares_keys = self.heads != self.kv_heads
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=shares_keys
        )
        joined: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return joined


def _causal_mask(length: int, before: int, device: torch.device) -> Tensor:
    """Returns which of ``before + length`` tokens each of the last ``length`` sees: itself and all before it."""
    return torch.ones(length, before + length, dtype=torch.bool, device=device).tril(before)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class _FeedForward(nn.Module):
    def __init__(self, config: Llama) -> None:
        super().__init__()
        self.gate_proj = _linear(config.width, config.hidden)
        self.up_proj = _linear(config.width, config.hidden)
        self.down_proj = _linear(config.hidden, config.width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class LlamaBlock(nn.Module):
    def __init__(self, config: Llama) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.width, config.eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.width, config.eps)
        self.mlp = _FeedForward(config)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), (cos, sin), cache, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Trunk(nn.Module):
    def __init__(self, config: Llama) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, config.eps)
        self.head_width, self.theta = config.width // config.heads, config.theta

    def forward(
        self, tokens: Tensor, cache: KeyValueCache | None = None, segments: Tensor | None = None
    ) -> Tensor:
        x = self.embed_tokens(tokens)
        start, mask = 0 if cache is None else cache.length, None
        positions = torch.arange(start, start + tokens.size(1), device=tokens.device)
        if segments is not None:
            # With one axis for the heads.
            positions, mask = segment_positions(segments)[:, None], segment_mask(segments)
        cos, sin = self.rotations(positions, x)
        for number, layer in enumerate(self.layers):
            x = layer(x, cos, sin, None if cache is None else cache.layers[number], mask)
        out: Tensor = self.norm(x)
        return out

    def rotations(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the cosines and sines that turn queries and keys at these positions."""
        half = torch.arange(0, self.head_width, 2, device=like.device, dtype=torch.float32)
        speeds = 1.0 / self.theta ** (half / self.head_width)
        angles = positions.to(torch.float32)[..., None] * speeds
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class LlamaModel(nn.Module):
    """Tokens in, logits out: of all tokens, or with a cache of keys and values only of the last one."""

    def __init__(self, config: Llama) -> None:
        super().__init__()
        self.model = _Trunk(config)
        self.lm_head = _linear(config.width, config.vocabulary)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, tokens: Tensor, cache: KeyValueCache | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """Computes logits; ``segments`` are the numbers of packed texts, which do not see one another."""
        x = self.model(tokens, cache, segments)
        logits: Tensor = self.lm_head(x if cache is None else x[:, -1:])
        return logits
