"""``BatchedMuon``: torch's Muon, with matrices of equal shape multiplied together.

Newton-Schulz is fifteen small products a matrix. On a GPU many small matrices leave most of it idle; a batch of equal
ones is fifteen products in all. Arithmetic is the same, in bfloat16 with each product summed in float32; a batched
kernel may sum in another order, so that results differ in roundings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Muon


class BatchedMuon(Muon):
    """``torch.optim.Muon`` with the same arguments and state, which multiplies matrices of equal shape in one batch.

    For many small matrices on a GPU. Under ``optim.whole`` a batch has at most the matrices that an owner steps at a
    time: half of ``at_once``. Updates are as close to those of Newton-Schulz in float32 as Muon's own are, so the two
    differ by at most twice that distance: a few hundredths of an update's norm, more for gradients of low rank.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            batches: dict[tuple[object, ...], list[torch.Tensor]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    # Newton-Schulz turns tall matrices over, so those go with wide ones.
                    shape = tuple(sorted(param.shape))
                    batches.setdefault((shape, param.dtype, param.device), []).append(param)
            for params in batches.values():
                self._step_batch(params, group)
        return loss

    def _step_batch(self, params: list[torch.Tensor], group: dict[str, Any]) -> None:
        momentum, lr = group["momentum"], float(group["lr"])
        directions = []
        for param in params:
            gradient, state = param.grad, self.state[param]
            assert gradient is not None
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            average = state["momentum_buffer"]
            average.lerp_(gradient, 1 - momentum)
            directions.append(gradient.lerp(average, momentum) if group["nesterov"] else average)
        updates = orthogonalize_batch(directions, group["ns_coefficients"], group["ns_steps"], group["eps"])
        for param, update in zip(params, updates, strict=True):
            param.mul_(1 - lr * group["weight_decay"])
            param.add_(update, alpha=-lr * _scale(group["adjust_lr_fn"], param.shape))


def orthogonalize_batch(
    matrices: Sequence[torch.Tensor], coefficients: tuple[float, float, float], steps: int, eps: float
) -> list[torch.Tensor]:
    """Newton-Schulz of matrices that have the same two sides, in either order."""
    is_tall = [matrix.shape[0] > matrix.shape[1] for matrix in matrices]
    wide = [matrix.T if tall else matrix for matrix, tall in zip(matrices, is_tall, strict=True)]
    batch = torch.stack([matrix.bfloat16() for matrix in wide])
    batch.div_(batch.flatten(1).norm(dim=1).clamp(min=eps)[:, None, None])
    linear, cubic, quintic = coefficients
    for _ in range(steps):
        squares = batch @ batch.mT
        factors = torch.baddbmm(squares, squares, squares, beta=cubic, alpha=quintic)
        batch = torch.baddbmm(batch, factors, batch, beta=linear)
    return [each.T if tall else each for each, tall in zip(batch.unbind(), is_tall, strict=True)]


def _scale(rule: str | None, shape: torch.Size) -> float:
    """What a rule of Muon multiplies the learning rate of a matrix with."""
    rows, columns = shape
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))
