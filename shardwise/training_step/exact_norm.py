"""The norm of gradients, summed as integers, so that it does not depend on the order of the sum or on the sharding.

    |g| ──÷ a power of two above the largest of all──▶ below 1 ──power──▶ 24 + 24 + 24 bits, added up as integers

Floating-point sums round, depending on their order, hence on how gradients are sharded. Integer sums do not round. The
largest element of all ranks sets the scale: what does not fit into 72 bits is too small to matter even in a sum of
billions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardwise.errors import ConfigError

_NUM_WORDS = 3
_WORD = 2.0**24
# A sum of that many integers below 2**24 is exact in float64.
_PIECE_NUMEL = 2**20
_SMALLEST = 2.0**-960


def check_order(order: float, tensors: list[torch.Tensor], where: str) -> None:
    """Raises unless the norm is a sum of exact terms: order 2, or order 1 of real gradients."""
    if order not in (1.0, 2.0) or (order == 1.0 and any(tensor.is_complex() for tensor in tensors)):
        raise ConfigError(
            f"the norm of order {order:g} cannot be summed exactly"
            + (" over complex gradients" if order == 1.0 else ""),
            where=where,
            fix="use norm_type 2 or inf (or 1, for real gradients), or shard the model without exact=True",
        )


def largest_of(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Two values: the largest magnitude (infinite for nan), and 1 if an element is nan, else 0."""
    found = [piece.abs().amax().to(device, torch.float64) for tensor in tensors for piece in _pieces(tensor)]
    if not found:
        return torch.zeros(2, dtype=torch.float64, device=device)
    each = torch.stack(found)
    is_nan = each.isnan()
    return torch.stack([each.masked_fill(is_nan, torch.inf).amax(), is_nan.any().to(torch.float64)])


def words_of(
    tensors: list[torch.Tensor], order: float, largest: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """The sum of all scaled powers as integers, one for each 24-bit word; ranks add them up."""
    scale = _scale(largest)
    words = torch.zeros(_NUM_WORDS, dtype=torch.int64, device=device)
    for tensor in tensors:
        for piece in _pieces(tensor):
            rest = piece.to(torch.float64).mul_(scale.to(piece.device))
            rest = rest.square_() if order == 2.0 else rest.abs_()
            sums = []
            for _ in range(_NUM_WORDS):
                rest.mul_(_WORD)
                word = rest.floor()
                rest.sub_(word)
                sums.append(word.sum())
            words += torch.stack(sums).to(device, torch.int64)
    return words


def norm_from(words: torch.Tensor, order: float, largest: torch.Tensor) -> torch.Tensor:
    """The norm in float64, from the summed words of all ranks."""
    value = torch.zeros((), dtype=torch.float64, device=words.device)
    for word in words.flip(0).to(torch.float64).unbind():
        value = (value + word) / _WORD
    norm = (value.sqrt() if order == 2.0 else value) / _scale(largest)
    magnitude, nan = largest.unbind()
    norm = torch.where(magnitude.isfinite(), norm, magnitude)
    return torch.where(nan > 0, torch.full_like(norm, torch.nan), norm)


def _scale(largest: torch.Tensor) -> torch.Tensor:
    """The power of two that brings the largest magnitude below 1."""
    magnitude = largest[0]
    magnitude = torch.where(magnitude.isfinite(), magnitude, 1.0).clamp(min=_SMALLEST)
    # This division gives an exact power of two, which exp2 does not guarantee.
    return torch.frexp(magnitude).mantissa / magnitude


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.numel() == 0:
        return
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    yield from real.reshape(-1).split(_PIECE_NUMEL)
