"""What ``TrustPolicy`` can add to a step: a check for gradients that are not finite, and undoing a step that raised.

Each rank checks its own gradients before they are summed: afterwards all ranks have them. The check runs on the
device; the host reads the result once, before an optimizer uses the step. It tells the first parameter and rank that
had one, and does what the policy says.

To undo a step, gradients and buffers are copied before it.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.comm.collectives.agreement import gather_bytes
from shardwise.engine.buffers import gradient_version
from shardwise.engine.unit.binding import Slot
from shardwise.errors import NonFiniteGradients
from shardwise.torch_internals import buffers_of, local_part, unseen_by_modes

if TYPE_CHECKING:
    from shardwise.comm.channels.channel import Channel

_LOGGER = logging.getLogger("shardwise")
_NONE = (1 << 31) - 1
_HEAD = struct.Struct("<ii")
_RECORD_BYTES = 512


class NonFiniteGuard:
    """Checks the gradients of one rank, from one optimizer step to the next."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._seen: list[tuple[str, list[str], torch.Tensor]] = []

    def look(self, unit: str, slots: list[Slot], gradients: list[torch.Tensor | None]) -> None:
        """Starts to check the gradients of a unit on the device, without waiting for the result."""
        present = [(slot.name, grad) for slot, grad in zip(slots, gradients, strict=True) if grad is not None]
        if present:
            flags = torch.stack([grad.detach().isfinite().all() for _, grad in present])
            self._seen.append((unit, [name for name, _ in present], flags))

    def forget(self) -> None:
        self._seen = []

    def check(self, policy: str, optimizer: Optimizer, channels: Iterable[Channel]) -> None:
        """Raises, warns or drops the gradients, the same on all ranks, if any rank had one that is not finite."""
        number, rank, name = self._first_on_all_ranks(channels)
        self._seen = []
        if number == _NONE:
            return
        what = f"the gradient of {name} is not finite on rank {rank}, the first in this backward"
        if policy == "raise":
            raise NonFiniteGradients(
                what,
                where=f"rank {self._rank}, before an optimizer used the step",
                fix="look at that unit's inputs and the loss on that rank; set_trust(non_finite='skip') skips such "
                "steps",
            )
        if policy == "skip":
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.grad = None
            what += "; the step is skipped on all ranks"
        _LOGGER.warning("%s", what)

    def _first_on_all_ranks(self, channels: Iterable[Channel]) -> tuple[int, int, str]:
        first = self._first_here()
        # Over each mesh axis in turn, so that in the end all ranks know the first.
        for channel in channels:
            record = _HEAD.pack(*first[:2]) + first[2].encode()[: _RECORD_BYTES - _HEAD.size]
            with unseen_by_modes(), torch.inference_mode(False), torch.no_grad():
                records = gather_bytes(record.ljust(_RECORD_BYTES, b"\0"), channel, channel.device)
            first = min(
                (
                    *_HEAD.unpack(known[: _HEAD.size]),
                    known[_HEAD.size :].rstrip(b"\0").decode(errors="ignore"),
                )
                for known in records
            )
        return first

    def _first_here(self) -> tuple[int, int, str]:
        for number, (unit, names, flags) in enumerate(self._seen):
            finite = flags.tolist()
            if not all(finite):
                prefix = f"{unit}." if unit else ""
                return number, self._rank, f"'{prefix}{names[finite.index(False)]}' (unit '{unit or 'root'}')"
        return _NONE, self._rank, ""


class Undo:
    """Copies of one model's gradients and buffers from before its step (``TrustPolicy.undoes_steps``).

    Parameters need no copy: forward and backward do not write them. Gradients are copied when a backward begins,
    buffers (such as running statistics) when a forward begins; an optimizer's step drops the copies.
    """

    def __init__(self) -> None:
        self._gradients: list[tuple[Slot, torch.Tensor | None, torch.Tensor | None, int]] = []
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep_buffers(self, modules: Iterable[nn.Module]) -> None:
        """Copies the buffers when a forward begins; gradients from before that forward are no longer restored."""
        self._gradients = []
        with torch.no_grad():
            self._buffers = [
                (buffer, buffer.clone())
                for top in modules
                for module in top.modules()
                for buffer in buffers_of(module).values()
                if buffer is not None
            ]

    def keep_gradients(self, slots: Iterable[Slot]) -> None:
        with torch.no_grad():
            self._gradients = [_kept(slot) for slot in slots]

    def forget(self) -> None:
        self._gradients, self._buffers = [], []

    def restore(self) -> None:
        with torch.no_grad():
            for slot, gradient, values, version in self._gradients:
                # A gradient that nobody wrote to keeps its version, which others compare.
                if gradient is not None and values is not None and gradient_version(gradient) != version:
                    local_part(gradient).copy_(values)
                slot.sharded.grad = gradient
            for buffer, values in self._buffers:
                buffer.copy_(values)
        self.forget()


def _kept(slot: Slot) -> tuple[Slot, torch.Tensor | None, torch.Tensor | None, int]:
    gradient = slot.sharded.grad
    if gradient is None:
        return slot, None, None, 0
    return slot, gradient, local_part(gradient).clone(), gradient_version(gradient)
