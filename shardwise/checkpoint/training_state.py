"""The state of a model and its optimizer in a checkpoint: named tensors, the same for every sharding.

    model/<parameter or buffer>             model/layers.0.up.weight
    optimizer/<parameter>/<state>           optimizer/layers.0.up.weight/exp_avg

Plain parameters, shards, and state owned by a ZeRO rank are all parts of the same tensors. What follows from the
configuration and the step (learning rates, the order of the data, random seeds) is not saved but computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.parts import Offsets, Part, dtype_name, part_of
from shardwise.checkpoint.reading import check_files, load_parts
from shardwise.checkpoint.state_names import named_values, nested_state
from shardwise.engine.step.agreement import forget_torn_steps
from shardwise.engine.unit.binding import clean_name
from shardwise.engine.unit.flat_form import FlatForm
from shardwise.engine.unit.membership import units_of
from shardwise.errors import CheckpointError, ConfigError
from shardwise.optim.mixed_optimizer import MixedOptimizer
from shardwise.optim.whole_optimizer import WholeOptimizer
from shardwise.torch_internals import state_entries
from shardwise.zero import ZeroRedundancyOptimizer

__all__ = ["MODEL", "OPTIMIZER", "TrainingState"]

MODEL = "model/"
OPTIMIZER = "optimizer/"


class TrainingState:
    """The tensors of a run on this rank: ``parts`` returns them to be saved, ``load`` loads them.

    Args:
        module: with or without ``fully_shard``; wrapped by FullyShardedDataParallel only if that does not shard, and
            not by DistributedDataParallel.
        optimizer: any optimizer of its parameters; a ZeroRedundancyOptimizer must not be ``balanced``.
        elsewhere: the shape and dtype of each parameter of the model that is only on other ranks, by name.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        elsewhere: Mapping[str, tuple[tuple[int, ...], torch.dtype]] | None = None,
    ) -> None:
        for unit in (unit for child in module.modules() for unit in units_of(child)):
            if isinstance(unit.form, FlatForm) and unit.mesh.shard.world > 1:
                raise ConfigError(
                    f"unit '{unit.name}' is sharded by FullyShardedDataParallel, and a checkpoint cannot tell its flat "
                    "shards from full parameters",
                    where=f"TrainingState({type(module).__name__}), rank {unit.rank}",
                    fix="save its sharded state dict with torch.distributed.checkpoint, or shard with fully_shard",
                )
        self._module, self._optimizer, self._elsewhere = module, optimizer, elsewhere or {}
        self._offsets: Offsets = {}
        self._names: dict[torch.Tensor, str] = {
            param: clean_name(name) for name, param in module.named_parameters()
        }

    def parts(self) -> dict[str, Part]:
        """Returns this rank's part of every tensor; nothing is copied or communicated."""
        parts = {MODEL + name: part_of(value, self._offsets) for name, value in self._model_entries()}
        if self._optimizer is not None:
            for param, name in self._names.items():
                for key, value in named_values(self._optimizer.state.get(param, {})).items():
                    parts[f"{OPTIMIZER}{name}/{key}"] = part_of(value, self._offsets)
        return parts

    def load(
        self, folder: Path, manifest: Manifest, group: dist.ProcessGroup | None, *, verify: bool = True
    ) -> bool:
        """Loads model and optimizer, on every rank; returns False if the checkpoint has no optimizer state.

        ``verify=False`` skips checksums, if they have just been checked.

        Raises:
            CheckpointError: the checkpoint is damaged or of another model; nothing has changed.
        """
        self._check_fits(folder, manifest)
        if verify:
            check_files(folder, manifest, group)
        has_state = any(name.startswith(OPTIMIZER) for name in manifest.tensors)
        parts = {MODEL + name: part_of(value, self._offsets) for name, value in self._model_entries()}
        states = self._state_templates(manifest) if has_state else {}
        for values in states.values():
            # Raises if they make no state, before anything is loaded.
            nested_state(values)
        for param, values in states.items():
            for key, value in values.items():
                parts[f"{OPTIMIZER}{self._names[param]}/{key}"] = part_of(value)
        forget_torn_steps(unit for module in self._module.modules() for unit in units_of(module))
        load_parts(parts, folder, manifest, group, verify=False)
        if has_state and self._optimizer is not None:
            # Also with no state for this rank: other ranks may wait for it.
            self._set_state(states)
        return has_state

    def _model_entries(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields parameters and persistent buffers by name; a tied parameter comes once."""
        for param, name in self._names.items():
            yield name, param
        for path, module in self._module.named_modules():
            for name, value in state_entries(module):
                if value is not None and not isinstance(value, nn.Parameter):
                    yield clean_name(f"{path}.{name}" if path else name), value

    def _check_fits(self, folder: Path, manifest: Manifest) -> None:
        ours = {
            MODEL + name: (tuple(value.shape), dtype_name(value.dtype))
            for name, value in self._model_entries()
        }
        ours |= {MODEL + name: (shape, dtype_name(dtype)) for name, (shape, dtype) in self._elsewhere.items()}
        theirs = {
            name: (record.shape, record.dtype)
            for name, record in manifest.tensors.items()
            if name.startswith(MODEL)
        }
        names = {*self._names.values(), *self._elsewhere}
        unknown = [
            name for name in manifest.tensors if name.startswith(OPTIMIZER) and _split(name)[0] not in names
        ]
        # In the model's order, so that the first difference is reported.
        for name in [*ours, *theirs, *unknown]:
            mine, saved = ours.get(name), theirs.get(name)
            tensor = name.removeprefix(MODEL)
            if name.startswith(OPTIMIZER):
                what = f"it has '{name}', but the model has no parameter '{_split(name)[0]}'"
            elif mine == saved:
                continue
            elif saved is None:
                what = f"it does not have '{tensor}', which has shape {mine and mine[0]} in the model"
            elif mine is None:
                what = f"it has '{tensor}' of shape {saved[0]}, which the model does not have"
            elif mine[0] != saved[0]:
                what = f"'{tensor}' has shape {saved[0]} in the checkpoint and {mine[0]} in the model"
            else:
                what = f"'{tensor}' is {saved[1]} in the checkpoint and {mine[1]} in the model"
            raise CheckpointError(
                f"the checkpoint is of another model: {what}",
                where=str(folder),
                fix="resume with the recipe and settings it was saved with (--resume FOLDER without others uses them), "
                "or train into another folder",
            )

    def _stepped(self) -> list[torch.Tensor]:
        """Returns the parameters whose optimizer state is on this rank."""
        optimizer = self._optimizer
        if optimizer is None:
            return []
        if isinstance(optimizer, (WholeOptimizer, MixedOptimizer)):
            return [param for param in optimizer.owned_parameters() if param in self._names]
        local = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
        return [param for group in local.param_groups for param in group["params"] if param in self._names]

    def _state_templates(self, manifest: Manifest) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns empty tensors for the optimizer state that the checkpoint has of this rank's parameters."""
        keys: dict[str, list[str]] = {}
        for name in manifest.tensors:
            if name.startswith(OPTIMIZER):
                param_name, key = _split(name)
                keys.setdefault(param_name, []).append(key)
        templates: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        whole = _with_whole_state(self._optimizer)
        for param in self._stepped():
            name = self._names[param]
            for key in keys.get(name, ()):
                record = manifest.tensors[f"{OPTIMIZER}{name}/{key}"]
                dtype: torch.dtype = getattr(torch, record.dtype)
                if record.shape == tuple(param.shape) and record.shape and param not in whole:
                    empty = torch.empty_like(param.detach(), dtype=dtype)
                else:
                    empty = torch.empty(record.shape, dtype=dtype, device="cpu")
                templates.setdefault(param, {})[key] = empty
        return templates

    def _set_state(self, states: dict[torch.Tensor, dict[str, torch.Tensor]]) -> None:
        """Sets state with the optimizer's own ``load_state_dict``, which knows where step counts and the like go."""
        optimizer = self._optimizer
        assert optimizer is not None
        params = [param for group in optimizer.param_groups for param in group["params"]]
        numbers = {param: number for number, param in enumerate(params)}
        groups = [
            {**group, "params": [numbers[param] for param in group["params"]]}
            for group in optimizer.param_groups
        ]
        state: dict[str, Any] = {
            "state": {numbers[param]: nested_state(values) for param, values in states.items()},
            "param_groups": groups,
        }
        optimizer.load_state_dict(state)


def _with_whole_state(optimizer: Optimizer | None) -> set[torch.Tensor]:
    """Returns the parameters whose state is whole on their owner, however they are sharded."""
    parts = optimizer.parts if isinstance(optimizer, MixedOptimizer) else [optimizer]
    owners = [part for part in parts if isinstance(part, WholeOptimizer)]
    return {param for owner in owners for param in owner.owned_parameters()}


def _split(name: str) -> tuple[str, str]:
    """Splits the name of an optimizer's tensor into the parameter's name and the state's key."""
    param_name, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
    return param_name, key
