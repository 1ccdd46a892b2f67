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

from shardwise.engine.buffers import contiguous_strides
from shardwise.engine.unit.binding import Slot
from shardwise.errors import ConfigAssertionError, ConfigError
from shardwise.planning.layout import RowParam, ceil_div
from shardwise.policies import MixedPrecisionPolicy
from shardwise.torch_internals import copy_all, preserved_version


def is_tensor_extension(local: torch.Tensor) -> bool:
    return hasattr(local, "fsdp_pre_all_gather") or hasattr(local, "fsdp_post_all_gather")


def cut_extension(full: torch.Tensor, dim: int, world: int, rank: int, device: torch.device) -> torch.Tensor:
    """Returns a rank's shard, in memory of its own, with the operations that such subclasses know from torch.

    Packed formats have no rows to narrow to, and a clone might quantize anew.
    """
    chunks = full.chunk(world, dim)
    length = chunks[rank].shape[dim] if rank < len(chunks) else 0
    padded = full.new_zeros(chunks[0].shape)
    if length:
        padded.narrow(dim, 0, length).copy_(chunks[rank])
    if padded.device.type not in ("meta", device.type):
        padded = padded.to(device)
    return padded.narrow(dim, 0, length)


class TensorExtension:
    """One such parameter, with its tensors in the row and in the full buffer."""

    def __init__(self, slot: Slot, mesh: DeviceMesh, precision: MixedPrecisionPolicy, world: int) -> None:
        self.slot = slot
        self._mesh = mesh
        self._precision = precision
        self._world = world
        self._param_dtype = precision.param_dtype or slot.stored_dtype
        self._takes_all_arguments = self._checked_num_arguments() == 5
        self._metadata: Any = None
        self._check_padding()
        inputs = self._read_inputs(self._local)
        self.input_dtypes = [tensor.dtype for tensor in inputs]
        self._output_shapes = [(tensor.shape[0] * world, *tensor.shape[1:]) for tensor in inputs]
        self._row_tensors: list[torch.Tensor] = []
        self._gathered: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []
        # Memory besides the unit's, with its size.
        self._inner: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def _local(self) -> Any:
        return self.slot.local

    def _checked_num_arguments(self) -> int:
        """Raises unless the subclass has both methods, with arguments that can be passed; returns their number."""
        slot, kind = self.slot, type(self._local).__name__
        both = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
        missing = [name for name in both if not hasattr(self._local, name)]
        if missing:
            raise ConfigAssertionError(
                f"parameter '{slot.name}' is a {kind}, which defines one of {' and '.join(both)} but not {missing[0]}",
                where=kind,
                fix="define both: one says what is sent, the other rebuilds the parameter from it",
            )
        signature = inspect.signature(self._local.fsdp_pre_all_gather)
        if len(signature.parameters) not in (1, 5):
            raise ConfigAssertionError(
                f"fsdp_pre_all_gather of parameter '{slot.name}' takes {signature}",
                where=kind,
                fix="take (mesh), or (mesh, outer_size, outer_stride, module, mp_policy)",
            )
        if slot.dim:
            raise ConfigError(
                f"parameter '{slot.name}' of shape {slot.shape} defines fsdp_pre_all_gather, and such parameters are "
                f"sharded along dim 0, not {slot.dim}",
                where=kind,
                fix="leave it out of shard_placement_fn, or put the parameter into ignored_params",
            )
        return len(signature.parameters)

    def _check_padding(self) -> None:
        """Raises, on every rank, if a rank with fewer rows than others would also send fewer."""
        slot, rows = self.slot, ceil_div(self.slot.shape[0], self._world)
        fewest = max(slot.shape[0] - rows * (self._world - 1), 0)
        if fewest == rows:
            return
        inputs = self._read_inputs(self._local.narrow(0, 0, fewest))
        if any(tensor.shape[0] != rows for tensor in inputs):
            raise ConfigAssertionError(
                f"parameter '{slot.name}' of shape {slot.shape} does not divide evenly along dim 0, and its "
                f"fsdp_pre_all_gather returned shapes {[tuple(tensor.shape) for tensor in inputs]} for the shard with "
                f"{fewest} rows",
                where=f"{type(self._local).__name__}, shard world {self._world}",
                fix=f"pad what is sent to {rows} rows in fsdp_pre_all_gather, or pad the parameter",
            )

    def row_params(self) -> list[RowParam]:
        """The entries of this parameter in the unit's row, sent without a cast."""
        return [
            RowParam(shape, 0, ("as sent", dtype), dtype.itemsize, dtype.itemsize)
            for shape, dtype in zip(self._output_shapes, self.input_dtypes, strict=True)
        ]

    def _read_inputs(self, local: Any) -> list[torch.Tensor]:
        if self._takes_all_arguments:
            spec = self.slot.spec
            inputs, self._metadata = local.fsdp_pre_all_gather(
                self._mesh, torch.Size(spec.shape), spec.stride, self.slot.places[0].module, self._precision
            )
        else:
            inputs, self._metadata = local.fsdp_pre_all_gather(self._mesh)
        return list(inputs)

    def allocate(self, row_tensors: list[torch.Tensor], gathered: list[torch.Tensor]) -> None:
        """Binds the memory, and makes the full parameter over it once; the first gather fills in its values."""
        self._row_tensors, self._gathered = row_tensors, gathered
        # Subclasses with several inner tensors may insist that they agree in storage offset: these are all at 0.
        outputs = gathered if len(gathered) == 1 else [torch.empty_like(tensor) for tensor in gathered]
        self._outputs = outputs
        tensor, inner = self._local.fsdp_post_all_gather(tuple(outputs), self._metadata, self._param_dtype)
        shape = self.slot.shape
        if tensor.shape[1:] == shape[1:] and tensor.shape[0] > shape[0]:
            # Rows that padding added.
            tensor = torch.as_strided(tensor, shape, contiguous_strides(shape), 0)
        if tuple(tensor.shape) != self.slot.shape:
            raise ConfigError(
                f"fsdp_post_all_gather of parameter '{self.slot.name}' returned shape {tuple(tensor.shape)} for a "
                f"parameter of shape {self.slot.shape}",
                where=type(self._local).__name__,
                fix="return the full parameter, rebuilt from the gathered tensors",
            )
        self.slot.compute_dtype = tensor.dtype
        self.slot.unsharded = nn.Parameter(tensor, requires_grad=self.slot.sharded.requires_grad)
        seen = {tensor.untyped_storage().data_ptr() for tensor in gathered}
        for member in (*outputs, *inner):
            storage = member.untyped_storage()
            if storage.data_ptr() not in seen and storage.nbytes():
                seen.add(storage.data_ptr())
                self._inner.append((storage, storage.nbytes()))

    def write_row(self) -> None:
        with torch.no_grad():
            copy_all(self._row_tensors, self._read_inputs(self._local))

    def rebuild(self) -> None:
        for storage, size_bytes in self._inner:
            storage.resize_(size_bytes)
        if self._outputs is not self._gathered:
            copy_all(self._outputs, self._gathered)
        unsharded = self.slot.unsharded
        # Autograd may have saved the parameter in forward: refilling it must not count as a change.
        with torch.no_grad(), preserved_version(unsharded):
            self._local.fsdp_post_all_gather(
                tuple(self._outputs), self._metadata, self._param_dtype, out=unsharded
            )

    def free(self) -> None:
        for storage, _ in self._inner:
            storage.resize_(0)
