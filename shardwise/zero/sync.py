"""After the step: every rank's stepped pieces to every other rank.

Without views, pieces travel from the parameters and into them. With views, the parameters of a run live in one
buffer, a section for each owner, and sections travel as they lie: no copies.

    buffer   [ section of rank 0        | section of rank 1        ]
               ▲ weight  ▲ bias           ▲ embedding
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from shardwise.comm.collectives.group import channel_of
from shardwise.comm.exchange import Exchange, plan_exchange, process_vm_peers_of
from shardwise.comm.shared_memory.direct_reads import DirectReads, zeros_in_huge_pages
from shardwise.comm.shared_memory.process_vm import ProcessVMPeers
from shardwise.zero.partition import Partition, SharedBuffer

__all__ = ["ParameterSync", "plan_piece_exchanges"]


class ParameterSync:
    """Keeps planned exchanges for the parameters that can change, and runs them."""

    def __init__(self, partition: Partition, group: dist.ProcessGroup, *, as_views: bool) -> None:
        self._partition = partition
        self._group = group
        self._as_views = as_views
        self._neighbours = process_vm_peers_of(group, channel_of(group, partition.params[0].device))
        self._runs = partition.runs
        self._resting: list[SharedBuffer] = []
        self._active: list[SharedBuffer] = []
        self._num_runs_seen = 0
        self._planned_revision = -1
        self._exchanges: list[Exchange] = []
        self.buffers: list[Tensor] = []
        """Where parameters lie, with views; another list once they have moved."""
        self.refresh()

    def refresh(self) -> None:
        """Plans again, if what travels is not what was planned: parameters were added, moved, or unfrozen."""
        partition = self._partition
        partition.follow()
        if partition.runs is not self._runs:
            self._runs, self._num_runs_seen = partition.runs, 0
            self._resting, self._active = [], []
        self._resting += self._runs[self._num_runs_seen :]
        self._num_runs_seen = len(self._runs)
        woken = [run for run in self._resting if self._takes_part(run)]
        if not woken and partition.revision == self._planned_revision:
            return
        self._resting = [run for run in self._resting if run not in woken]
        self._active += woken
        if self._as_views:
            self.buffers = []
            self._exchanges = [self._plan_buffer(run) for run in self._active]
            partition.follow()
        else:
            travelling = [index for run in self._active for index in run.params]
            self._exchanges = plan_piece_exchanges(
                partition, self._group, travelling, neighbours=self._neighbours
            )
        self._planned_revision = partition.revision

    @property
    def polls_failure(self) -> bool:
        """Whether waits for peers end by themselves when the watch has given up on one."""
        return all(isinstance(exchange, DirectReads) for exchange in self._exchanges)

    def run(self) -> None:
        """Brings all parameters up to date on all ranks, as last planned."""
        for pending in [exchange.issue() for exchange in self._exchanges]:
            pending.wait()

    def _takes_part(self, run: SharedBuffer) -> bool:
        params = self._partition.params
        return any(params[index].requires_grad or params[index].grad is not None for index in run.params)

    def _plan_buffer(self, run: SharedBuffer) -> Exchange:
        """Moves a run's parameters into a buffer of their own and plans its sections' way to the other ranks."""
        layout = run.layout
        device = self._partition.params[run.params[0]].device
        if self._neighbours is not None and device.type == "cpu":
            buffer = zeros_in_huge_pages(layout.total_bytes)
        else:
            buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=device)
        for index, start in zip(run.params, layout.starts, strict=True):
            param = self._partition.params[index]
            memory = buffer[start : start + param.numel() * param.element_size()].view(param.dtype)
            # Each parameter gets a storage of its own over the buffer's memory: with a plain view, saving one
            # parameter would write the whole buffer, and tools that forbid shared storage would refuse the model.
            alias = from_dlpack(memory).as_strided(param.size(), param.stride())
            alias.copy_(param.detach())
            param.data = alias
        self.buffers.append(buffer)
        sections = [[buffer[span.start : span.stop]] for span in layout.spans]
        return plan_exchange(
            sections, self._group, buffer=buffer if layout.is_even else None, neighbours=self._neighbours
        )


def plan_piece_exchanges(
    partition: Partition,
    group: dist.ProcessGroup,
    indices: Iterable[int],
    *,
    neighbours: ProcessVMPeers | None = None,
    tag_offset: int = 0,
) -> list[Exchange]:
    """The exchanges, one a device, that send some parameters' pieces from their owners, as they lie."""
    sections: dict[torch.device, list[list[Tensor]]] = defaultdict(lambda: [[] for _ in range(group.size())])
    for index in indices:
        for piece in partition.pieces[index]:
            sections[partition.params[index].device][piece.owner].append(partition.memory_of(piece))
    return [
        plan_exchange(by_owner, group, neighbours=neighbours, tag_offset=tag_offset)
        for by_owner in sections.values()
    ]
