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
from shardwise.errors import StateError

# The mark of parameters that are shards of a flat one, as torch sets it.
_FLATTENED = "_fsdp_flattened"
# The optimizers that torch gave a parameter, to be stepped by whoever reduces its gradient.
_OPTIMIZERS = "_in_backward_optimizers"


def mark_flattened(unit: Unit) -> None:
    """Marks the parameters that optimizers see as shards."""
    for slot in flat_slots(unit):
        setattr(slot.sharded, _FLATTENED, True)


def check_not_stepped_in_backward(param: torch.Tensor, name: str, where: str) -> None:
    """Raises if torch's ``_apply_optimizer_in_backward`` gave a parameter optimizers: in a flat one none would step."""
    if hasattr(param, _OPTIMIZERS):
        raise StateError(
            f"parameter '{name}' has optimizers that step in backward, which flat parameters cannot have",
            where=where,
            fix="pass use_orig_params=True",
        )


def step_in_backward(unit: Unit) -> None:
    """Steps the optimizers of torch's ``_apply_optimizer_in_backward`` as soon as a shard's gradient is reduced."""
    for slot in flat_slots(unit):
        if not slot.is_shown:
            check_not_stepped_in_backward(slot.sharded, slot.name, f"unit '{unit.name}', rank {unit.rank}")
        elif hasattr(slot.sharded, _OPTIMIZERS):
            slot.sharded.register_post_accumulate_grad_hook(_step)


def _step(param: torch.Tensor) -> None:
    for optimizer in getattr(param, _OPTIMIZERS):
        optimizer.step()
        optimizer.zero_grad()


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
