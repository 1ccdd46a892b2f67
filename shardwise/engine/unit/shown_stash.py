"""Shows stashed gradients of a flat unit as ``.grad`` of its sharded parameters, as torch does under ``no_sync``.

Such a gradient is full, so it has another shape than the shard whose ``.grad`` it is. It is shown from the end of a
backward without sync until the next backward, clipping or optimizer step. Users may write to it, which changes the
stash, or set it to None, which drops the stash.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from shardwise.engine.unit.flat_form import FlatForm, FlatSlot


@dataclass(slots=True)
class _Shown:
    """A stash that is shown at ``param``, and what ``param`` had before: the reduced gradient and its dtype."""

    param: nn.Parameter
    slots: list[FlatSlot]
    gradient: torch.Tensor
    reduced: torch.Tensor | None
    reduced_dtype: torch.dtype | None


class ShownStash:
    """The stash of one unit, as far as users see it."""

    def __init__(self, form: FlatForm) -> None:
        self._form = form
        self._shown: list[_Shown] = []

    def show(self) -> None:
        """Shows every stashed gradient. What backward has since added to the stash shows at once."""
        if self._shown:
            return
        for number, line in enumerate(self._form.lines):
            stashed = [slot for slot in line.slots if slot.stash is not None]
            if stashed and line.flat is not None:
                self._show_at(line.flat, stashed, self._flat_gradient(number, stashed))
            elif line.flat is None:
                for slot in stashed:
                    assert slot.stash is not None
                    self._show_at(slot.sharded, [slot], slot.stash)

    def _flat_gradient(self, number: int, stashed: list[FlatSlot]) -> torch.Tensor:
        """The stash of a flat parameter as one tensor; the slots' stashes become views of it."""
        starts, slots = self._form.layout.segments[number].starts, self._form.lines[number].slots
        first = stashed[0].stash
        assert first is not None
        flat = first.new_zeros(starts[-1] + prod(slots[-1].shape))
        for start, slot in zip(starts, slots, strict=True):
            if slot.stash is not None:
                view = flat[start : start + slot.stash.numel()].view(slot.stash.shape)
                slot.stash = view.copy_(slot.stash)
        return flat

    def _show_at(self, param: nn.Parameter, slots: list[FlatSlot], gradient: torch.Tensor) -> None:
        self._shown.append(_Shown(param, slots, gradient, param.grad, param.grad_dtype))
        param.grad = None
        param.grad_dtype = gradient.dtype
        # torch compares shapes when a gradient is set, but not when the data of a parameter is.
        shard = param.data
        param.data = gradient
        param.grad = gradient
        param.data = shard

    def hide(self) -> None:
        """Shows reduced gradients again; drops those whose stash was set to None meanwhile, and that stash."""
        shown, self._shown = self._shown, []
        for each in shown:
            param = each.param
            found, param.grad = param.grad, None
            param.grad_dtype = each.reduced_dtype
            if found is each.gradient:
                param.grad = each.reduced
                continue
            for slot in each.slots:
                slot.stash = None
            if found is not None and found.shape == param.shape:
                param.grad = found
