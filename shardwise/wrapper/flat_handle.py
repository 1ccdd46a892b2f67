"""What programs read of a wrapper although torch does not document it: its flat parameter, with a handle around it.

Libraries ask which parameters a wrapper manages (``_has_params``, ``_flat_param._fqns``), which parameters of an
optimizer are sharded (``_fsdp_flattened``), and store 16-bit weights in float32 after wrapping, by writing to
``_flat_param.data`` and ``_handle._orig_param_dtype``.
"""

from __future__ import annotations

import torch
from torch import nn

from shardwise.engine.gather.full_tensors import flat_form, flat_slots
from shardwise.engine.unit.flat_form import Line
from shardwise.engine.unit.unit import Unit

# The mark of parameters that are shards of a flat one, as torch sets it.
_FLATTENED = "_fsdp_flattened"


def mark_flattened(unit: Unit) -> None:
    """Marks the parameters that optimizers see as shards."""
    for slot in flat_slots(unit):
        setattr(slot.sharded, _FLATTENED, True)


def flat_parameters(unit: Unit) -> list[nn.Parameter]:
    """The flat parameters of a unit, each with the names in it; with original parameters, made for the occasion."""
    if not unit.has_memory:
        return [line.flat for line in flat_form(unit).lines if line.flat is not None]
    return [_flat_parameter(line) for line in flat_form(unit).lines]


def _flat_parameter(line: Line) -> nn.Parameter:
    flat = line.flat
    if flat is None:
        flat = nn.Parameter(line.share, line.slots[0].sharded.requires_grad)
        setattr(flat, _FLATTENED, True)
    flat._fqns = [slot.name for slot in line.slots]  # type: ignore[attr-defined]
    flat._shapes = tuple(torch.Size(slot.shape) for slot in line.slots)  # type: ignore[attr-defined]
    flat._numels = tuple(torch.Size(slot.shape).numel() for slot in line.slots)  # type: ignore[attr-defined]
    return flat


class FlatHandle:
    """The flat parameter of a wrapper and what it was made of; ``_handle`` of a wrapper that has parameters."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @property
    def flat_param(self) -> nn.Parameter:
        return flat_parameters(self._unit)[0]

    @property
    def _use_orig_params(self) -> bool:
        return flat_form(self._unit).lines[0].flat is None

    @property
    def uses_sharded_strategy(self) -> bool:
        return self._unit.mesh.shard.world > 1

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        """The dtype that parameters are stored in; setting it converts them, and keeps the values."""
        return flat_slots(self._unit)[0].sharded.dtype

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        for slot in flat_slots(self._unit):
            param = slot.sharded
            if param.is_floating_point() and param.dtype != dtype:
                param.data = param.data.to(dtype)
