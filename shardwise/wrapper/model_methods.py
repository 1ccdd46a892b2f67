"""``FullyShardedDataParallel``'s methods for the state of a model that contains wrappers; most are static, as in torch.

They find the wrappers and the kind of state dict that is set, and call ``model_state``, ``optim_state_gather``,
``optim_state_load`` and ``summon_full_params``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.engine.gather.full_tensors import is_flat
from shardwise.engine.step.agreement import OPTIMIZER_HOOKS, forget_torn_steps
from shardwise.engine.unit.binding import WRAPPED_NAME, clean_name
from shardwise.engine.unit.flat_form import FLAT_NAME
from shardwise.engine.unit.membership import membership, units_of
from shardwise.errors import ConfigError, ConfigTypeError
from shardwise.torch_internals import serve_state_dict_functions
from shardwise.wrapper.model_state import LoadHooks, check_fits, read_state
from shardwise.wrapper.optim_parameters import mesh_of
from shardwise.wrapper.optim_state_gather import named_state
from shardwise.wrapper.optim_state_load import OptimStateKeyType, as_key_type, rekeyed, state_to_load
from shardwise.wrapper.state_dict_types import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    checked_settings,
    get_settings,
    set_settings,
    settings_of,
    temporary_settings,
)
from shardwise.wrapper.summon_full_params import flat_lines, idle_units, summoned, warn_of_copies

OptimInput = Iterable[Any] | None


class ModelMethods(nn.Module):
    """The base class of ``FullyShardedDataParallel`` that has its methods for a model's state."""

    _is_inner: bool
    _has_root: bool
    _load_hooks: LoadHooks

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The state dict of the kind that is set, FULL_STATE_DICT by default; every rank must call it."""
        config = self._state_dict_config
        if isinstance(config, FullStateDictConfig) and not self._is_inner:
            warn_of_copies("state_dict", config.offload_to_cpu, config.rank0_only, stacklevel=3)
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

    # Programs read and compare these three, although they are not public in torch.

    @property
    def _state_dict_type(self) -> StateDictType:
        return settings_of(self).state_dict_type

    @property
    def _state_dict_config(self) -> StateDictConfig:
        return settings_of(self).state_dict_config

    @property
    def _optim_state_dict_config(self) -> OptimStateDictConfig:
        return settings_of(self).optim_state_dict_config

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
        """The optimizer's state by parameter name, as DTensors in host memory."""
        config = ShardedOptimStateDictConfig()
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
        loads the result. ``is_named_optimizer``: ``optim`` is one whose state dict has the names of
        ``model.named_parameters()`` as keys, so the result has, too.
        """
        config = ModelMethods.get_state_dict_type(model).optim_state_dict_config
        if isinstance(config, FullOptimStateDictConfig) and config.rank0_only:
            optim_state_dict = _from_first_rank(optim_state_dict, model, group)
        named_optim = optim if is_named_optimizer else None
        state = state_to_load(model, _groups(model, None, optim), optim_state_dict, named_optim)
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
        _warn_of_optim_input(optim_input)
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
        _warn_of_optim_input(optim_input)
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
        _warn_of_optim_input(optim_input)
        is_own = optim is not None or optim_input is not None
        groups = _groups(model, optim_input, optim)
        return rekeyed(optim_state_dict, as_key_type(optim_state_key_type), model, groups, is_own)


def _from_first_rank(
    state: dict[str, Any] | None, model: nn.Module, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """The state of the first rank of ``group``; by default, and for a group of the model's mesh, of the whole mesh."""
    mesh = mesh_of(model)
    groups: list[dist.ProcessGroup | None] = [] if mesh is None else [calls.group for calls in mesh.axes]
    if not groups or (group is not None and group not in groups):
        groups = [group]
    sent = [state]
    for one in groups:
        dist.broadcast_object_list(sent, group=one, group_src=0)
    assert sent[0] is not None
    return sent[0]


def _warn_of_optim_input(optim_input: OptimInput) -> None:
    if optim_input is not None:
        warnings.warn(
            "The `optim_input` argument is deprecated: pass `optim`, or leave it out",
            FutureWarning,
            stacklevel=3,
        )


def _groups(
    model: nn.Module, optim_input: OptimInput, optim: torch.optim.Optimizer | None
) -> list[list[torch.Tensor]]:
    """An optimizer's parameters by group, from the optimizer or its input; by default all of the model's."""
    if optim is not None:
        return [group["params"] for group in optim.param_groups]
    given = list(model.parameters() if optim_input is None else optim_input)
    if optim_input is not None and not given:
        raise ConfigError("optim_input is empty", where="optimizer state", fix="pass optim")
    if all(isinstance(each, dict) for each in given):
        return [list(group["params"]) for group in given]
    if not all(isinstance(each, torch.Tensor) for each in given):
        raise ConfigTypeError(
            f"optim_input has {sorted({type(each).__name__ for each in given})}, neither all parameters nor all groups",
            where="optimizer state",
            fix="pass optim",
        )
    return [given]


# --- torch's own functions (torch.distributed.checkpoint.state_dict) ----------------------------------------------


def names_for_torch(wrapper: nn.Module) -> dict[str, str]:
    """The ``_fqn_modifiers`` of a wrapper: tells torch's functions that it adds nothing to names.

    They ask for it first of all, so this is where they are made to take wrappers; and where the wrapper's modules get
    their sharded parameters back, which optimizers have, in case they were kept gathered.
    """
    serve_state_dict_functions(ModelMethods, _names_in_flat_parameter, _step_alone)
    idle_units(wrapper.modules(), "torch.distributed.checkpoint.state_dict")
    return {"": WRAPPED_NAME}


def _step_alone(optim: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """A context in which an optimizer of a wrapped model steps on this rank only; others step as always."""
    found = [membership(param) for group in optim.param_groups for param in group["params"]]
    if any(member is not None and is_flat(member[0]) for member in found):
        return OPTIMIZER_HOOKS.without_agreement()
    return nullcontext()


def _names_in_flat_parameter(model: nn.Module, name: str) -> list[str] | None:
    """The names of the parameters in the flat parameter ``name`` of ``model``; None if it is no flat parameter."""
    path, _, last = name.rpartition(".")
    if not last.startswith(FLAT_NAME):
        return None
    for module_path, module in model.named_modules():
        if isinstance(module, ModelMethods) and clean_name(module_path) == clean_name(path):
            for line in (line for unit in units_of(module) for line in flat_lines(unit)):
                if line.name == last:
                    prefix = f"{path}." if path else ""
                    return [prefix + clean_name(slot.name) for slot in line.slots]
    return None
