"""``FullyShardedDataParallel``'s methods for the state of a model that contains wrappers; most are static, as in torch.

They find the wrappers and the kind of state dict that is set, and call ``model_state``, ``optim_state_gather``,
``optim_state_load`` and ``summon_full_params``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.engine.step.agreement import forget_torn_steps
from shardwise.engine.unit.binding import WRAPPED_NAME
from shardwise.engine.unit.membership import units_of
from shardwise.engine.unit.unit import Unit
from shardwise.errors import ConfigError
from shardwise.torch_internals import state_dict_call_options
from shardwise.wrapper.model_state import LoadHooks, check_fits, read_state
from shardwise.wrapper.optim_parameters import mesh_of
from shardwise.wrapper.optim_state_gather import named_state
from shardwise.wrapper.optim_state_load import OptimStateKeyType, rekeyed, state_to_load
from shardwise.wrapper.state_dict_types import (
    FullOptimStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    checked_settings,
    get_settings,
    set_settings,
    temporary_settings,
)
from shardwise.wrapper.summon_full_params import flat_lines, summoned

OptimInput = Iterable[Any] | None


class ModelMethods(nn.Module):
    """The base class of ``FullyShardedDataParallel`` that has its methods for a model's state."""

    _is_inner: bool
    _has_root: bool
    _load_hooks: LoadHooks

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The state dict of the kind that is set, FULL_STATE_DICT by default; every rank must call it."""
        return read_state(self, super().state_dict, args, kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads full tensors or DTensors; loads nothing if anything does not fit. ``assign=True`` copies as well."""
        check_fits(self, state_dict, strict)
        forget_torn_steps(units_of(self))
        try:
            return super().load_state_dict(state_dict, strict)
        finally:
            # In case loading raised, before a post-hook ran: inner wrappers first.
            for module in reversed(self.fsdp_modules(self)):
                module._load_hooks.after(module)

    def check_is_root(self) -> bool:
        """Whether this wrapper is not inside another one. The wrappers inside it then cannot be roots."""
        if not self._is_inner:
            for inner in self.fsdp_modules(self):
                inner._has_root = inner is not self
        return not self._is_inner

    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[None]:
        """A context manager in which modules have full parameters under their original names. Every rank must enter it.

        Args:
            module: a wrapper, or a module that contains wrappers.
            recurse: ``False`` for the parameters of ``module``'s own wrapper only.
            writeback: write changes back to the shards on exit.
            rank0_only: have full parameters on the first rank only; needs ``writeback=False``.
            offload_to_cpu: put full parameters into host memory.
            with_grads: have full gradients too, and write changes of them back.
        """
        return summoned(module, recurse, writeback, rank0_only, offload_to_cpu, with_grads)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[Any]:
        """The wrappers at and below ``module``; with ``root_only``, those that are not inside another wrapper."""
        found = [member for member in module.modules() if isinstance(member, ModelMethods)]
        return [member for member in found if not (root_only and member._is_inner)]

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Sets the kind of state dict of all wrappers at and below ``module``; returns the previous settings."""
        settings = checked_settings(
            state_dict_type, state_dict_config, optim_state_dict_config, "set_state_dict_type"
        )
        return set_settings(ModelMethods.fsdp_modules(module), settings)

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The kind of state dict that is set on the wrappers at and below ``module``."""
        return get_settings(ModelMethods.fsdp_modules(module))

    @staticmethod
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> AbstractContextManager[None]:
        """``set_state_dict_type`` for a ``with`` block."""
        settings = checked_settings(
            state_dict_type, state_dict_config, optim_state_dict_config, "state_dict_type"
        )
        return temporary_settings(ModelMethods.fsdp_modules(module), settings)

    # --- optimizer states -----------------------------------------------------------------------------------------

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """The optimizer's state by parameter name, of the kind that is set on ``model``; every rank must call it.

        ``optim_state_dict`` may be the result of ``optim.state_dict()``. ``group`` is accepted for compatibility: the
        ranks are the model's. Optimizers of different ranks may list parameters in different orders, but must have the
        same parameters and the same states.
        """
        return named_state(model, optim, ModelMethods.get_state_dict_type(model), optim_state_dict)

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: OptimInput = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """The optimizer's full state by parameter name, in host memory; with ``rank0_only``, empty on other ranks."""
        _warn_of_optim_input(optim_input)
        config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
        return named_state(model, optim, StateDictSettings(optim_state_dict_config=config))

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
    ) -> dict[str, Any]:
        """The optimizer's state by parameter name, as DTensors."""
        config = ShardedOptimStateDictConfig(offload_to_cpu=False)
        settings = StateDictSettings(StateDictType.SHARDED_STATE_DICT, optim_state_dict_config=config)
        return named_state(model, optim, settings)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """A state dict for ``optim.load_state_dict``: this rank's shards of a state by names, full or as DTensors.

        With ``FullOptimStateDictConfig(rank0_only=True)``, the first rank's state is broadcast. ``load_directly`` also
        loads the result. ``is_named_optimizer`` is accepted for compatibility.
        """
        config = ModelMethods.get_state_dict_type(model).optim_state_dict_config
        if isinstance(config, FullOptimStateDictConfig) and config.rank0_only:
            optim_state_dict = _from_first_rank(optim_state_dict, model, group)
        state = state_to_load(model, _groups(model, None, optim), optim_state_dict)
        if load_directly:
            optim.load_state_dict(state)
        return state

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """A state dict for ``optim.load_state_dict``, from a full state that every rank has."""
        return state_to_load(model, _groups(model, optim_input, optim), full_optim_state_dict)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """A state dict for ``optim.load_state_dict``, from a state as DTensors; every rank must call it."""
        return state_to_load(model, _groups(model, None, optim), sharded_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """A state dict for ``optim.load_state_dict``, from a full state that only the first rank has."""
        state = _from_first_rank(full_optim_state_dict, model, group)
        return state_to_load(model, _groups(model, optim_input, optim), state)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Changes the keys of a full state from an optimizer's numbers to names, or back; ``model`` may be unwrapped.

        Without ``optim``, the optimizer is assumed to list the parameters of each group in the model's order.
        """
        is_own = optim is not None or optim_input is not None
        groups = _groups(model, optim_input, optim)
        return rekeyed(optim_state_dict, optim_state_key_type, model, groups, is_own)


def _from_first_rank(
    state: dict[str, Any] | None, model: nn.Module, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """The state of the first rank of ``group``; by default of the ranks that share the model."""
    mesh = mesh_of(model)
    groups = [group] if group is not None or mesh is None else [calls.group for calls in mesh.axes]
    sent = [state]
    for one in groups:
        dist.broadcast_object_list(sent, group=one, group_src=0)
    assert sent[0] is not None
    return sent[0]


def _groups(
    model: nn.Module, optim_input: OptimInput, optim: torch.optim.Optimizer | None
) -> list[list[torch.Tensor]]:
    """An optimizer's parameters by group, from the optimizer or its input; by default all of the model's."""
    if optim is not None:
        if optim_input is not None:
            raise ConfigError(
                "both optim_input and optim were given", where="optimizer state", fix="pass only optim"
            )
        return [group["params"] for group in optim.param_groups]
    _warn_of_optim_input(optim_input)
    given = list(model.parameters() if optim_input is None else optim_input)
    if given and isinstance(given[0], dict):
        return [list(group["params"]) for group in given]
    return [given]


def _warn_of_optim_input(optim_input: OptimInput) -> None:
    if optim_input is not None:
        warnings.warn("optim_input is deprecated: pass optim instead", FutureWarning, stacklevel=4)


# --- torch's own functions (torch.distributed.checkpoint.state_dict) ----------------------------------------------


def names_for_torch(unit: Unit) -> dict[str, str]:
    """The ``_fqn_modifiers`` of a wrapper: tells torch's functions that the wrapper adds nothing to parameter names.

    torch's functions know torch's wrappers by their class and treat ours as plain modules. That works for the state of
    models. For optimizers they would save this rank's shards as full states, so those calls raise.
    """
    call = state_dict_call_options()
    if call is not None:
        _check_torch_call(unit, *call)
    return {"": WRAPPED_NAME}


def _check_torch_call(unit: Unit, for_optimizers: bool, broadcasts: bool, drops_frozen: bool) -> None:
    wrapped = type(unit.modules[0].get_submodule(WRAPPED_NAME)).__name__
    where = f"torch.distributed.checkpoint.state_dict, on a wrapped {wrapped}, rank {unit.rank}"
    if for_optimizers:
        raise ConfigError(
            "torch's functions for optimizer states do not know which elements a wrapper's shards have",
            where=where,
            fix="call FullyShardedDataParallel.optim_state_dict(model, optimizer) to save, and "
            "optim_state_dict_to_load(model, optimizer, state) to get what optimizer.load_state_dict() needs",
        )
    flat_params = [line.flat for line in flat_lines(unit)]
    if flat_params and broadcasts:
        raise ConfigError(
            "broadcast_from_rank0=True does not work with flat parameters",
            where=where,
            fix="wrap with use_orig_params=True, or call model.load_state_dict() with the state dict on every rank",
        )
    if drops_frozen and any(param is not None and not param.requires_grad for param in flat_params):
        raise ConfigError(
            "ignore_frozen_params=True does not work with flat parameters",
            where=where,
            fix="wrap with use_orig_params=True, or remove the frozen parameters from model.state_dict()",
        )
