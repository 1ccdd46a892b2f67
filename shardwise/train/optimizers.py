"""Creates the optimizer of a run: AdamW, SGD, Muon beside AdamW, or any class, by name, for every sharding mode.

mode                 an optimizer that works element by element   one that needs whole matrices
none                 as it is                                     as it is
optimizer            in ZeroRedundancyOptimizer                   in ``shardwise.optim.whole``
gradients, full, …   as it is, on shards                          in ``shardwise.optim.whole``
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.errors import ConfigError
from shardwise.optim import flat, mixed, whole
from shardwise.train.config import Optimization
from shardwise.train.parallel import Parallel
from shardwise.zero import ZeroRedundancyOptimizer

__all__ = ["make_optimizer"]


def make_optimizer(parallel: Parallel, choice: Optimization) -> Optimizer:
    """Creates the optimizer, with weight decay only for parameters of two or more dimensions.

    Raises:
        ConfigError: there is no such class, or it does not take the arguments.
    """
    params = [param for param in parallel.module.parameters() if param.requires_grad]
    is_fused = {"fused": True} if parallel.home.type == "cuda" else {}
    adamw_options = {"lr": choice.lr, "betas": (choice.beta1, choice.beta2), **is_fused}
    if choice.name == "muon":
        return _muon(parallel, params, choice, adamw_options)
    kind: type[Optimizer]
    options: dict[str, Any]
    if choice.name == "adamw":
        kind, options = torch.optim.AdamW, {**adamw_options, **choice.arguments}
    elif choice.name == "sgd":
        kind, options = torch.optim.SGD, {"lr": choice.lr, "momentum": choice.beta1, **choice.arguments}
    else:
        kind, options = _class_named(choice.name), {"lr": choice.lr, **choice.arguments}
    groups: list[Any] = params
    if "weight_decay" in inspect.signature(kind).parameters and "weight_decay" not in choice.arguments:
        groups = _decayed_groups(params, choice.weight_decay)
    try:
        if choice.whole and parallel.mode != "none":
            return whole(kind, groups, **options)
        if parallel.mode == "optimizer":
            return ZeroRedundancyOptimizer(groups, kind, **options)
        return kind(groups, **options)
    except TypeError as error:
        raise ConfigError(
            f"{kind.__name__} does not take these arguments: {error}",
            where=f"optimizer.name={choice.name}, optimizer.arguments={choice.arguments}",
            fix=f"use arguments of {kind.__name__}{inspect.signature(kind)}",
        ) from None


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


def _muon(
    parallel: Parallel, params: list[nn.Parameter], choice: Optimization, adamw_options: dict[str, Any]
) -> Optimizer:
    """Muon for the matrices of the units; AdamW for the embedding, the head, and what is no matrix."""
    of_units = {param for unit in parallel.units.values() for param in unit.parameters()}
    matrices = [param for param in params if param in of_units and param.dim() == 2]
    others = set(params).difference(matrices)
    rest = _decayed_groups([param for param in params if param in others], choice.weight_decay)
    # Muon's updates are then as large as AdamW's, and one learning rate fits both.
    muon_options: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.95}
    muon_options |= {"lr": choice.lr, "weight_decay": choice.weight_decay, **choice.arguments}
    if parallel.mode == "none":
        parts = [torch.optim.Muon(matrices, **muon_options), torch.optim.AdamW(rest, **adamw_options)]
    elif parallel.mode == "optimizer":
        parts = [
            whole(torch.optim.Muon, matrices, **muon_options),
            whole(torch.optim.AdamW, rest, **adamw_options),
        ]
    else:
        parts = [
            whole(torch.optim.Muon, matrices, **muon_options),
            flat(rest, torch.optim.AdamW, **adamw_options),
        ]
    return mixed(parts)


def _decayed_groups(params: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    groups = [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": weight_decay},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
