"""Carriers: parameters whose tensor subclass decides what is sent and how it is rebuilt.

A local tensor that defines ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` (torchao's float8 weights do) keeps its
own storage. What it wants sent has room in the unit's row, is gathered with everything else in the same collective,
and is handed back to it to rebuild the full parameter from.

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
    """One such parameter, with its places in the row and in the full buffer."""

    def __init__(self, slot: Slot, mesh: DeviceMesh, precision: MixedPrecisionPolicy, world: int) -> None:
        self.slot = slot
        self._mesh = mesh
        self._precision = precision
        self._world = world
        self._param_dtype = precision.param_dtype or slot.stored_dtype
        self._takes_details = len(inspect.signature(self._local.fsdp_pre_all_gather).parameters) > 1
        self._metadata: Any = None
        if slot.shape[slot.dim] % world or slot.dim:
            raise ConfigError(
                f"parameter '{slot.name}' of shape {slot.shape} decides itself what is sent, and such parameters are "
                f"cut evenly along dim 0",
                where=f"shard world {world}, dim {slot.dim}",
                fix="pad dim 0 to a multiple of the shard world, or put the parameter into ignored_params",
            )
        inputs = self._read_inputs()
        self.input_dtypes = [tensor.dtype for tensor in inputs]
        self._output_shapes = [(tensor.shape[0] * world, *tensor.shape[1:]) for tensor in inputs]
        self._row_parts: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []
        self._inner: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def _local(self) -> Any:
        return self.slot.local

    def row_params(self) -> list[RowParam]:
        """What this parameter needs in the unit's row; sent as it is."""
        return [
            RowParam(shape, 0, ("as sent", dtype), dtype.itemsize, dtype.itemsize)
            for shape, dtype in zip(self._output_shapes, self.input_dtypes, strict=True)
        ]

    def _read_inputs(self) -> list[torch.Tensor]:
        local = self._local
        if self._takes_details:
            spec = self.slot.spec
            inputs, self._metadata = local.fsdp_pre_all_gather(
                self._mesh, torch.Size(spec.shape), spec.stride, self.slot.places[0].module, self._precision
            )
        else:
            inputs, self._metadata = local.fsdp_pre_all_gather(self._mesh)
        return list(inputs)

    def allocate(self, row_parts: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Takes its places, and has the full parameter made over them once; its values come with the first gather."""
        self._row_parts, self._outputs = row_parts, outputs
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
            copy_all(self._row_parts, self._read_inputs())

    def rebuild(self) -> None:
        for storage, size_bytes in self._inner:
            storage.resize_(size_bytes)
        unsharded = self.slot.unsharded
        # To autograd, which may have saved the parameter in forward, getting its values back is no change of it.
        with torch.no_grad(), preserved_version(unsharded):
            self._local.fsdp_post_all_gather(
                tuple(self._outputs), self._metadata, self._param_dtype, out=unsharded
            )

    def free(self) -> None:
        for storage, _ in self._inner:
            storage.resize_(0)
