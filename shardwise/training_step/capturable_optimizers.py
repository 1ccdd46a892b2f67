"""The optimizers of a captured step: found as they step, made to take from the device what changes between steps."""

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
        # Learning rates that live on the device, each with the group that shows it.
        self._rates: list[tuple[dict[str, Any], torch.Tensor]] = []

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """While it is open, optimizers that step are taken in."""

        def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._known.setdefault(id(optimizer), optimizer)

        handle = register_optimizer_step_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()

    def make_capturable(self) -> None:
        """Keeps step counts and learning rates on the device, for optimizers that can take them from there."""
        for optimizer in self._known.values():
            groups = optimizer.param_groups
            if any(group.get("capturable") is False for group in groups):
                for group in groups:
                    group["capturable"] = True
                # Loading its own state puts each part where a capturable optimizer has it.
                optimizer.load_state_dict(optimizer.state_dict())
            for group in optimizer.param_groups:
                if not isinstance(group.get("lr"), torch.Tensor) and _takes_a_tensor(group):
                    group["lr"] = torch.tensor(float(group["lr"]), device=group["params"][0].device)
        self._rates = [
            (group, group["lr"])
            for optimizer in self._known.values()
            for group in optimizer.param_groups
            if isinstance(group.get("lr"), torch.Tensor)
        ]

    def take_over_rates(self) -> None:
        """Writes learning rates that were set as numbers since the last step into the tensors that replays read."""
        for group, rate in self._rates:
            if group["lr"] is not rate:
                rate.fill_(group["lr"])
                group["lr"] = rate

    def options(self) -> Options:
        """What replays have built in: a change of it makes a recording useless."""
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
        """Each parameter with the gradient it has now."""
        return [
            (param, param.grad)
            for optimizer in self._known.values()
            for group in optimizer.param_groups
            for param in group["params"]
        ]


def _takes_a_tensor(group: dict[str, Any]) -> bool:
    """Whether this optimizer reads its learning rate on the device; others would ask the host for the number."""
    on_device = all(param.device.type == "cuda" for param in group["params"])
    return "lr" in group and bool(group.get("capturable") or group.get("fused")) and on_device
