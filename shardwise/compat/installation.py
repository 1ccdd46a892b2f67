"""``install()``: torch's public names for FSDP and ZeRO are ours, in modules already imported too.

    import shardwise
    shardwise.install()
    from torch.distributed.fsdp import fully_shard      # ours; so are the names that accelerate or trl have imported

Names are replaced all together or not at all: with ``fully_shard`` from one library and ``FSDPModule`` from another,
much runs and is wrong. Two modules of torch keep torch's names, ``torch.distributed.checkpoint.state_dict`` and
``torch.distributed.pipelining``: they look inside what they recognise.
"""

from __future__ import annotations

import gc
import importlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from shardwise.composable.fsdp_module import FSDPModule
from shardwise.errors import StateError
from shardwise.wrapper.wrapper import FullyShardedDataParallel
from shardwise.zero import ZeroRedundancyOptimizer

_FULLY_SHARD = (
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
)
_WRAPPER_OPTIONS = (
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
)
_WRAPPER = ("FullyShardedDataParallel", "OptimStateKeyType", *_WRAPPER_OPTIONS)
_WRAP_POLICIES = (
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
)
_ZERO_HOOKS = ("hook_with_zero_step", "hook_with_zero_step_interleaved")

# Where torch offers these names. Its own code reads them elsewhere.
_NAMES = {
    "torch.distributed.fsdp": (*_FULLY_SHARD, *_WRAPPER),
    "torch.distributed.fsdp._fully_shard": _FULLY_SHARD,
    "torch.distributed._composable.fsdp": _FULLY_SHARD,
    "torch.distributed._composable.fsdp.fully_shard": _FULLY_SHARD,
    "torch.distributed.fsdp.fully_sharded_data_parallel": _WRAPPER,
    "torch.distributed.fsdp.api": _WRAPPER_OPTIONS,
    "torch.distributed.fsdp.wrap": _WRAP_POLICIES,
    "torch.distributed.fsdp.sharded_grad_scaler": ("ShardedGradScaler",),
    "torch.distributed.optim": ("ZeroRedundancyOptimizer",),
    "torch.distributed.optim.zero_redundancy_optimizer": ("ZeroRedundancyOptimizer",),
    "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook": _ZERO_HOOKS,
}
# Imported before names are replaced, so that they keep torch's.
_KEPT = ("torch.distributed.checkpoint.state_dict", "torch.distributed.pipelining")


@dataclass(frozen=True)
class Installation:
    """What ``install()`` replaced: ``print`` it for one sentence."""

    replaced: tuple[str, ...]
    """The names that are ours now, such as ``torch.distributed.fsdp.fully_shard``."""
    left: tuple[str, ...]
    """Names that this torch offers beside them, and that stay torch's."""

    def __str__(self) -> str:
        modules = {name.rpartition(".")[0] for name in self.replaced}
        others = sorted({module.partition(".")[0] for module in modules} - {"torch"})
        text = (
            f"shardwise replaces torch's FSDP and ZeRO: {len(self.replaced)} names in {len(modules)} modules"
        )
        text += f", also of {', '.join(others)}" if others else ""
        return text + (f"; still torch's: {', '.join(self.left)}" if self.left else "")


@dataclass(frozen=True)
class _Change:
    """A global variable of a module: torch's object before, ours after."""

    module: ModuleType
    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.module.__name__}.{self.name}"


_lock = threading.Lock()
_changes: list[_Change] = []


def install() -> Installation:
    """Makes torch's public names for FSDP and ZeRO ours, for libraries that import them from torch.

    Call it once, before models are sharded; when other modules are imported makes no difference. It replaces the names
    in torch's modules and wherever a module has imported them already. A second call does the same for modules that
    have since got hold of torch's own.

    Returns:
        What was replaced since the first call.

    Raises:
        StateError: torch's own are in use: a model is sharded with them, or a class derives from them. Nothing has
            changed then.
    """
    with _lock:
        for kept in _KEPT:
            importlib.import_module(kept)
        modules = {path: importlib.import_module(path) for path in _NAMES}
        ours = _ours_by_identity(modules)
        _check_unused()
        for change in list(_to_change(modules, ours)):
            vars(change.module)[change.name] = change.after
            _changes.append(change)
        return Installation(tuple(map(str, _changes)), _left_to_torch())


def uninstall() -> tuple[str, ...]:
    """Gives torch's names back to every module that ``install()`` took them from.

    Returns:
        Names that modules have imported since then and that are therefore still ours, such as ``my_script.FSDP``:
        nobody can tell whether they were asked of torch or of shardwise. Import those modules again.
    """
    with _lock:
        ours = {id(change.after) for change in _changes}
        while _changes:
            change = _changes.pop()
            vars(change.module)[change.name] = change.before
        return tuple(
            f"{module.__name__}.{name}"
            for module in _other_modules()
            for name, value in list(vars(module).items())
            if id(value) in ours
        )


def _ours_by_identity(modules: dict[str, ModuleType]) -> dict[int, Any]:
    """Returns ours for each of torch's objects, by its ``id``. A torch that lacks a name has nothing to replace."""
    front = importlib.import_module("shardwise")
    ours = {id(change.before): change.after for change in _changes}
    for path, names in _NAMES.items():
        for name in names:
            before, after = vars(modules[path]).get(name), getattr(front, name)
            if before is not None and before is not after:
                ours[id(before)] = after
    return ours


def _to_change(modules: dict[str, ModuleType], ours: dict[int, Any]) -> Iterator[_Change]:
    for module in (*modules.values(), *_other_modules()):
        for name, value in list(vars(module).items()):
            if id(value) in ours:
                yield _Change(module, name, value, ours[id(value)])


def _other_modules() -> Iterator[ModuleType]:
    """Yields all imported modules but torch's and ours. Some are imported under two names."""
    modules = {id(module): module for module in sys.modules.values() if isinstance(module, ModuleType)}
    for module in modules.values():
        if module.__name__.partition(".")[0] not in ("torch", "shardwise"):
            yield module


def _left_to_torch() -> tuple[str, ...]:
    fsdp = importlib.import_module("torch.distributed.fsdp")
    known = _NAMES["torch.distributed.fsdp"]
    return tuple(f"torch.distributed.fsdp.{name}" for name in fsdp.__all__ if name not in known)


# --- torch's own in use -----------------------------------------------------------------------------------------------


def _torchs(path: str, name: str) -> Any:
    """Returns torch's own object, also after ``install()``."""
    before = {str(change): change.before for change in _changes}
    return before.get(f"{path}.{name}") or getattr(importlib.import_module(path), name)


def _check_unused() -> None:
    theirs = {
        _torchs("torch.distributed.fsdp", "FSDPModule"),
        _torchs("torch.distributed.fsdp", "FullyShardedDataParallel"),
        _torchs("torch.distributed.optim", "ZeroRedundancyOptimizer"),
    }
    users = _live_users(theirs)
    if users:
        # Cycles of what nobody uses any more are no reason to refuse.
        gc.collect()
        users = _live_users(theirs)
    if users:
        raise StateError(
            f"torch's own FSDP or ZeRO is in use: {', '.join(users[:3])}{' and others' if users[3:] else ''}",
            where="shardwise.install()",
            fix="call shardwise.install() before models are sharded, or run the script with "
            "'python -m shardwise run script.py'",
        )


def _live_users(theirs: set[type]) -> list[str]:
    """Returns the objects, and the classes of users, that derive from torch's classes and not from ours."""
    ours = {FSDPModule, FullyShardedDataParallel, ZeroRedundancyOptimizer}
    users: dict[str, None] = {}
    for thing in gc.get_objects():
        cls, kind = type(thing), "object"
        # Not isinstance: objects may lie about their class, and do work when asked.
        if issubclass(cls, type):
            cls, kind = thing, "class"
            if str(cls.__module__).startswith("torch."):
                continue
        bases = cls.__mro__
        if not theirs.isdisjoint(bases) and ours.isdisjoint(bases):
            users[f"{kind} {cls.__module__}.{cls.__qualname__}"] = None
    return list(users)
