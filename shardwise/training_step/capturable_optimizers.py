"""The optimizers of a captured step: collected as they step, made to read step counts and rates on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

Options = list[dict[str, Any]]


class CapturableOptimizers:
    """Every optimizer that a step calls."""

    def __init__(self) -> None:
        self._known: dict[int, Optimizer] = {}
        # Learning rates on the device, each with its parameter group.
        self._rates: list[tuple[dict[str, Any], torch.Tensor]] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Collects every optimizer that steps inside this context."""

        def add(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._known.setdefault(id(optimizer), optimizer)

        handle = register_optimizer_step_pre_hook(add)
        try:
            yield
        finally:
            handle.remove()

    def make_capturable(self) -> None:
        """Moves step counts and learning rates to the device, for optimizers that can read them there."""
        for optimizer in self._known.values():
            groups = optimizer.param_groups
            if any(group.get("capturable") is False for group in groups):
                for group in groups:
                    group["capturable"] = True
                # Loading its own state moves it to where a capturable optimizer needs it.
                optimizer.load_state_dict(optimizer.state_dict())
            for group in optimizer.param_groups:
                if not isinstance(group.get("lr"), torch.Tensor) and _accepts_tensor_rate(group):
                    group["lr"] = torch.tensor(float(group["lr"]), device=group["params"][0].device)
        self._rates = [
            (group, group["lr"])
            for optimizer in self._known.values()
            for group in optimizer.param_groups
            if isinstance(group.get("lr"), torch.Tensor)
        ]

    def update_learning_rates(self) -> None:
        """Copies learning rates that were set as numbers since the last step to the tensors that replays read."""
        for group, rate in self._rates:
            if group["lr"] is not rate:
                rate.fill_(group["lr"])
                group["lr"] = rate

    def options(self) -> Options:
        """The options that a recording contains as constants: if they change, the step must be recorded again."""
        return [
            {
                key: value
                for key, value in group.items()
                if key != "params" and not isinstance(value, torch.Tensor)
            }
            for optimizer in self._known.values()
            for group in optimizer.param_groups
        ]

    def gradients(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Each parameter with its current gradient."""
        return [
            (param, param.grad)
            for optimizer in self._known.values()
            for group in optimizer.param_groups
            for param in group["params"]
        ]


def _accepts_tensor_rate(group: dict[str, Any]) -> bool:
    """Whether the optimizer reads the learning rate on the device; others would copy it to the host."""
    on_device = all(param.device.type == "cuda" for param in group["params"])
    return "lr" in group and bool(group.get("capturable") or group.get("fused")) and on_device
