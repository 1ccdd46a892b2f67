"""What one call of torch costs a device: its kind, floating-point operations, and bytes read and written."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from shardwise.planning.layout import aligned

aten = torch.ops.aten

ATTENTION_PACKETS = {
    name
    for name in dir(aten)
    if name.startswith("_scaled_dot_product")
    or name in ("_flash_attention_forward", "_flash_attention_backward")
}
_MATRIX_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}
_MATMULS = _MATRIX_PRODUCTS | {
    "convolution",
    "convolution_backward",
    "_scaled_mm",
    "_grouped_mm",
}
_REDUCTIONS = {
    "sum",
    "mean",
    "amax",
    "argmax",
    "norm",
    "linalg_vector_norm",
    "_softmax",
    "_log_softmax",
    "_softmax_backward_data",
    "_log_softmax_backward_data",
    "native_layer_norm",
    "native_layer_norm_backward",
    "rms_norm",
    "rms_norm_backward",
    "nll_loss_forward",
    "_foreach_norm",
    "cumsum",
}
_COPIES = {
    "copy_",
    "_to_copy",
    "clone",
    "cat",
    "stack",
    "_foreach_copy_",
    "_chunk_cat",
    "split_with_sizes_copy",
}
# Read a few elements of a large tensor, and write as many.
_LOOKUPS = {"embedding", "index", "gather", "index_select", "nll_loss_forward"}
# Write all of their output, and read little.
_SCATTERS = {"embedding_dense_backward", "nll_loss_backward"}
_ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


def kind_of(packet: str) -> str:
    """The price that an op has."""
    if packet in ATTENTION_PACKETS:
        return "attention"
    if packet in _MATMULS:
        return "matmul"
    if packet in _REDUCTIONS:
        return "reduction"
    if packet in _ALLOCATIONS:
        return "view"
    return "copy" if packet in _COPIES else "elementwise"


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """The floating-point operations of matrix products and attention; others are limited by their bytes."""
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return 0
    is_attention = func._overloadpacket._qualified_op_name.split("::")[1] in ATTENTION_PACKETS
    if is_attention:
        args = _with_all_heads(func, args)
    flops = int(count(*args, **kwargs, out_val=out))
    if is_attention and _is_causal(func, args, kwargs):
        # Kernels skip what the mask hides.
        flops //= 2
    return flops


def _with_all_heads(func: Any, args: Sequence[Any]) -> list[Any]:
    """The arguments with as many heads in keys and values as in queries: torch 2.11 counts no others."""
    positions = {argument.name: index for index, argument in enumerate(func._schema.arguments)}
    given = list(args)
    if positions.keys() >= {"query", "key", "value"} and given[positions["query"]].dim() == 4:
        heads = given[positions["query"]].shape[1]
        for name in ("key", "value"):
            tensor = given[positions[name]]
            if tensor.shape[1] not in (0, heads):
                given[positions[name]] = tensor[:, :1].expand(-1, heads, -1, -1)
    return given


def _is_causal(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal":
            return bool(kwargs.get("is_causal", args[index] if index < len(args) else argument.default_value))
    return False


def bytes_of(
    packet: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], mutates: bool
) -> int:
    """Bytes that a kernel reads and writes."""
    written = sum(map(_num_bytes, outputs))
    if packet in _LOOKUPS:
        return 2 * written
    if packet in _SCATTERS:
        # A fill with zeros, then the elements.
        return written + min((_num_bytes(each) for each in inputs), default=0) * 2
    read = sum(map(_num_bytes, inputs))
    if packet in ("copy_", "_foreach_copy_"):
        # What is overwritten is not read.
        return read
    return read + written


def _num_bytes(tensor: torch.Tensor) -> int:
    """The bytes that are touched: those of an expanded tensor count once."""
    shape = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 1]
    return prod(shape) * tensor.element_size()


def is_aligned(packet: str, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the kernels of a product of 16-bit matrices can move 16 bytes at a time: all rows begin at multiples.

    A vocabulary of 50,257 is not aligned, and one of 50,304 is.
    """
    if packet not in _MATRIX_PRODUCTS:
        return True
    matrices = [each for each in tensors if each.dim() > 1 and each.element_size() == 2]
    return all(
        stride * each.element_size() % 16 == 0
        for each in matrices
        for size, stride in zip(each.shape, each.stride(), strict=True)
        if size > 1 and stride != 1
    )


def temporaries_of(packet: str, inputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Bytes of the memory that a kernel takes while it runs, beside its outputs.

    Flash attention's backward sums the gradients of queries in float32, and has gradients of keys and values for
    every head of the queries.
    """
    if packet != "_scaled_dot_product_flash_attention_backward":
        return ()
    query, key = inputs[1], inputs[2]
    batch, heads, length, head = query.shape
    rows = batch * heads * aligned(length, 128)
    found = [4 * rows, 4 * rows * aligned(head, 32)]
    if key.shape[1] != heads:
        found += 2 * [batch * heads * key.shape[2] * head * key.element_size()]
    return tuple(found)
