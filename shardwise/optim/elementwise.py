"""Which optimizers may step parameters end to end as one tensor: those that treat every element by itself."""

from __future__ import annotations

from typing import TypeVar

from torch import optim
from torch.optim import Optimizer

from shardwise.errors import ConfigError, ConfigTypeError

OptimizerClass = TypeVar("OptimizerClass", bound=type[Optimizer])

_ELEMENTWISE: set[type[Optimizer]] = {
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
}

_WHY_NOT = {
    "Adafactor": "it keeps sums over rows and columns of each matrix",
    "LBFGS": "it searches along directions of all parameters together",
    "Muon": "it makes each matrix orthogonal",
    "SparseAdam": "it steps sparse gradients, and those of shards are dense",
}


def elementwise(optimizer_class: OptimizerClass) -> OptimizerClass:
    """Vouches for an optimizer class: each element's step depends on that element's own gradients and state alone.

    Numbers it keeps for a parameter (a count of steps) may depend on how often the parameter was stepped, not on its
    elements. Usable as a decorator.
    """
    _ELEMENTWISE.add(optimizer_class)
    return optimizer_class


def is_torchs_own(optimizer_class: type[Optimizer]) -> bool:
    """Whether it is one of torch's, whose ``step`` is known to ask nothing of a tensor but its elements."""
    return optimizer_class in _ELEMENTWISE and optimizer_class.__module__.startswith("torch.optim")


def check_elementwise(optimizer_class: type[Optimizer]) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise ConfigTypeError(
            f"the optimizer class is {optimizer_class!r}, which is no class of torch.optim.Optimizer",
            where="shardwise.optim.flat",
            fix="pass the class itself and its arguments after it: flat(model, torch.optim.AdamW, lr=1e-3)",
        )
    if optimizer_class in _ELEMENTWISE:
        return
    name = optimizer_class.__name__
    if optimizer_class.__module__.startswith("torch.optim") and name in _WHY_NOT:
        raise ConfigError(
            f"{name} cannot step shards end to end: {_WHY_NOT[name]}",
            where=f"shardwise.optim.flat(..., {name})",
            fix=f"use torch.optim.{name} without flat, or an element-wise optimizer such as AdamW",
        )
    raise ConfigError(
        f"{name} is not known to treat every element by itself",
        where=f"shardwise.optim.flat(..., {name})",
        fix=f"if it does, say so once: shardwise.optim.elementwise({name}); if not, use it without flat",
    )
