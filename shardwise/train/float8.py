"""Multiplies the matrices of a model's units in float8, with torchao's ``convert_to_float8_training``.

Weights, gradients and the optimizer keep their precision: each product converts its two matrices to float8, with one
scale for each. Checkpoints are those of the same model without float8.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from typing import Literal

import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.train.optional_packages import require

__all__ = ["Float8", "check_float8", "multiply_in_float8"]

Float8 = Literal["off", "on", "emulated"]

_MULTIPLE = 16
_CAPABILITY = (8, 9)


def check_float8(choice: Float8, device: torch.device) -> None:
    """Raises ConfigError if torchao is not installed, or the device has no float8."""
    if choice == "off":
        return
    # Not imported yet, which takes long.
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "multiplying in float8 needs the package 'torchao', which is not installed",
            where=f"sharding.float8={choice}",
            fix="pip install torchao, or use sharding.float8=off",
        )
    is_able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _CAPABILITY
    if choice == "on" and not is_able:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        raise ConfigError(
            f"{name} does not multiply in float8",
            where="sharding.float8=on",
            fix="use a GPU such as H100, L40 or newer, sharding.float8=off, or emulated to try it out slowly",
        )


def multiply_in_float8(units: Collection[nn.Module], choice: Float8) -> None:
    """Converts the linear layers of all units in place, before they are sharded.

    Raises:
        ConfigError: no layer has sizes that can be multiplied in float8.
    """
    if choice == "off":
        return
    if not any(_is_convertible(module, "") for unit in units for module in unit.modules()):
        raise ConfigError(
            f"no linear layer of the model's units has sizes that are multiples of {_MULTIPLE}",
            where=f"sharding.float8={choice}",
            fix="use such sizes, or sharding.float8=off",
        )
    torchao = require("torchao.float8", "sharding.float8")
    config = torchao.Float8LinearConfig(emulate=choice == "emulated")
    for unit in units:
        torchao.convert_to_float8_training(unit, config=config, module_filter_fn=_is_convertible)


def _is_convertible(module: nn.Module, _name: str) -> bool:
    return (
        isinstance(module, nn.Linear)
        and module.in_features % _MULTIPLE == 0
        and module.out_features % _MULTIPLE == 0
    )
