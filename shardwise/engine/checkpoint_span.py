"""Part of a larger tensor that distributed checkpoints (``torch.distributed.checkpoint``) save and load as just that.

A plain tensor under one name on every rank is taken for the same whole everywhere: one rank's is saved, for all.
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
    """Elements of a larger flat tensor, which distributed checkpoints save and load as just that."""

    start = 0
    # Only of what ``of`` made, and of what has the same elements.
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
        """A copy of a span, wherever it lies, is a span as well: saved as a plain tensor it would stand for the whole.

        Anything of another shape is a plain tensor.
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
        """The size of the larger tensor: what a checkpoint compares with what it holds."""
        whole = torch.Size([self.total_numel]) if self.total_numel >= 0 else self.elements.size()
        return whole if dim is None else whole[dim]

    @property
    def _is_nothing(self) -> bool:
        return self.elements.numel() == 0 and self.total_numel > 0

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(
            offsets=torch.Size([self.start]), sizes=torch.Size([self.elements.numel()])
        )

    def __create_write_items__(self, fqn: str, _span: object) -> list[WriteItem]:
        chunk = self._chunk()
        if self.total_numel < 0:
            raise CheckpointError(
                f"'{fqn}' was cut out of a rank's part of a tensor: where it stands in the whole is not known",
                where="torch.distributed.checkpoint.save",
                fix="save what state_dict() gave",
            )
        if self._is_nothing:
            # It would stand where another rank's chunk begins, and be taken for that one.
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
        return [] if self._is_nothing else [self._chunk()]

    def __get_tensor_shard__(self, _index: MetadataIndex) -> Tensor:
        return self.elements
