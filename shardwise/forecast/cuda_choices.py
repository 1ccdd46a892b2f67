"""What torch does differently on CUDA than on the meta device: fused kernels instead of their parts.

    scaled_dot_product_attention   flash attention for half precision without a mask, memory-efficient attention where
                                   it applies, the plain formula otherwise
    rms_norm                       one kernel where input and weight have one dtype, which saves a number a row
    dropout                        one kernel, which saves a mask of bools

A matrix product, a convolution or a softmax is the same call on both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from shardwise.forecast.recording import TapeRecorder
from shardwise.forecast.tape import Op
from shardwise.torch_internals import efficient_attention, flash_attention, replaced_functions

_HALF = (torch.bfloat16, torch.float16)
# The widest head that flash attention takes.
_WIDEST_HEAD = 256


@contextmanager
def choosing_as_cuda(recorder: TapeRecorder, fuses_norms: bool = True) -> Iterator[None]:
    """Within it, these functions of ``torch.nn.functional`` do on meta tensors what CUDA would.

    A CPU does the same but for norms, which it does not fuse.
    """
    attention, rms_norm, dropout = (
        functional.scaled_dot_product_attention,
        functional.rms_norm,
        functional.dropout,
    )

    def chosen_attention(query: Any, *args: Any, **kwargs: Any) -> Any:
        return (_attention if query.is_meta else attention)(query, *args, **kwargs)

    def chosen_rms_norm(
        input: Any,  # noqa: A002  the name that callers may use
        normalized_shape: Any,
        weight: Any = None,
        eps: float | None = None,
    ) -> Any:
        mixed = weight is not None and weight.dtype != input.dtype
        # A compiler makes a kernel of the parts.
        if not fuses_norms or not input.is_meta or mixed or torch.compiler.is_compiling():
            return rms_norm(input, normalized_shape, weight, eps)
        return _RmsNorm.apply(input, len(normalized_shape), weight, recorder)

    def chosen_dropout(
        input: Any,  # noqa: A002  as above
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Any:
        if not input.is_meta or inplace or not training or not 0.0 < p < 1.0:
            return dropout(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]

    with replaced_functions(
        functional,
        scaled_dot_product_attention=chosen_attention,
        rms_norm=chosen_rms_norm,
        dropout=chosen_dropout,
    ):
        yield


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    head = query.shape[-1]
    same_heads = query.shape[-3] == key.shape[-3] if query.dim() > 2 else True
    if query.dim() == 4 and attn_mask is None and query.dtype in _HALF and head <= _WIDEST_HEAD:
        padding = -head % 8
        if padding:
            scale = head**-0.5 if scale is None else scale
            query, key, value = (functional.pad(each, (0, padding)) for each in (query, key, value))
        out = flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :head] if padding else out
    if query.dim() == 4 and same_heads and query.dtype in (*_HALF, torch.float32) and head % 8 == 0:
        needs_lse = any(each.requires_grad for each in (query, key, value)) and torch.is_grad_enabled()
        mask = _as_bias(attn_mask, query, key)
        return efficient_attention(query, key, value, mask, needs_lse, dropout_p, is_causal, scale=scale)[0]
    return torch.ops.aten.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _as_bias(mask: Any, query: Any, key: Any) -> Any:
    """The mask as the kernel takes it: added to the scores, expanded over the heads."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(
            ~mask, float("-inf")
        )
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, dims: int, weight: Any, recorder: TapeRecorder) -> Any:
        x = x.contiguous()
        out = torch.empty_like(x)
        rows = torch.empty(x.shape[: x.dim() - dims], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, rows)
        ctx.recorder = recorder
        recorder.tape.append(Op("rms_norm", "reduction", recorder.stream, 0, 2 * x.nbytes, _dtype(x)))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        recorder = ctx.recorder
        gradient = gradient.contiguous()
        of_input = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        of_weight = torch.empty_like(weight) if weight is not None and ctx.needs_input_grad[2] else None
        recorder.tape.append(
            Op("rms_norm_backward", "reduction", recorder.stream, 0, 3 * x.nbytes, _dtype(x))
        )
        if of_weight is not None:
            # A second kernel reads both again and sums over the rows.
            recorder.tape.append(
                Op("rms_norm_backward", "reduction", recorder.stream, 0, 2 * x.nbytes, _dtype(x))
            )
        return of_input, None, of_weight, None


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
