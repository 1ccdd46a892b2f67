"""Divides the built-in Llama's matrices among ranks, with torch's ``parallelize_module``, before it is sharded.

    block     norm on a part of the tokens ─▶ all tokens ─▶ columns of q, k, v / gate, up ─▶ rows of o / down ─┐
                 ▲                                                                                             │
                 └──────────────────────── summed, each rank a part of the tokens ◀────────────────────────────┘
    ends      rows of the embedding by token; columns of the head, whose loss is computed without gathering logits

Between the blocks each rank has a part of every sequence, so sequences are padded to a multiple of the group's size.
"""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812  the name everyone knows
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardwise.train.llama import LlamaModel

__all__ = ["divide_matrices", "padded_to_multiple", "whole"]

_PADDING_SEGMENT = -1


def divide_matrices(model: LlamaModel, mesh: DeviceMesh) -> None:
    """Divides the matrices of a model among the ranks of a mesh of one axis; the model may be on the meta device."""
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    parallelize_module(
        model,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    if is_tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    for block in model.model.layers:
        parallelize_module(
            block,
            mesh,
            {
                "input_layernorm": SequenceParallel(),
                # The rotation, the cache and the mask are the same on all ranks.
                "self_attn": PrepareModuleInput(
                    input_layouts=(Shard(1), None, None, None),
                    desired_input_layouts=(Replicate(), None, None, None),
                ),
                "self_attn.q_proj": ColwiseParallel(),
                "self_attn.k_proj": ColwiseParallel(),
                "self_attn.v_proj": ColwiseParallel(),
                "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
                "post_attention_layernorm": SequenceParallel(),
                "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
            },
        )


def padded_to_multiple(tokens: Tensor, segments: Tensor | None, size: int) -> tuple[Tensor, Tensor | None]:
    """Pads sequences at their ends, which no token before sees."""
    missing = -tokens.size(1) % size
    if not missing:
        return tokens, segments
    padded = None if segments is None else F.pad(segments, (0, missing), value=_PADDING_SEGMENT)
    return F.pad(tokens, (0, missing)), padded


def whole(tensor: Tensor) -> Tensor:
    """Gathers a tensor that is divided among ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
