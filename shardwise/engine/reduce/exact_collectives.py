"""A process group's collectives with reduces that sum over ranks in a fixed tree order.

    rows of all ranks ──one all-to-all, in the dtype they are in──▶ terms of the own row ──tree over ranks──▶ own row

The order in which a group's own reduce adds depends on the number of ranks and on the network. Here the terms are sent
unsummed, and the rank that owns an element adds its terms in the order of ``planning/sums``.
"""

from __future__ import annotations

import torch

from shardwise.comm.collectives.group import DONE, GroupCollectives, Work, WrappedCollectives
from shardwise.planning.layout import ceil_div
from shardwise.planning.sums import tree_sum


class ExactCollectives(WrappedCollectives):
    """A group whose reduces are tree sums over its ranks, in the dtype of their output."""

    set_by = "exact=True"

    def __init__(self, inner: GroupCollectives) -> None:
        super().__init__(inner)
        self.averages = False

    def lend(self, num_bytes: int) -> torch.Tensor | None:
        return self.inner.lend(num_bytes)

    def issue_reduce_scatter(
        self, output: torch.Tensor, rows: torch.Tensor, average: bool, code: int
    ) -> Work:
        if self.world == 1:
            output.copy_(rows)
            return DONE
        arrived = torch.empty_like(rows)
        return _ReduceScatterWork(
            self.inner.issue_exchange(arrived, rows, code), arrived.view(self.world, -1), output
        )

    def issue_all_reduce(self, tensor: torch.Tensor, average: bool, code: int) -> Work:
        if self.world == 1:
            return DONE
        # Each rank sums a shard of the tensor: fewer bytes are sent than if every rank received all terms.
        shard_numel = ceil_div(tensor.numel(), self.world)
        shards = tensor
        if shard_numel * self.world != tensor.numel():
            shards = tensor.new_zeros(shard_numel * self.world)
            shards[: tensor.numel()] = tensor
        arrived = torch.empty_like(shards)
        work = self.inner.issue_exchange(arrived, shards, code)
        return _AllReduceWork(self.inner, work, code, arrived.view(self.world, -1), shards, tensor)


class _ReduceScatterWork:
    """An exchange of the own row's terms, ``carried_by``, whose ``wait`` sums them."""

    def __init__(self, carried_by: Work, arrived: torch.Tensor, output: torch.Tensor) -> None:
        self.carried_by = carried_by
        self._arrived = arrived
        self._output = output

    def wait(self) -> None:
        self.carried_by.wait()
        self._output.copy_(_sum(self._arrived, self._output.dtype))


class _AllReduceWork:
    """The same for a shard of the tensor; ``wait`` then gathers the sums of all ranks."""

    def __init__(
        self,
        calls: GroupCollectives,
        carried_by: Work,
        code: int,
        arrived: torch.Tensor,
        shards: torch.Tensor,
        tensor: torch.Tensor,
    ) -> None:
        self.carried_by = carried_by
        self._calls = calls
        self._code = code
        self._arrived = arrived
        self._shards = shards
        self._tensor = tensor

    def wait(self) -> None:
        self.carried_by.wait()
        own = _sum(self._arrived, self._tensor.dtype)
        self.carried_by = self._calls.issue_all_gather(self._shards, own, self._code)
        self.carried_by.wait()
        if self._shards is not self._tensor:
            self._tensor.copy_(self._shards[: self._tensor.numel()])


def _sum(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tree sum of rows, which are overwritten where they have ``dtype`` already."""

    def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left.to(dtype).add_(right)

    return tree_sum(rows.unbind(), add)
