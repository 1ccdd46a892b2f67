"""Finds the unit that produced the first value that is not finite.

Gradients that are not finite are noticed before the optimizer uses them, so the weights are still those of the step
before. The forward runs again with a hook on every unit's output; if all outputs are finite, gradients are searched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.parts import part_of
from shardwise.train.team import Team

__all__ = ["first_bad_unit"]


def first_bad_unit(
    module: nn.Module, units: Mapping[str, nn.Module], forward: Callable[[], Any], team: Team
) -> str:
    """Returns a sentence that names the unit; called on every rank, before the bad gradients are cleared."""
    in_gradients = _bad_gradients(module, units)
    seen: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def look(_module: nn.Module, _args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not bool(output.isfinite().all()):
                seen.append(name)

        return look

    hooks = [unit.register_forward_hook(watch(name)) for name, unit in units.items()]
    try:
        with torch.no_grad():
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    order = list(units)
    # Ranks see different data: the first unit that any rank has found counts.
    found = [name for of_rank in team.collect(seen[:1]) for name in of_rank]
    if found:
        return f"the output of unit '{min(found, key=order.index)}' is the first that is not finite"
    gradients = {name for of_rank in team.collect(in_gradients) for name in of_rank}
    # Backward runs from the end, so the last unit with bad gradients is where they began.
    for name in reversed(order):
        if name in gradients:
            return f"all outputs of units are finite, and gradients are not from unit '{name}' on down"
    return "outputs and gradients of all units are finite; it arose outside of them, in the root or the loss"


def _bad_gradients(module: nn.Module, units: Mapping[str, nn.Module]) -> list[str]:
    bad = []
    for name, param in module.named_parameters():
        if param.grad is not None and not bool(part_of(param.grad).tensor.isfinite().all()):
            bad.append(name)
    return [unit for unit in units if any(name.startswith(f"{unit}.") for name in bad)]
