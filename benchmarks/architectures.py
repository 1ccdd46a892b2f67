"""Checks that models of transformers train sharded as they do unsharded, and as with torch's FSDP2.

    pip install transformers
    PYTHONPATH=. python benchmarks/architectures.py

Small models of many architectures, built from their configs with random weights, on two gloo ranks. Units are the
layers that transformers itself does not split. Three steps, with the same random seeds. Two comparisons:

- in float32, with an unsharded copy whose gradients are averaged over ranks: the largest difference of any element of a
  parameter after the last step of SGD. 0 means bitwise equal. (AdamW would turn gradients that are nothing but rounding
  errors, such as those of an attention's key biases, into steps of full size.);
- in bf16 with float32 reduces, with FSDP2: whether every loss is bitwise equal, with AdamW.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import os
import platform
import sys
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp

import shardwise
from shardwise.testing import run_ranks

RESULTS = Path(__file__).parent / "results" / "architectures.json"
STEPS = 3
VOCABULARY, CLASSES = 96, 5


# --- the models -------------------------------------------------------------------------------------------------------


class Architecture(NamedTuple):
    model: str
    config: str
    sizes: dict[str, Any]
    batch: Callable[[torch.Generator], dict[str, Any]]


def text(random: torch.Generator) -> dict[str, Any]:
    tokens = torch.randint(3, VOCABULARY, (2, 10), generator=random)
    return {"input_ids": tokens, "labels": tokens}


def image(random: torch.Generator) -> dict[str, Any]:
    pixels = torch.randn(2, 3, 32, 32, generator=random)
    return {"pixel_values": pixels, "labels": torch.randint(CLASSES, (2,), generator=random)}


def image_and_text(random: torch.Generator) -> dict[str, Any]:
    tokens = torch.randint(3, VOCABULARY, (2, 10), generator=random)
    return {
        "input_ids": tokens,
        "pixel_values": torch.randn(2, 3, 32, 32, generator=random),
        "return_loss": True,
    }


def spectrum(random: torch.Generator) -> dict[str, Any]:
    labels = torch.randint(3, VOCABULARY, (2, 10), generator=random)
    return {"input_features": torch.randn(2, 8, 32, generator=random), "labels": labels}


def sound(random: torch.Generator) -> dict[str, Any]:
    labels = torch.randint(1, 20, (2, 4), generator=random)
    return {"input_values": torch.randn(2, 800, generator=random), "labels": labels}


BLOCKS = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
TEXT = {**BLOCKS, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
GROUPED = {**TEXT, "num_key_value_heads": 2}
BOTH_SIDES = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
}
ARCHITECTURES = {
    "Llama": Architecture("LlamaForCausalLM", "LlamaConfig", GROUPED, text),
    "Llama, tied": Architecture(
        "LlamaForCausalLM", "LlamaConfig", {**GROUPED, "tie_word_embeddings": True}, text
    ),
    "Mistral": Architecture("MistralForCausalLM", "MistralConfig", GROUPED, text),
    "Mixtral": Architecture("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4}, text),
    "Qwen2": Architecture("Qwen2ForCausalLM", "Qwen2Config", GROUPED, text),
    "Qwen3-MoE": Architecture(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            **GROUPED,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "head_dim": 8,
        },
        text,
    ),
    "Gemma 2": Architecture("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "head_dim": 8}, text),
    "Gemma 3": Architecture("Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, "head_dim": 8}, text),
    "Phi-3": Architecture("Phi3ForCausalLM", "Phi3Config", {**GROUPED, "pad_token_id": 0}, text),
    "GPT-2": Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        text,
    ),
    "GPT-NeoX": Architecture("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT, text),
    "OPT": Architecture(
        "OPTForCausalLM", "OPTConfig", {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32}, text
    ),
    "Falcon": Architecture("FalconForCausalLM", "FalconConfig", TEXT, text),
    "BLOOM": Architecture(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        text,
    ),
    "Mamba": Architecture(
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        text,
    ),
    "BERT": Architecture("BertForMaskedLM", "BertConfig", TEXT, text),
    "RoBERTa": Architecture("RobertaForMaskedLM", "RobertaConfig", TEXT, text),
    "DistilBERT": Architecture(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
        text,
    ),
    "DeBERTa": Architecture(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        text,
    ),
    "ALBERT": Architecture("AlbertForMaskedLM", "AlbertConfig", {**TEXT, "embedding_size": 16}, text),
    "T5": Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        text,
    ),
    "BART": Architecture("BartForConditionalGeneration", "BartConfig", BOTH_SIDES, text),
    "Whisper": Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **BOTH_SIDES,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "decoder_start_token_id": 1,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        spectrum,
    ),
    # No layerdrop: ranks that skip different layers at random cannot train together.
    "Wav2Vec2": Architecture(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        {
            **BLOCKS,
            "vocab_size": 20,
            "conv_dim": (16, 16),
            "conv_stride": (5, 2),
            "conv_kernel": (10, 3),
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 4,
            "mask_time_prob": 0.0,
            "layerdrop": 0.0,
            "ctc_zero_infinity": True,
        },
        sound,
    ),
    "ViT": Architecture(
        "ViTForImageClassification",
        "ViTConfig",
        {**BLOCKS, "image_size": 32, "patch_size": 8, "num_labels": CLASSES},
        image,
    ),
    "Swin": Architecture(
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": 32,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": CLASSES,
        },
        image,
    ),
    "ConvNeXt": Architecture(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2, "num_labels": CLASSES},
        image,
    ),
    "ResNet": Architecture(
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": CLASSES},
        image,
    ),
    "CLIP": Architecture(
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**TEXT, "eos_token_id": 2},
            "vision_config": {**BLOCKS, "image_size": 32, "patch_size": 8},
            "projection_dim": 16,
        },
        image_and_text,
    ),
}


def make(architecture: Architecture) -> nn.Module:
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, architecture.model)(
        getattr(transformers, architecture.config)(**copy.deepcopy(architecture.sizes))
    )
    return model.train()


def layers_of(model: nn.Module) -> tuple[type[nn.Module], ...]:
    names = set(getattr(model, "_no_split_modules", None) or ())
    return tuple({type(member) for member in model.modules() if type(member).__name__ in names})


def scalars_of(model: nn.Module) -> set[nn.Parameter]:
    """Returns the scalar parameters (a temperature, say), which neither ``fully_shard`` accepts."""
    return {param for param in model.parameters() if param.dim() == 0}


# --- training ---------------------------------------------------------------------------------------------------------


def train(
    model: nn.Module,
    architecture: Architecture,
    optimizer: torch.optim.Optimizer,
    after_backward: Callable[[], None] = lambda: None,
) -> list[float]:
    losses = []
    for step in range(STEPS):
        batch = architecture.batch(torch.Generator().manual_seed(100 * step + dist.get_rank()))
        torch.manual_seed(100 * step + dist.get_rank())
        loss: Tensor = model(**batch).loss
        loss.backward()
        after_backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def average(params: Any) -> None:
    for param in params:
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def apart(plain: nn.Module, whole: dict[str, Tensor]) -> float:
    return max(float((param - whole[name]).abs().max()) for name, param in plain.named_parameters())


def differences(architecture: Architecture) -> dict[str, float]:
    plain = make(architecture)
    train(plain, architecture, sgd(plain), lambda: average(plain.parameters()))
    found = {}

    model = make(architecture)
    ignored = scalars_of(model)
    shardwise.fully_shard(model, wrap=layers_of(model) or None, ignored_params=ignored)
    train(model, architecture, sgd(model), lambda: average(ignored))
    whole = {
        name: param.full_tensor() if hasattr(param, "full_tensor") else param
        for name, param in model.named_parameters()
    }
    found["fully_shard"] = apart(plain, whole)

    for use_orig_params in (False, True):
        inner = make(architecture)
        layers = layers_of(inner)
        wrapped = shardwise.FullyShardedDataParallel(
            inner,
            auto_wrap_policy=shardwise.ModuleWrapPolicy(set(layers)) if layers else None,
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
        )
        train(wrapped, architecture, sgd(wrapped))
        with shardwise.FullyShardedDataParallel.summon_full_params(wrapped):
            named = {name: param.detach().clone() for name, param in wrapped.named_parameters()}
        found["wrapper, use_orig_params" if use_orig_params else "wrapper"] = apart(plain, named)
    return found


def beside_fsdp2(architecture: Architecture) -> str:
    """Trains the same program with shardwise and with FSDP2 and compares the losses."""
    ways: dict[str, Any] = {"FSDP2": fsdp, "shardwise": shardwise}
    losses: dict[str, list[float] | str] = {}
    for name, way in ways.items():
        model = make(architecture)
        options = {
            "mp_policy": way.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            "ignored_params": scalars_of(model),
        }
        try:
            layers = [member for member in model.modules() if isinstance(member, layers_of(model))]
            for layer in reversed(layers):  # inner ones first
                way.fully_shard(layer, **options)
            way.fully_shard(model, **options)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            reduce_rest = partial(average, options["ignored_params"])
            losses[name] = train(model, architecture, optimizer, reduce_rest)
        except Exception as error:  # noqa: BLE001  a failure is a result, too
            losses[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    failed = [f"{name} fails ({told})" for name, told in losses.items() if isinstance(told, str)]
    if failed:
        return "; ".join(failed)
    return "the same" if losses["FSDP2"] == losses["shardwise"] else f"apart: {losses}"


def compare(names: list[str]) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    found = {}
    for name in names:
        architecture = ARCHITECTURES[name]
        with_plain = differences(architecture)
        found[name] = {"from plain": with_plain, "beside FSDP2 in bf16": beside_fsdp2(architecture)}
        if dist.get_rank() == 0:
            print(f"{name:>12}: {found[name]}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="of architectures; default: all, written to a results file")
    args = parser.parse_args()
    transformers = importlib.import_module("transformers")
    found = run_ranks(compare, 2, args.names or list(ARCHITECTURES), kind="gloo", timeout_seconds=900)[0]
    if not args.names:
        result = {
            "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": {
                "transformers": transformers.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "architectures": found,
        }
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {os.path.relpath(RESULTS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
