"""The norm of gradients in whole numbers: their sum does not depend on the order it is made in, nor on who makes it.

    |g| ──÷ a power of two above the largest of all──▶ below 1 ──power──▶ 24 + 24 + 24 bits, added up as integers

Sums of floating-point numbers round, and how depends on their order, hence on how gradients are cut over ranks. Sums
of integers do not round. The largest element of all sets the scale: what is left out of 72 bits is too small to show
even in a sum of billions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardwise.errors import ConfigError

_NUM_WORDS = 3
_WORD = 2.0**24
# Integers below 2**24, so many of them: exact in float64, too.
_PIECE_NUMEL = 2**20
_SMALLEST = 2.0**-960


def check_order(order: float, tensors: list[torch.Tensor], where: str) -> None:
    """Raises for norms whose terms depend on more than their element."""
    if order not in (1.0, 2.0) or (order == 1.0 and any(tensor.is_complex() for tensor in tensors)):
        raise ConfigError(
            f"the norm of order {order:g} cannot be summed exactly"
            + (" over complex gradients" if order == 1.0 else ""),
            where=where,
            fix="use norm_type 2 or inf (or 1, for real gradients), or shard the model without exact=True",
        )


def largest_of(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The largest magnitude, infinite if one is not finite; and above zero if one is not a number."""
    found = [piece.abs().amax().to(device, torch.float64) for tensor in tensors for piece in _pieces(tensor)]
    if not found:
        return torch.zeros(2, dtype=torch.float64, device=device)
    each = torch.stack(found)
    is_nan = each.isnan()
    return torch.stack([each.masked_fill(is_nan, torch.inf).amax(), is_nan.any().to(torch.float64)])


def words_of(
    tensors: list[torch.Tensor], order: float, largest: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """The sum of all powers, in words of 24 bits of each: integers, to be added up as they are."""
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
    """The norm, in float64."""
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
    # A quotient that is a power of two comes out exactly, which a function for powers need not promise.
    return torch.frexp(magnitude).mantissa / magnitude


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.numel() == 0:
        return
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    yield from real.reshape(-1).split(_PIECE_NUMEL)
