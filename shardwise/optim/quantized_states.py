"""States that an optimizer quantizes in blocks of elements, as torchao's 8-bit and 4-bit Adam do, in flat runs.

    members          | a a a a a a a a | b b b b |
    blocks           | 0 0 0 0 1 1 1 1 | 2 2 2 2 |
    state of the run | codes                     | scales, one a block

torchao quantizes the state of a tensor that is large enough and consists of whole blocks. Neighbours of which that is
true have the same blocks as one tensor; neighbours of which it is not are joined while it is not true of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.torch_internals import local_of

# On a CPU a longer run leaves the cache between one operation and the next, which costs more than the calls it saves.
_MOST_BYTES_ON_CPU = 128 * 1024
# None of them is element-wise: a block has one scale.
_CLASSES = frozenset({"Adam8bit", "Adam4bit", "AdamFp8", "AdamW8bit", "AdamW4bit", "AdamWFp8"})


def quantizes_state(optimizer_class: type[Optimizer]) -> bool:
    """Whether it is an optimizer of torchao that is element-wise but for blocks of its state."""
    return optimizer_class.__module__ == "torchao.optim.adam" and optimizer_class.__name__ in _CLASSES


class QuantizedStates:
    """How one optimizer makes state: asked of torchao, so that the rules are always its own."""

    def __init__(self, optim: Any) -> None:
        self._new_buffer: Callable[[Tensor, bool], Tensor] = optim._new_buffer
        self._known: dict[tuple[torch.Size, torch.dtype], bool] = {}

    def may_join(self, run: list[Tensor], added: Tensor) -> bool:
        """Whether neighbours and one more have, as one tensor or as any part of it, the state that they have alone."""
        num_bytes = sum(tensor.nbytes for tensor in (*run, added))
        if added.device.type == "cpu" and num_bytes > _MOST_BYTES_ON_CPU:
            return False
        alone = [self._quantizes(tensor.shape, tensor.dtype) for tensor in (run[-1], added)]
        if any(alone):
            return all(alone)
        numels = accumulate(tensor.numel() for tensor in (added, *reversed(run)))
        return not any(self._quantizes(torch.Size((numel,)), added.dtype) for numel in numels)

    def _quantizes(self, shape: torch.Size, dtype: torch.dtype) -> bool:
        """Whether the state of such a tensor is quantized; if so, it consists of whole blocks."""
        if (shape, dtype) not in self._known:
            asked = torch.empty(shape, dtype=dtype, device="meta")
            self._known[shape, dtype] = is_quantized(self._new_buffer(asked, True))
        return self._known[shape, dtype]

    def part(self, value: Any, param: Tensor, start: int) -> Tensor:
        """Returns a parameter's state as torchao makes it, over the memory of the run's."""
        made = self._new_buffer(param, getattr(value, "signed", True))
        local: Any = local_of(made) if isinstance(made, DTensor) else made
        for name, own, whole in _inner_tensors(local, value):
            # What has one size for all tensors is a table, and shared.
            if own.numel() != whole.numel():
                begin = start * own.numel() // local.numel()
                whole = whole.view(-1)[begin : begin + own.numel()]
            setattr(local, name, whole.view(own.shape))
        return made

    def joined(self, tensor: Tensor, parts: Iterable[tuple[Any, Tensor, int]]) -> Tensor:
        """Returns the state of a run; a part is a member's state, the member, and where it starts."""
        made: Tensor | None = None
        for given, param, start in parts:
            if made is None:
                made = self._new_buffer(tensor, getattr(given, "signed", True))
            view: Any = self.part(made, param, start)
            for _, whole, own in _inner_tensors(local_of(view) if isinstance(view, DTensor) else view, given):
                whole.copy_(own)
        assert made is not None
        return made


def is_quantized(value: Any) -> bool:
    """Whether a state value of this rank is a tensor of codes and scales."""
    return (
        isinstance(value, Tensor) and not isinstance(value, DTensor) and hasattr(value, "__tensor_flatten__")
    )


def _inner_tensors(one: Any, other: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    for name in one.__tensor_flatten__()[0]:
        yield name, getattr(one, name), getattr(other, name)
