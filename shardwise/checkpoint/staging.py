"""A rank's file as it lies in host memory before it is written: all that a step waits for is to fill it.

    parts ──one copy each──▶ image: the bytes of the file, in their order ──few large writes──▶ rank-00000.bin

The memory is kept from one save to the next, and so are the places in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from shardwise.checkpoint.disk import ALIGNMENT_BYTES
from shardwise.checkpoint.parts import Part

__all__ = ["FileLayout", "Outline", "StagedFile", "lay_out"]


@dataclass(frozen=True)
class Outline:
    """All there is to know of a part but its values."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(part: Part) -> Outline:
        return Outline(part.tensor.dtype, tuple(part.tensor.shape), part.offsets, part.shape)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True)
class FileLayout:
    """Where each part begins in a file, and what is there."""

    starts: dict[str, int]
    outlines: dict[str, Outline]
    num_bytes: int


def lay_out(outlines: Iterable[tuple[str, Outline]]) -> FileLayout:
    """By name: the same state is the same bytes, whichever way it came about."""
    ordered = dict(sorted(outlines))
    starts, end = {}, 0
    for name, outline in ordered.items():
        starts[name] = end + -end % ALIGNMENT_BYTES
        end = starts[name] + outline.num_bytes
    return FileLayout(starts, ordered, end)


class StagedFile:
    def __init__(self) -> None:
        self._layout: FileLayout | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._rooms: dict[str, torch.Tensor] = {}

    def stage(self, parts: Mapping[str, Part], layout: FileLayout) -> None:
        """Copies the parts that a layout names to their places in it."""
        if layout is not self._layout:
            self._arrange(layout, pinned=any(part.tensor.is_cuda for part in parts.values()))
        devices = set()
        for name, room in self._rooms.items():
            tensor = parts[name].tensor
            room.copy_(tensor, non_blocking=True)
            if tensor.is_cuda:
                devices.add(tensor.device)
        for device in devices:
            # order: copies to the host before the step goes on, because the optimizer will write what they read.
            torch.cuda.current_stream(device).synchronize()

    def pieces(self, layout: FileLayout) -> list[torch.Tensor]:
        """What a file of a layout holds, of what is staged: everything at once, or part by part."""
        if layout is self._layout:
            return [self._memory[: layout.num_bytes]]
        return [self._rooms[name] for name in layout.starts]

    def _arrange(self, layout: FileLayout, *, pinned: bool) -> None:
        if layout.num_bytes <= self._memory.numel() <= 2 * layout.num_bytes:
            self._memory.zero_()
        else:
            self._memory = _host_memory(layout.num_bytes, pinned=pinned)
        self._rooms = {
            name: self._memory[start : start + outline.num_bytes].view(outline.dtype).view(outline.sizes)
            for (name, start), outline in zip(layout.starts.items(), layout.outlines.values(), strict=True)
        }
        self._layout = layout


def _host_memory(num_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Zeros; page-locked for a GPU, so that all its copies run at once, plain where there is too little of that."""
    try:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError:
        return torch.zeros(num_bytes, dtype=torch.uint8)
