"""The loss of a batch, averaged over all targets that count: of every micro-batch and every rank, not mean by mean.

    loss of a step = sum of all targets' losses / number of targets, over all ranks and micro-batches

Micro-batches may have different numbers of targets, if prompts are masked or sequences padded. A mean of their means
would give targets in short answers more weight, and depend on how a batch is divided.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F  # noqa: N812  the name everyone knows
from torch import Tensor

from shardwise.errors import ConfigError

__all__ = ["IGNORED", "Loss", "count_targets", "mean_loss"]

IGNORED = -100
"""A target that does not count, as in torch's cross entropy."""

Loss = Callable[[Tensor, Tensor], Tensor]


def count_targets(targets: Tensor) -> int:
    return int((targets != IGNORED).sum())


def mean_loss(logits: Tensor, targets: Tensor, own: Loss | None, num_targets: int) -> Tensor:
    """Returns the mean loss of the targets that count; 0 if there are none, with a gradient of 0.

    Args:
        logits: for each target, along the last dimension.
        targets: tokens, or ``IGNORED``.
        own: a loss in place of cross entropy: returns each target's loss, or their mean.
        num_targets: the number of targets that count.
    """
    if not num_targets:
        # Backward still runs through the whole model, as on ranks that have targets.
        return logits.sum() * 0.0
    if own is None:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    loss = own(logits, targets)
    where = f"loss={getattr(own, '__qualname__', own)}"
    if not isinstance(loss, Tensor) or (logits.requires_grad and not loss.requires_grad):
        problem = "has no gradient" if isinstance(loss, Tensor) else f"is no tensor, but {loss!r}"
        raise ConfigError(f"the loss {problem}", where=where, fix="compute it from the logits, with torch")
    if loss.dim() == 0:
        return loss
    if loss.shape != targets.shape:
        raise ConfigError(
            f"the loss has shape {tuple(loss.shape)} for targets of shape {tuple(targets.shape)}",
            where=where,
            fix="return a loss for each target, or one number, their mean",
        )
    return loss[targets != IGNORED].mean()
