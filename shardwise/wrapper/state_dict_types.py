"""The kinds of state dict of wrapped models, as enums and records with torch's names; and what is set on a wrapper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeVar

from torch import nn

from shardwise.errors import ConfigRecordError, ConfigTypeError, StateAssertionError
from shardwise.wrapper.options import as_choice, as_record


class StateDictType(Enum):
    """FULL: full tensors. SHARDED: DTensors, as with ``fully_shard``. LOCAL: this rank's flat shards."""

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


@dataclass
class StateDictConfig:
    """``offload_to_cpu`` puts the tensors of a state dict into host memory."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """``rank0_only`` returns an empty state dict on all ranks but the first."""

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    pass


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    # Read-only, for programs that ask: sharded values are DTensors, with and without a mesh.
    _use_dtensor: bool = True

    def __post_init__(self) -> None:
        self._use_dtensor = True


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
    _use_dtensor: bool = True

    def __post_init__(self) -> None:
        self._use_dtensor = True


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
    """The settings of one wrapper."""
    settings: StateDictSettings = module.__dict__.setdefault(SETTINGS_ATTRIBUTE, StateDictSettings())
    return settings


def checked_settings(kind: Any, config: Any, optim_config: Any, where: str) -> StateDictSettings:
    """Checks the arguments of ``set_state_dict_type``; accepts torch's enum and records."""
    kind = as_choice(StateDictType, kind, where)
    state_class, optim_class = CONFIGS[kind]
    where = f"{where}({kind.name})"
    return StateDictSettings(
        kind,
        state_class() if config is None else _as_config("state_dict_config", state_class, config, where),
        optim_class()
        if optim_config is None
        else _as_config("optim_state_dict_config", optim_class, optim_config, where),
    )


C = TypeVar("C", StateDictConfig, OptimStateDictConfig)


def _as_config(name: str, kind: type[C], value: Any, where: str) -> C:
    try:
        return as_record(kind, value, where)
    except ConfigTypeError as error:
        what = f"Expected {name} of type {kind.__name__}: {error.what}"
        raise ConfigRecordError(what, where=where, fix=error.fix) from None


def set_settings(wrappers: list[nn.Module], settings: StateDictSettings) -> StateDictSettings:
    """Sets the settings of all wrappers; returns the first one's, which must be of the same kind for all."""
    before = settings_of(wrappers[0]) if wrappers else StateDictSettings()
    _check_same([settings_of(wrapper).state_dict_type for wrapper in wrappers])
    for wrapper in wrappers:
        wrapper.__dict__[SETTINGS_ATTRIBUTE] = settings
    return before


def get_settings(wrappers: list[nn.Module]) -> StateDictSettings:
    """The settings of all wrappers; raises ``StateAssertionError`` if they differ."""
    found = [settings_of(wrapper) for wrapper in wrappers]
    _check_same(found)
    return found[0] if found else StateDictSettings()


def _check_same(found: Sequence[StateDictSettings | StateDictType]) -> None:
    differing = next((each for each in found if each != found[0]), None)
    if differing is not None:
        raise StateAssertionError(
            f"the wrappers of one model have different kinds of state dict: {found[0]} and {differing}",
            where=f"{len(found)} wrappers",
            fix="call FullyShardedDataParallel.set_state_dict_type on those that differ",
        )


@contextmanager
def temporary_settings(wrappers: list[nn.Module], settings: StateDictSettings) -> Iterator[None]:
    """Sets the settings of all wrappers, and restores each wrapper's previous settings on exit."""
    before = [settings_of(wrapper) for wrapper in wrappers]
    for wrapper in wrappers:
        wrapper.__dict__[SETTINGS_ATTRIBUTE] = settings
    try:
        yield
    finally:
        for wrapper, previous in zip(wrappers, before, strict=True):
            wrapper.__dict__[SETTINGS_ATTRIBUTE] = previous
