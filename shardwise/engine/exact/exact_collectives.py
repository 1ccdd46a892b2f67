"""Sums over ranks by a fixed tree: a group's calls, with the additions made here.

    rows of all ranks ──one exchange, in the dtype they came in──▶ terms of the own row ──tree over ranks──▶ own row

A group's own reduce adds in an order of its own, which depends on how many ranks there are and on the network. Here
terms travel as they are, and each element is added up by the one rank that owns it, in the order of ``plan/sums``.
"""

from __future__ import annotations

import torch

from shardwise.comm.channels.channel import UNNAMED
from shardwise.comm.collectives.group import DONE, GroupCollectives, Work
from shardwise.plan.layout import ceil_div
from shardwise.plan.sums import tree_sum


class ExactCollectives(GroupCollectives):
    """A group whose reduces are sums by a tree over its ranks, in the dtype of what they are summed into."""

    set_by = "exact=True"

    def __init__(self, inner: GroupCollectives) -> None:
        # All that was looked up for the group stays so; only reduces differ.
        self.__dict__.update(inner.__dict__)
        self.averages = False
        self._inner = inner

    def issue_reduce_scatter(
        self, output: torch.Tensor, rows: torch.Tensor, average: bool, code: int = UNNAMED
    ) -> Work:
        if self.world == 1:
            output.copy_(rows)
            return DONE
        arrived = torch.empty_like(rows)
        return _OwnRow(self._inner.issue_exchange(arrived, rows, code), arrived.view(self.world, -1), output)

    def issue_all_reduce(self, tensor: torch.Tensor, average: bool, code: int = UNNAMED) -> Work:
        if self.world == 1:
            return DONE
        # Each rank adds up a part of the tensor: fewer bytes travel than if every rank had all terms.
        part_numel = ceil_div(tensor.numel(), self.world)
        parts = tensor
        if part_numel * self.world != tensor.numel():
            parts = tensor.new_zeros(part_numel * self.world)
            parts[: tensor.numel()] = tensor
        arrived = torch.empty_like(parts)
        work = self._inner.issue_exchange(arrived, parts, code)
        return _Replicas(self._inner, work, code, arrived.view(self.world, -1), parts, tensor)


class _OwnRow:
    """Terms of the own row under way: ``wait`` adds them up. ``carried_by`` is what brings them."""

    def __init__(self, carried_by: Work, arrived: torch.Tensor, output: torch.Tensor) -> None:
        self.carried_by = carried_by
        self._arrived = arrived
        self._output = output

    def wait(self) -> None:
        self.carried_by.wait()
        self._output.copy_(_sum(self._arrived, self._output.dtype))


class _Replicas:
    """The same for a tensor that all ranks want whole: then the parts are brought together."""

    def __init__(
        self,
        calls: GroupCollectives,
        carried_by: Work,
        code: int,
        arrived: torch.Tensor,
        parts: torch.Tensor,
        tensor: torch.Tensor,
    ) -> None:
        self.carried_by = carried_by
        self._calls = calls
        self._code = code
        self._arrived = arrived
        self._parts = parts
        self._tensor = tensor

    def wait(self) -> None:
        self.carried_by.wait()
        own = _sum(self._arrived, self._tensor.dtype)
        self.carried_by = self._calls.issue_all_gather(self._parts, own, self._code)
        self.carried_by.wait()
        if self._parts is not self._tensor:
            self._tensor.copy_(self._parts[: self._tensor.numel()])


def _sum(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum of rows that nobody needs any more: of each pair the left one takes the sum, widened if it must be."""

    def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left.to(dtype).add_(right)

    return tree_sum(rows.unbind(), add)
