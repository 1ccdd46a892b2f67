"""Creates the optimizer of a run: AdamW, SGD, Muon beside AdamW, or any class, by name, for every sharding mode.

mode                 an optimizer that works element by element   one that needs whole matrices
none                 as it is                                     as it is
optimizer            in ZeroRedundancyOptimizer                   in ``shardwise.optim.whole``
gradients, full, …   as it is, on shards                          in ``shardwise.optim.whole``
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.errors import ConfigError, ShardwiseError
from shardwise.optim import flat, mixed, whole
from shardwise.train.config import Optimization
from shardwise.train.parallel import Parallel
from shardwise.zero import ZeroRedundancyOptimizer

__all__ = ["make_optimizer", "take_step"]


def make_optimizer(parallel: Parallel, choice: Optimization) -> Optimizer:
    """Creates the optimizer, with weight decay only for parameters of two or more dimensions.

    Raises:
        ConfigError: there is no such class, or it does not take the arguments.
    """
    kind = _BUILT_IN.get(choice.name) or _class_named(choice.name)
    where = f"optimizer.name={_name_of(choice)}, optimizer.arguments={dict(choice.arguments)}"
    _check_arguments(kind, choice, where)
    params = [param for param in parallel.module.parameters() if param.requires_grad]
    try:
        return (
            _muon(parallel, params, choice) if choice.name == "muon" else _any(parallel, params, kind, choice)
        )
    except ShardwiseError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{kind.__name__} cannot be made: {error}",
            where=where,
            fix="correct the settings of the optimizer",
        ) from error


def take_step(optimizer: Optimizer, choice: Optimization, *, on_shards: bool) -> None:
    """Runs a step of the optimizer.

    Raises:
        ConfigError: its class cannot step shards.
    """
    try:
        optimizer.step()
    except RuntimeError as error:
        is_own = choice.name not in _BUILT_IN and on_shards and not choice.whole
        if not is_own or isinstance(error, ShardwiseError | torch.OutOfMemoryError):
            raise
        raise ConfigError(
            f"the optimizer cannot step shards: {str(error).splitlines()[0]}",
            where=f"optimizer.name={_name_of(choice)}",
            fix="use optimizer.whole=true, which gives it whole matrices, or sharding.mode=optimizer",
        ) from error


_BUILT_IN: dict[Any, type[Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "muon": torch.optim.Muon,
}


def _name_of(choice: Optimization) -> str:
    return choice.name if isinstance(choice.name, str) else choice.name.__qualname__


def _class_named(name: str | type[Optimizer]) -> type[Optimizer]:
    if isinstance(name, type):
        return name
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"there is no optimizer '{name}': {error}",
            where="optimizer.name",
            fix="use adamw, sgd, muon, or the full name of a class, such as torch.optim.Adagrad",
        ) from None
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ConfigError(
            f"'{name}' is no optimizer, but {found!r}",
            where="optimizer.name",
            fix="name a class that derives from torch.optim.Optimizer",
        )
    return found


def _check_arguments(kind: type[Optimizer], choice: Optimization, where: str) -> None:
    if issubclass(kind, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise ConfigError(
            f"{kind.__name__} does not step each parameter by itself from a dense gradient",
            where=where,
            fix="use another optimizer",
        )
    if "lr" in choice.arguments:
        raise ConfigError("the schedule sets lr in every step", where=where, fix="set optimizer.lr instead")
    known = inspect.signature(kind).parameters
    if any(each.kind is each.VAR_KEYWORD for each in known.values()):
        return
    names = [name for name in known if name not in ("params", "lr")]
    for name in choice.arguments:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean '{near[0]}'? " if near else ""
            raise ConfigError(
                f"{kind.__name__} has no argument '{name}'",
                where=where,
                fix=f"{hint}use {', '.join(names) or 'none'}",
            )


def _adamw_options(parallel: Parallel, choice: Optimization) -> dict[str, Any]:
    is_fused = {"fused": True} if parallel.home.type == "cuda" else {}
    return {"lr": choice.lr, "betas": (choice.beta1, choice.beta2), **is_fused}


def _any(
    parallel: Parallel, params: list[nn.Parameter], kind: type[Optimizer], choice: Optimization
) -> Optimizer:
    options: dict[str, Any] = {"lr": choice.lr}
    if choice.name == "adamw":
        options = _adamw_options(parallel, choice)
    elif choice.name == "sgd":
        options["momentum"] = choice.beta1
    options |= choice.arguments
    groups: list[Any] = params
    if "weight_decay" in inspect.signature(kind).parameters and "weight_decay" not in choice.arguments:
        groups = _decayed_groups(params, choice.weight_decay)
    if choice.whole and parallel.mode != "none":
        return whole(kind, groups, **options)
    if parallel.mode == "optimizer":
        return ZeroRedundancyOptimizer(groups, kind, **options)
    return kind(groups, **options)


def _muon(parallel: Parallel, params: list[nn.Parameter], choice: Optimization) -> Optimizer:
    """Muon for the matrices of the units; AdamW for the embedding, the head, and what is no matrix."""
    of_units = {param for unit in parallel.units.values() for param in unit.parameters()}
    matrices = [param for param in params if param in of_units and param.dim() == 2]
    others = set(params).difference(matrices)
    rest = _decayed_groups([param for param in params if param in others], choice.weight_decay)
    # Muon's updates are then as large as AdamW's, and one learning rate fits both.
    muon_options: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.95}
    muon_options |= {"lr": choice.lr, "weight_decay": choice.weight_decay, **choice.arguments}
    adamw_options = _adamw_options(parallel, choice)
    if parallel.mode == "none":
        return mixed([torch.optim.Muon(matrices, **muon_options), torch.optim.AdamW(rest, **adamw_options)])
    if parallel.mode == "optimizer":
        adamw: Optimizer = whole(torch.optim.AdamW, rest, **adamw_options)
    else:
        adamw = flat(rest, torch.optim.AdamW, **adamw_options)
    return mixed([whole(torch.optim.Muon, matrices, **muon_options), adamw])


def _decayed_groups(params: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    groups = [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": weight_decay},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
