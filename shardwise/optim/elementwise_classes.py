"""Which optimizers may step parameters end to end as one tensor: those that treat every element by itself."""

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
    "LBFGS": "it searches along directions of all parameters together",
    "Muon": "it makes each matrix orthogonal",
    "SparseAdam": "it steps sparse gradients, and those of shards are dense",
}


def elementwise(optimizer_class: OptimizerClass) -> OptimizerClass:
    """Vouches for an optimizer class: each element's step depends on that element's own gradients and state alone.

    Numbers it keeps for a parameter (a count of steps) may depend on how often the parameter was stepped, not on its
    elements. Usable as a decorator; ``elementwise = True`` in the class's own body says the same.
    """
    optimizer_class.elementwise = True  # type: ignore[attr-defined]
    return optimizer_class


def is_elementwise(optimizer_class: type[Optimizer]) -> bool:
    """Whether a class is known, or says by ``elementwise = True``, to update every element by itself."""
    # Asked of the class's own body: a subclass may do something else with what it inherits.
    return optimizer_class in _ELEMENTWISE or bool(vars(optimizer_class).get("elementwise", False))


def is_torchs_own(optimizer_class: type[Optimizer]) -> bool:
    """Whether it is one of torch's element-wise classes, whose ``step`` is known to ask nothing else of a tensor."""
    return optimizer_class in _ELEMENTWISE


def check_elementwise(optimizer_class: type[Optimizer]) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise ConfigTypeError(
            f"the optimizer class is {optimizer_class!r}, which is no class of torch.optim.Optimizer",
            where="shardwise.optim.flat",
            fix="pass the class itself and its arguments after it: flat(model, torch.optim.AdamW, lr=1e-3)",
        )
    if is_elementwise(optimizer_class):
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
