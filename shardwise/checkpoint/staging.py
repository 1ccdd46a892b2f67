"""Staging: copies a rank's parts to host memory, laid out like its file. A training step waits only for these copies.

    parts ──one copy each──▶ image: the bytes of the file, in their order ──few large writes──▶ rank-00000.bin

The memory and its layout are reused from one save to the next.
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
    """A part without its values: dtype, sizes, offsets, and the shape of the full tensor."""

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
    """Where each part starts in a file, and what it is."""

    starts: dict[str, int]
    outlines: dict[str, Outline]
    num_bytes: int


def lay_out(outlines: Iterable[tuple[str, Outline]]) -> FileLayout:
    """Lays parts out in a file, sorted by name: the same state always gives the same bytes."""
    ordered = dict(sorted(outlines))
    starts, end = {}, 0
    for name, outline in ordered.items():
        starts[name] = end + -end % ALIGNMENT_BYTES
        end = starts[name] + outline.num_bytes
    return FileLayout(starts, ordered, end)


class StagedFile:
    """The host memory into which parts are copied, and the views of it that they are copied to."""

    def __init__(self) -> None:
        self._layout: FileLayout | None = None
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._views: dict[str, torch.Tensor] = {}

    def stage(self, parts: Mapping[str, Part], layout: FileLayout) -> None:
        """Copies the parts of a layout to the host."""
        if layout is not self._layout:
            self._arrange(layout, pinned=any(part.tensor.is_cuda for part in parts.values()))
        devices = set()
        for name, view in self._views.items():
            tensor = parts[name].tensor
            view.copy_(tensor, non_blocking=True)
            if tensor.is_cuda:
                devices.add(tensor.device)
        for device in devices:
            # order: copies to the host before the step goes on, because the optimizer will write what they read.
            torch.cuda.current_stream(device).synchronize()

    def pieces(self, layout: FileLayout) -> list[torch.Tensor]:
        """Returns the staged contents of a file with this layout: one tensor if it is as staged, else its parts."""
        if layout is self._layout:
            return [self._memory[: layout.num_bytes]]
        return [self._views[name] for name in layout.starts]

    def _arrange(self, layout: FileLayout, *, pinned: bool) -> None:
        if layout.num_bytes <= self._memory.numel() <= 2 * layout.num_bytes:
            self._memory.zero_()
        else:
            self._memory = _host_memory(layout.num_bytes, pinned=pinned)
        self._views = {
            name: self._memory[start : start + outline.num_bytes].view(outline.dtype).view(outline.sizes)
            for (name, start), outline in zip(layout.starts.items(), layout.outlines.values(), strict=True)
        }
        self._layout = layout


def _host_memory(num_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Allocates zeros; pinned for copies from a GPU, or pageable if that fails."""
    try:
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    except RuntimeError:
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
