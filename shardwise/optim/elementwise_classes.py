"""What an optimizer class needs of a parameter: single elements, rows, bands of rows, or all of it.

Element-wise classes can step several parameters as one tensor, or part of one. Row-wise and block-wise classes can step
a shard that consists of whole rows or bands. Any other class needs whole parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import optim
from torch.optim import Optimizer

from shardwise.errors import ConfigError, ConfigTypeError
from shardwise.optim.quantized_states import quantizes_state

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


def rowwise(optimizer_class: OptimizerClass) -> OptimizerClass:
    """Declares an optimizer class row-wise: a row's update depends only on that row's gradient and state.

    A row is everything with the same first index. Tensors of state have their rows in the first dim, too; numbers that
    are kept once per parameter may depend on how often it was stepped. Usable as a decorator.
    """
    return blockwise(1)(optimizer_class)


def blockwise(rows: int) -> Callable[[OptimizerClass], OptimizerClass]:
    """Declares an optimizer class block-wise, for blocks of ``rows`` rows, such as ``rows`` times ``rows`` elements.

    The update of rows 0 to ``rows - 1`` depends only on their own gradient and state, and so on. The first dim of a
    tensor of state counts rows or blocks of rows. Usable as a decorator: ``@blockwise(128)``.
    """
    if rows < 1:
        raise ConfigError(f"blocks of {rows} rows", where="shardwise.optim.blockwise", fix="pass 1 or more")

    def declare(optimizer_class: OptimizerClass) -> OptimizerClass:
        optimizer_class.rows_together = rows  # type: ignore[attr-defined]
        return optimizer_class

    return declare


def rows_together(optimizer_class: type[Optimizer]) -> int | None:
    """How many rows a class steps together, if it was declared row-wise or block-wise."""
    # Only the class's own body counts: a subclass may need more.
    found: int | None = vars(optimizer_class).get("rows_together")
    return found


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
    if is_elementwise(optimizer_class) or quantizes_state(optimizer_class):
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
