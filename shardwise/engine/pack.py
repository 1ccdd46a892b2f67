"""Packing full gradients into the rows that ranks exchange: cast, cut and padded, in as few kernels as possible."""

from __future__ import annotations

from typing import Protocol

import torch

from shardwise.engine.storage import Elastic
from shardwise.plan.rows import Piece, RowsLayout, plan_pads, plan_pieces
from shardwise.torch_internals import chunk_cat, copy_all, zero_all


class Pack(Protocol):
    def fill(self, gradients: list[torch.Tensor | None]) -> None:
        """Writes all of the rows: gradients where there are any, zeros for those missing and for padding."""


def plan_pack(
    layout: RowsLayout,
    rows: Elastic,
    dtype: torch.dtype,
    gradient_dtypes: list[torch.dtype],
    device: torch.device,
) -> Pack:
    """One fused kernel where all are cut along dim 0 and all gradients share a dtype; else piece by piece."""
    if all(cut.dim == 0 for cut in layout.cuts) and len(set(gradient_dtypes)) == 1:
        return FusedPack(layout, rows, dtype, gradient_dtypes[0], device)
    return PiecewisePack(layout, rows, dtype)


class FusedPack:
    """Everything in one kernel. Gaps between parameters are filled by tensors of zeros among the gradients."""

    def __init__(
        self,
        layout: RowsLayout,
        rows: Elastic,
        dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        itemsize = dtype.itemsize
        row_numel = layout.sent_bytes // itemsize
        self._rows = rows.tensor(dtype, 0, (layout.world, row_numel))
        self._world = layout.world
        self._shapes = [cut.shape for cut in layout.cuts]
        order = sorted(range(len(layout.cuts)), key=lambda index: layout.sent_starts_bytes[index])
        # What stands in a row, left to right: the number of a gradient, or a filler.
        self._sequence: list[int | torch.Tensor] = []
        end = 0
        for index in order:
            end = self._fill_to(layout.sent_starts_bytes[index] // itemsize, end, gradient_dtype, device)
            self._sequence.append(index)
            end += layout.cuts[index].padded_numel
        self._fill_to(row_numel, end, gradient_dtype, device)
        self._is_plain = self._sequence == list(range(len(layout.cuts)))

    def _fill_to(self, start: int, end: int, dtype: torch.dtype, device: torch.device) -> int:
        if start > end:
            self._sequence.append(torch.zeros((start - end) * self._world, dtype=dtype, device=device))
        return start

    def fill(self, gradients: list[torch.Tensor | None]) -> None:
        present: list[torch.Tensor] = gradients  # type: ignore[assignment]
        if any(gradient is None for gradient in gradients):
            known = next(gradient for gradient in gradients if gradient is not None)
            present = [
                known.new_zeros(shape) if gradient is None else gradient
                for gradient, shape in zip(gradients, self._shapes, strict=True)
            ]
        if not self._is_plain:
            present = [present[entry] if isinstance(entry, int) else entry for entry in self._sequence]
        chunk_cat(present, self._world, self._rows)


class PiecewisePack:
    """A strided copy for each piece of each parameter."""

    def __init__(self, layout: RowsLayout, rows: Elastic, dtype: torch.dtype) -> None:
        itemsize = dtype.itemsize
        starts = [start // itemsize for start in layout.sent_starts_bytes]
        row_numel = layout.sent_bytes // itemsize
        self._pieces: list[list[tuple[Piece, torch.Tensor]]] = []
        for cut, start in zip(layout.cuts, starts, strict=True):
            self._pieces.append(
                [
                    (
                        piece,
                        rows.tensor(dtype, piece.packed_start * itemsize, piece.shape, piece.packed_strides),
                    )
                    for piece in plan_pieces(cut, start, row_numel)
                ]
            )
        self._pads = [
            rows.tensor(dtype, pad.packed_start * itemsize, pad.shape, pad.packed_strides)
            for pad in plan_pads(layout.cuts, starts, row_numel)
        ]

    def fill(self, gradients: list[torch.Tensor | None]) -> None:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        blanks = list(self._pads)
        for gradient, pieces in zip(gradients, self._pieces, strict=True):
            if gradient is None:
                blanks.extend(packed for _, packed in pieces)
                continue
            gradient = gradient.contiguous()
            for piece, packed in pieces:
                start = gradient.storage_offset() + piece.full_start
                targets.append(packed)
                sources.append(gradient.as_strided(piece.shape, piece.full_strides, start))
        if blanks:
            zero_all(blanks)
        copy_all(targets, sources)
