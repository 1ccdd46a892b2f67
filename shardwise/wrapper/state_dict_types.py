"""Which kind of state dict a wrapped model gives and takes, as records with torch's names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from torch import nn

from shardwise.errors import StateError
from shardwise.wrapper.options import as_choice, as_record


class StateDictType(Enum):
    """FULL: whole tensors. SHARDED: DTensors, as ``fully_shard`` gives them. LOCAL: this rank's shards as they lie."""

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


@dataclass
class StateDictConfig:
    """``offload_to_cpu`` puts the tensors of a state dict into host memory."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """``rank0_only`` leaves the state dicts of all ranks but the first empty."""

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    pass


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    pass


@dataclass
class OptimStateDictConfig:
    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    pass


@dataclass
class StateDictSettings:
    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig = field(default_factory=FullStateDictConfig)
    optim_state_dict_config: OptimStateDictConfig = field(default_factory=FullOptimStateDictConfig)


CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}

SETTINGS_ATTRIBUTE = "_shardwise_state_settings"


def settings_of(module: nn.Module) -> StateDictSettings:
    """What was set on one wrapper."""
    settings: StateDictSettings = module.__dict__.setdefault(SETTINGS_ATTRIBUTE, StateDictSettings())
    return settings


def checked_settings(kind: Any, config: Any, optim_config: Any, where: str) -> StateDictSettings:
    kind = as_choice(StateDictType, kind, where)
    state, optim = CONFIGS[kind]
    return StateDictSettings(
        kind,
        state() if config is None else as_record(state, config, f"{where}({kind.name})"),
        optim() if optim_config is None else as_record(optim, optim_config, f"{where}({kind.name})"),
    )


def set_settings(wrappers: list[nn.Module], settings: StateDictSettings) -> StateDictSettings:
    """Sets all wrappers; returns what was set before, which must have been the same for all."""
    before = get_settings(wrappers)
    for wrapper in wrappers:
        wrapper.__dict__[SETTINGS_ATTRIBUTE] = settings
    return before


def get_settings(wrappers: list[nn.Module]) -> StateDictSettings:
    found = [settings_of(wrapper) for wrapper in wrappers]
    if not found:
        return StateDictSettings()
    if any(settings != found[0] for settings in found):
        raise StateError(
            "wrappers of one model have different kinds of state dict",
            where=f"{len(found)} wrappers, the first has {found[0].state_dict_type.name}",
            fix="set one for all with FullyShardedDataParallel.set_state_dict_type(model, ...)",
        )
    return found[0]


@contextmanager
def settings_for_now(wrappers: list[nn.Module], settings: StateDictSettings) -> Iterator[None]:
    before = [settings_of(wrapper) for wrapper in wrappers]
    for wrapper in wrappers:
        wrapper.__dict__[SETTINGS_ATTRIBUTE] = settings
    try:
        yield
    finally:
        for wrapper, known in zip(wrappers, before, strict=True):
            wrapper.__dict__[SETTINGS_ATTRIBUTE] = known
