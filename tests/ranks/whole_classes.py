"""Optimizers that need whole matrices, as users write them: a Shampoo and a SOAP."""

from __future__ import annotations

import torch
from torch.optim import Optimizer


def inverse_root(matrix: torch.Tensor, power: float) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=1e-6).pow(-power)) @ vectors.T


class Shampoo(Optimizer):
    """Preconditions each side of a matrix; keeps its statistics in a list, and its count as a plain number."""

    def __init__(self, params, lr=0.1, eps=1e-3, every=2):
        super().__init__(params, {"lr": lr, "eps": eps, "every": every})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                gradient = param.grad.reshape(param.shape[0], -1)
                state = self.state[param]
                if not state:
                    state["step"] = 0
                    state["sides"] = [
                        group["eps"] * torch.eye(size, dtype=param.dtype, device=param.device)
                        for size in gradient.shape
                    ]
                    state["roots"] = [torch.zeros_like(side) for side in state["sides"]]
                state["sides"][0].add_(gradient @ gradient.T)
                state["sides"][1].add_(gradient.T @ gradient)
                if state["step"] % group["every"] == 0:
                    state["roots"] = [inverse_root(side, 0.25) for side in state["sides"]]
                state["step"] += 1
                left, right = state["roots"]
                param.sub_((left @ gradient @ right).view_as(param), alpha=group["lr"])


class SOAP(Optimizer):
    """Adam in the basis of Shampoo's statistics; counts its steps in the group, as schedule-free optimizers do."""

    def __init__(self, params, lr=0.02, betas=(0.9, 0.95), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                gradient = param.grad.reshape(param.shape[0], -1)
                state = self.state[param]
                if not state:
                    state["left"] = gradient @ gradient.T
                    state["right"] = gradient.T @ gradient
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)
                    state["bases"] = (
                        torch.linalg.eigh(state["left"])[1].contiguous(),
                        torch.linalg.eigh(state["right"])[1],
                    )
                rows, columns = state["bases"]
                average, squares = (state[key].view_as(gradient) for key in ("exp_avg", "exp_avg_sq"))
                average.lerp_(gradient, 1 - first)
                turned = rows.T @ gradient @ columns
                squares.mul_(second).addcmul_(turned, turned, value=1 - second)
                scale = (1 - second ** group["count"]) ** 0.5 / (1 - first ** group["count"])
                update = (rows.T @ average @ columns) / (squares.sqrt() + group["eps"])
                param.sub_((rows @ update @ columns.T).view_as(param), alpha=group["lr"] * scale)
                state["left"].lerp_(gradient @ gradient.T, 1 - second)
                state["bases"] = (torch.linalg.qr(state["left"] @ rows)[0], columns)
