"""A span of a larger flat tensor, which ``torch.distributed.checkpoint`` saves and loads as such.

A plain tensor that has the same name on every rank would be taken for a replica, and only one rank's would be saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardwise.errors import CheckpointError

if TYPE_CHECKING:
    from typing_extensions import Self


class CheckpointSpan(Tensor):
    """Elements of a larger flat tensor, from ``start`` on."""

    start = 0
    # -1 unless made by ``of``, or by copying such a span.
    total_numel = -1

    @classmethod
    def of(cls, elements: Tensor, start: int, total_numel: int) -> Self:
        span = elements.detach().as_subclass(cls)
        span.start, span.total_numel = start, total_numel
        return span

    def __deepcopy__(self, memo: dict[int, Any]) -> CheckpointSpan:
        copied = type(self).of(self.elements.clone(), self.start, self.total_numel)
        memo[id(self)] = copied
        return copied

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Makes results of the same shape (clones, copies to a device) spans, and all others plain tensors.

        A copy that is a plain tensor would be saved as if it were the whole larger tensor.
        """
        result = super().__torch_function__(func, types, args, kwargs or {})
        if not isinstance(result, CheckpointSpan) or result.total_numel >= 0:
            return result
        elements, source = result.elements, args[0] if args else None
        if isinstance(source, CheckpointSpan) and source.elements.shape == elements.shape:
            return type(source).of(elements, source.start, source.total_numel)
        return elements

    @property
    def elements(self) -> Tensor:
        return self.as_subclass(Tensor)

    def size(self, dim: Any = None) -> Any:
        """The size of the larger tensor, which a checkpoint compares with the saved one."""
        size = torch.Size([self.total_numel]) if self.total_numel >= 0 else self.elements.size()
        return size if dim is None else size[dim]

    @property
    def _is_empty(self) -> bool:
        return self.elements.numel() == 0 and self.total_numel > 0

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(
            offsets=torch.Size([self.start]), sizes=torch.Size([self.elements.numel()])
        )

    def __create_write_items__(self, fqn: str, _span: object) -> list[WriteItem]:
        chunk = self._chunk()
        if self.total_numel < 0:
            raise CheckpointError(
                f"'{fqn}' is a view of a rank's shard: its position in the full tensor is not known",
                where="torch.distributed.checkpoint.save",
                fix="save the tensors of state_dict() unchanged",
            )
        if self._is_empty:
            # An empty chunk would have the offset of another rank's chunk, and replace it.
            return []
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self.elements),
                    size=torch.Size([self.total_numel]),
                ),
            )
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [] if self._is_empty else [self._chunk()]

    def __get_tensor_shard__(self, _index: MetadataIndex) -> Tensor:
        return self.elements
