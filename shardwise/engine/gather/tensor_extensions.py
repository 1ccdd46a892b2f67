"""Tensor extensions: parameters whose tensor subclass decides what is sent and how the full parameter is rebuilt.

A local tensor that defines ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` (torchao's float8 weights do) keeps its
own storage. The tensors that it wants to send are copied into the unit's row, gathered in the same collective as
everything else, and passed to ``fsdp_post_all_gather``, which rebuilds the full parameter.

    local ──fsdp_pre_all_gather──▶ inputs ──row, gather, copy-out──▶ outputs ──fsdp_post_all_gather──▶ full parameter
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.engine.unit.binding import Slot
from shardwise.errors import ConfigError
from shardwise.plan.layout import RowParam
from shardwise.policies import MixedPrecisionPolicy
from shardwise.torch_internals import copy_all, preserved_version


def is_tensor_extension(local: torch.Tensor) -> bool:
    return hasattr(local, "fsdp_pre_all_gather")


class TensorExtension:
    """One such parameter, with its tensors in the row and in the full buffer."""

    def __init__(self, slot: Slot, mesh: DeviceMesh, precision: MixedPrecisionPolicy, world: int) -> None:
        self.slot = slot
        self._mesh = mesh
        self._precision = precision
        self._world = world
        self._param_dtype = precision.param_dtype or slot.stored_dtype
        self._takes_all_arguments = len(inspect.signature(self._local.fsdp_pre_all_gather).parameters) > 1
        self._metadata: Any = None
        if slot.shape[slot.dim] % world or slot.dim:
            raise ConfigError(
                f"parameter '{slot.name}' of shape {slot.shape} defines fsdp_pre_all_gather, and such parameters must "
                f"divide evenly along dim 0",
                where=f"shard world {world}, dim {slot.dim}",
                fix="pad dim 0 to a multiple of the shard world, or put the parameter into ignored_params",
            )
        inputs = self._read_inputs()
        self.input_dtypes = [tensor.dtype for tensor in inputs]
        self._output_shapes = [(tensor.shape[0] * world, *tensor.shape[1:]) for tensor in inputs]
        self._row_tensors: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []
        self._inner: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def _local(self) -> Any:
        return self.slot.local

    def row_params(self) -> list[RowParam]:
        """The entries of this parameter in the unit's row, sent without a cast."""
        return [
            RowParam(shape, 0, ("as sent", dtype), dtype.itemsize, dtype.itemsize)
            for shape, dtype in zip(self._output_shapes, self.input_dtypes, strict=True)
        ]

    def _read_inputs(self) -> list[torch.Tensor]:
        local = self._local
        if self._takes_all_arguments:
            spec = self.slot.spec
            inputs, self._metadata = local.fsdp_pre_all_gather(
                self._mesh, torch.Size(spec.shape), spec.stride, self.slot.places[0].module, self._precision
            )
        else:
            inputs, self._metadata = local.fsdp_pre_all_gather(self._mesh)
        return list(inputs)

    def allocate(self, row_tensors: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Binds the memory, and makes the full parameter over it once; the first gather fills in its values."""
        self._row_tensors, self._outputs = row_tensors, outputs
        tensor, inner = self._local.fsdp_post_all_gather(tuple(outputs), self._metadata, self._param_dtype)
        if tuple(tensor.shape) != self.slot.shape:
            raise ConfigError(
                f"fsdp_post_all_gather of parameter '{self.slot.name}' returned shape {tuple(tensor.shape)} for a "
                f"parameter of shape {self.slot.shape}",
                where=type(self._local).__name__,
                fix="return the full parameter, rebuilt from the gathered tensors",
            )
        self.slot.compute_dtype = tensor.dtype
        self.slot.unsharded = nn.Parameter(tensor, requires_grad=self.slot.sharded.requires_grad)
        gathered = {output.untyped_storage().data_ptr() for output in outputs}
        for member in inner:
            storage = member.untyped_storage()
            if storage.data_ptr() not in gathered and storage.nbytes():
                self._inner.append((storage, storage.nbytes()))

    def write_row(self) -> None:
        with torch.no_grad():
            copy_all(self._row_tensors, self._read_inputs())

    def rebuild(self) -> None:
        for storage, size_bytes in self._inner:
            storage.resize_(size_bytes)
        unsharded = self.slot.unsharded
        # Autograd may have saved the parameter in forward: refilling it must not count as a change.
        with torch.no_grad(), preserved_version(unsharded):
            self._local.fsdp_post_all_gather(
                tuple(self._outputs), self._metadata, self._param_dtype, out=unsharded
            )

    def free(self) -> None:
        for storage, _ in self._inner:
            storage.resize_(0)
