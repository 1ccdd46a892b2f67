"""Functions on models sharded by either API: methods that count as a forward, and models that share side streams."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn

from shardwise.composable.fsdp_module import FSDPModule
from shardwise.engine.unit.membership import units_of
from shardwise.engine.unit.unit import Unit
from shardwise.errors import ConfigError, ConfigTypeError
from shardwise.wrapper.summon_full_params import SUMMONED_ATTRIBUTE, check_has_full_parameters
from shardwise.wrapper.wrapper import FullyShardedDataParallel


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes ``module.method_name(...)`` gather and free parameters as ``module(...)`` does.

    Does nothing if the module is not sharded.
    """
    if isinstance(module, FullyShardedDataParallel):
        enter = module._enter_method
    elif isinstance(module, FSDPModule):
        enter = functools.partial(_enter, module)
    else:
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ConfigError(
            f"{type(module).__name__} has no method '{method_name}'",
            where=f"register_fsdp_forward_method({type(module).__name__}, {method_name!r})",
            fix="pass the name of a method of the module",
        )

    @functools.wraps(method)
    def run_gathered(*args: Any, **kwargs: Any) -> Any:
        if SUMMONED_ATTRIBUTE in module.__dict__:
            check_has_full_parameters(units_of(module)[0])
            return method(*args, **kwargs)
        # Not before: the unit may be joined with others after this method was registered.
        hooks = units_of(module)[0].hooks
        args, kwargs = enter(args, kwargs)
        try:
            return hooks.post_forward(module, args, method(*args, **kwargs))
        except BaseException as error:
            hooks.forward_raised(module, error)
            raise

    # On the instance, not on the class: other modules of the class may not be sharded.
    module.__dict__[method_name] = run_gathered


def _enter(module: FSDPModule, args: Any, kwargs: Any) -> Any:
    return units_of(module)[0].hooks.pre_forward(module, args, kwargs)


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Lets several models share their side streams and so their memory pools, e.g. the stages of a pipeline."""
    units: list[Unit] = []
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ConfigTypeError(
                f"share_comm_ctx was given a {type(module).__name__}, which is not sharded",
                where="share_comm_ctx",
                fix="pass modules on which fully_shard was called",
            )
        units += units_of(module)
    for unit in units[1:]:
        unit.root.streams = units[0].root.streams
