"""What can be asked of a whole model that has wrappers somewhere inside, mostly as static methods, as torch has it.

Each translates: which wrappers are concerned, which kind of state dict is set. What happens is other rooms' business.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.engine.step.agreement import forget_torn_steps
from shardwise.engine.unit.membership import units_of
from shardwise.errors import ConfigError
from shardwise.wrapper.model_state import check_state, give_state
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
    settings_for_now,
)
from shardwise.wrapper.summon_full_params import shown_whole

OptimInput = Iterable[Any] | None


class ModelMethods(nn.Module):
    """What ``FullyShardedDataParallel`` does with the state of a model, most of it as static methods."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The state dict of the kind that is set, FULL_STATE_DICT by default; every rank must call it."""
        return give_state(self, super().state_dict, args, kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads whole tensors or DTensors; of what does not fit, nothing. ``assign`` copies too: shards stay put."""
        check_state(self, state_dict, strict)
        forget_torn_steps(units_of(self))
        try:
            return super().load_state_dict(state_dict, strict)
        finally:
            # Where loading broke off: inner ones first.
            for module in reversed(self.fsdp_modules(self)):
                module.__dict__["_load_hooks"].after(module)

    def check_is_root(self) -> bool:
        """Whether this wrapper is inside no other."""
        return not self.__dict__["_is_inner"]

    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[None]:
        """Within it, modules show whole parameters under their own names; on every rank.

        Args:
            module: whose wrappers, at and below it, are shown whole.
            recurse: False for this wrapper's own parameters alone.
            writeback: take changes over into the shards afterwards.
            rank0_only: show whole parameters on the first rank alone; without ``writeback``.
            offload_to_cpu: whole parameters in host memory.
            with_grads: show whole gradients too, and write changes of them back.
        """
        return shown_whole(module, recurse, writeback, rank0_only, offload_to_cpu, with_grads)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[Any]:
        """The wrappers at and below ``module``; with ``root_only`` those inside no other."""
        found = [member for member in module.modules() if isinstance(member, ModelMethods)]
        return [member for member in found if not (root_only and member.__dict__["_is_inner"])]

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Sets the kind of state dict of all wrappers at and below ``module``; returns what was set before."""
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
        """``set_state_dict_type`` for the length of a ``with`` block."""
        settings = checked_settings(
            state_dict_type, state_dict_config, optim_state_dict_config, "state_dict_type"
        )
        return settings_for_now(ModelMethods.fsdp_modules(module), settings)

    # --- optimizer states -----------------------------------------------------------------------------------------

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """The optimizer's state by parameter name, of the kind that is set on ``model``; every rank must call it.

        ``optim_state_dict`` is what ``optim.state_dict()`` gave, if it is not to be asked again. ``group`` is taken for
        compatibility: the ranks are the model's. Optimizers of different ranks may list parameters in different orders,
        but must hold the same ones, and the same kinds of state.
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
        """The optimizer's state by parameter name, whole, in host memory; with ``rank0_only`` empty elsewhere."""
        config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
        return named_state(model, optim, StateDictSettings(optim_state_dict_config=config))

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
    ) -> dict[str, Any]:
        """The optimizer's state by parameter name, in DTensors."""
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
        """What ``optim.load_state_dict`` takes: this rank's shards of a state by names, whole or in DTensors.

        Where ``FullOptimStateDictConfig(rank0_only=True)`` is set, the first rank's is sent to all. ``load_directly``
        also loads it. ``is_named_optimizer`` is taken for compatibility.
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
        """What ``optim.load_state_dict`` takes, of a whole state that every rank has."""
        return state_to_load(model, _groups(model, optim_input, optim), full_optim_state_dict)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """What ``optim.load_state_dict`` takes, of a state in DTensors; every rank must call it."""
        return state_to_load(model, _groups(model, None, optim), sharded_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """What ``optim.load_state_dict`` takes, of a whole state that the first rank alone has."""
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
        """A whole state by names instead of an optimizer's numbers, or the other way; ``model`` may be plain.

        Without ``optim`` the optimizer is taken to list the parameters of each group in the model's order.
        """
        is_own = optim is not None or optim_input is not None
        groups = _groups(model, optim_input, optim)
        return rekeyed(optim_state_dict, optim_state_key_type, model, groups, is_own)


def _from_first_rank(
    state: dict[str, Any] | None, model: nn.Module, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """What the first of ``group`` has; by default of the ranks that share the model."""
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
    """An optimizer's parameters by group: from itself, or from what it was made of; by default all of the model's."""
    if optim is not None:
        if optim_input is not None:
            raise ConfigError(
                "both optim_input and optim were given", where="optimizer state", fix="pass optim alone"
            )
        return [group["params"] for group in optim.param_groups]
    given = list(model.parameters() if optim_input is None else optim_input)
    if given and isinstance(given[0], dict):
        return [list(group["params"]) for group in given]
    return [given]
