"""Modules and optimizers: their parameters, buffers and children, their state dicts and hooks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.algorithms.join import Joinable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Returns the module's own parameters by name; writing to this dict is ten times as fast as ``setattr``."""
    return module._parameters


# Base class of all batch norms, which compute in full precision under any mixed precision.
BatchNorm = _BatchNorm


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    return module._modules


def state_entries(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yields the state dict entries of this module itself; ``None`` stands for extra state, which may be anything."""
    for name, param in module._parameters.items():
        if param is not None:
            yield name, param
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer
    if type(module).set_extra_state is not nn.Module.set_extra_state:
        yield "_extra_state", None


def loads_as_usual(module: nn.Module, own_hooks: type) -> bool:
    """Returns whether the module loads its state dict entries as usual, except for hooks of type ``own_hooks``."""
    hooks = module._load_state_dict_pre_hooks.values()
    return (
        type(module)._load_from_state_dict is nn.Module._load_from_state_dict
        and not module._load_state_dict_post_hooks
        and all(isinstance(getattr(hook, "hook", None), own_hooks) for hook in hooks)
    )


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tells learning-rate schedulers that the optimizer has stepped without a call of ``step()``."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Returns all hooks that run before and after its ``step()``."""
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    of_all = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    return [hook for hooks in (*own, *of_all) for hook in hooks.values()]


def is_inside_join(joinable: Joinable) -> bool:
    """Returns whether torch's ``Join`` is active for this object."""
    return bool(joinable._join_config.enable)


def run_before_state_dict(optimizer: torch.optim.Optimizer) -> None:
    """Runs the hooks registered to run before ``state_dict``."""
    for hook in optimizer._optimizer_state_dict_pre_hooks.values():
        hook(optimizer)


def run_after_state_dict(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        state_dict = hook(optimizer, state_dict) or state_dict
    return state_dict


def run_before_load_state_dict(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any]:
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = hook(optimizer, state_dict) or state_dict
    return state_dict


def run_after_load_state_dict(optimizer: torch.optim.Optimizer) -> None:
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)


class _States(dict[Any, Any]):
    """The states of a module by composable API. Whether an API was applied is for torch's list of them to say."""

    def __contains__(self, api: object) -> bool:
        return False


def set_composable_state(module: nn.Module, api: Any, state: object) -> None:
    """Makes ``api.state(module)`` return ``state``, as if torch's composable function ``api`` had been called."""
    states = module.__dict__.get(STATE_KEY, {})
    module.__dict__[STATE_KEY] = _States({**states, api.__wrapped__: state})


class _AppliedApis(dict[str, Any]):
    """Torch's list of the composable APIs that have been applied to a module, with ours on it.

    Torch's FSDP asks it before it touches a module, and would shard our shards. Its tools for state dicts walk through
    modules with the same question, which is theirs to ask.
    """

    def __init__(self, before: dict[str, Any], refusal: Exception) -> None:
        super().__init__(before)
        self._refusal = refusal

    def __contains__(self, api: object) -> bool:
        caller = sys._getframe(1)
        asked = caller.f_code.co_name
        if asked == "_composable" and caller.f_back is not None:
            asked = caller.f_back.f_code.co_name
        shards = asked in ("_is_composable_with_fsdp", "_get_ignored_modules")
        if shards or (asked == "wrapper" and api == "fully_shard"):
            raise self._refusal.with_traceback(None)
        return api == "fully_shard" or super().__contains__(api)

    def __reduce__(self) -> Any:
        # The copy of a module belongs to no unit.
        return dict, (dict(self),)


def refuse_torchs_fsdp(module: nn.Module, refusal: Exception) -> None:
    """Makes torch's own FSDP raise ``refusal`` when it is applied to the module or to one that contains it."""
    before = module.__dict__.get(REGISTRY_KEY, {})
    if not isinstance(before, _AppliedApis):
        module.__dict__[REGISTRY_KEY] = _AppliedApis(before, refusal)
