"""Element-wise optimizer classes: only those can step several parameters as one tensor, or part of one."""

from __future__ import annotations

from typing import TypeVar

from torch import optim
from torch.optim import Optimizer

from shardwise.errors import ConfigError, ConfigTypeError

OptimizerClass = TypeVar("OptimizerClass", bound=type[Optimizer])

# Each element's update reads that element of the parameter, of the gradient and of the state, and nothing else.
_ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
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
)

_WHY_NOT = {
    "Adafactor": "it keeps sums over rows and columns of each matrix",
    "LBFGS": "it searches along a direction of all parameters together",
    "Muon": "it makes each matrix orthogonal",
    "SparseAdam": "it needs sparse gradients, and those of shards are dense",
}


def elementwise(optimizer_class: OptimizerClass) -> OptimizerClass:
    """Declares an optimizer class element-wise: an element's update depends only on its own gradient and state.

    State that is kept once per parameter, such as a step count, may depend on how often the parameter was stepped, not
    on its elements. Usable as a decorator; ``elementwise = True`` in the class's own body does the same.
    """
    optimizer_class.elementwise = True  # type: ignore[attr-defined]
    return optimizer_class


def is_elementwise(optimizer_class: type[Optimizer]) -> bool:
    """Whether a class is known, or declared by ``elementwise = True``, to be element-wise."""
    # Only the class's own body counts: a subclass may not be element-wise any more.
    return optimizer_class in _ELEMENTWISE or bool(vars(optimizer_class).get("elementwise", False))


def is_torchs_own(optimizer_class: type[Optimizer]) -> bool:
    """Whether it is one of torch's element-wise classes, whose ``step`` we know in detail."""
    return optimizer_class in _ELEMENTWISE


def check_elementwise(optimizer_class: type[Optimizer]) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise ConfigTypeError(
            f"the optimizer class is {optimizer_class!r}, which is not a subclass of torch.optim.Optimizer",
            where="shardwise.optim.flat",
            fix="pass the class itself and its arguments after it: flat(model, torch.optim.AdamW, lr=1e-3)",
        )
    if is_elementwise(optimizer_class):
        return
    name = optimizer_class.__name__
    if optimizer_class.__module__.startswith("torch.optim") and name in _WHY_NOT:
        raise ConfigError(
            f"{name} cannot step shards as one tensor: {_WHY_NOT[name]}",
            where=f"shardwise.optim.flat(..., {name})",
            fix=f"use torch.optim.{name} without flat, or an element-wise optimizer such as AdamW",
        )
    raise ConfigError(
        f"{name} is not known to be element-wise",
        where=f"shardwise.optim.flat(..., {name})",
        fix=f"if it is, declare it: shardwise.optim.elementwise({name}); if not, use it without flat",
    )
