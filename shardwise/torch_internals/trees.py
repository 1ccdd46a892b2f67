"""Tensors: storages, kernels over lists of tensors, trees of tensors, and CUDA streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Returns the reference count of a storage."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def tensor_over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> torch.Tensor:
    """Returns a tensor over a storage that may still be too small for it; ``offset`` is in elements.

    ``set_`` would resize the storage, and so allocate memory.
    """
    nothing = torch.empty(0, dtype=dtype, device=storage.device)
    nothing.set_(storage, 0, (0,), (1,))
    made: torch.Tensor = torch.ops.inductor._reinterpret_tensor(nothing, shape, strides, offset)
    return made


copy_all: Callable[[list[torch.Tensor], list[torch.Tensor]], object] = torch._foreach_copy_
add_all: Callable[[list[torch.Tensor], list[torch.Tensor]], object] = torch._foreach_add_


def chunk_cat(tensors: list[torch.Tensor], num_chunks: int, rows: torch.Tensor) -> None:
    """Splits each tensor along dim 0 into ``num_chunks``, zero-padded, and copies chunk i of all of them into row i."""
    torch._chunk_cat(tensors, 0, num_chunks, out=rows)


zero_all: Callable[[list[torch.Tensor]], object] = torch._foreach_zero_


def multiply_all(targets: list[torch.Tensor], factor: torch.Tensor) -> None:
    torch._foreach_mul_(targets, factor)


def unscale_all(tensors: list[torch.Tensor], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    """Multiplies tensors of one device and dtype by ``inverse``; sets ``found_inf`` to 1 if any is not finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, inverse)


def norms_of(tensors: list[torch.Tensor], order: float, together: bool) -> list[torch.Tensor]:
    """Returns the norm of each tensor in float32 or wider; all have one device and dtype, and none is empty."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    if together:
        return list(torch._foreach_norm(tensors, order, dtype=dtype))
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


StreamKey = tuple[int, int, int]


def current_cuda_stream(device_index: int) -> StreamKey:
    """Returns a key of the current stream: ten times as fast as the stream object."""
    return torch._C._cuda_getCurrentStream(device_index)


def set_cuda_stream(key: StreamKey) -> None:
    """``torch.cuda.set_stream`` without its checks."""
    torch._C._cuda_setStream(*key)


def cuda_stream(key: StreamKey) -> torch.cuda.Stream:
    stream_id, device_index, device_type = key
    return torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


def cuda_event() -> torch.cuda.Event:
    """Returns a blocking event, of the base class of ``torch.cuda.Event``, whose methods only forward to it."""
    return cast(torch.cuda.Event, torch._C._CudaEventBase(blocking=True))


def raw_cuda_stream(device_index: int) -> int:
    """Returns the current stream as a CUDA handle."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def same_structure(one: Any, other: Any) -> bool:
    """Returns whether two trees have the same containers, with tensors at the same leaves and equal other leaves."""
    leaves, shape = tree_flatten(one)
    other_leaves, other_shape = tree_flatten(other)
    return shape == other_shape and all(
        isinstance(a, torch.Tensor) == isinstance(b, torch.Tensor) and (isinstance(a, torch.Tensor) or a == b)
        for a, b in zip(leaves, other_leaves, strict=True)
    )


def map_tree(change: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Returns ``tree`` with ``change`` applied to every tensor, as torch walks containers."""
    return tree_map_only(torch.Tensor, change, tree)


def leaves_of(tree: Any) -> list[Any]:
    """Returns what is in nested lists, tuples and dicts, in their order."""
    return tree_flatten(tree)[0]


def with_leaves(tree: Any, leaves: Iterable[Any]) -> Any:
    """Returns ``tree`` with other leaves, in the same containers."""
    return tree_unflatten(list(leaves), tree_flatten(tree)[1])


def join_trees(join: Callable[[list[torch.Tensor]], torch.Tensor], trees: Sequence[Any]) -> Any:
    """Joins trees of one structure: tensors at the same leaf become one, other leaves are the first tree's."""
    first, *others = trees
    return tree_map(
        lambda leaf, *same: join([leaf, *same]) if isinstance(leaf, torch.Tensor) else leaf, first, *others
    )
