"""What ranks do together around a step: agree before it, and send their stepped pieces to all others after it.

Without bucket views, pieces are sent from the parameters and received into them. With bucket views, parameters are
views of a shared buffer that has a section for each owner; whole sections are sent, without copies.

    buffer   [ section of rank 0        | section of rank 1        ]
               ▲ weight  ▲ bias           ▲ embedding
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from shardwise.comm.channels.channel import Channel, collective_code, listed
from shardwise.comm.channels.registry import channel_of
from shardwise.comm.exchange import Exchange, plan_exchange, process_vm_peers_of
from shardwise.comm.shared_memory.process_vm import DirectReads, ProcessVMPeers, zeros_in_huge_pages
from shardwise.engine.step.agreement import last_checkpoint
from shardwise.zero.partition import Partition, SharedBuffer

__all__ = ["OptimizerAgreement", "ParameterSync", "plan_piece_exchanges"]


class ParameterSync:
    """Plans the exchanges for the parameters that can change, and runs them."""

    def __init__(self, partition: Partition, group: dist.ProcessGroup, *, as_views: bool) -> None:
        self._partition = partition
        self._group = group
        self._as_views = as_views
        self._peers = process_vm_peers_of(group, channel_of(group, partition.params[0].device))
        self._known = partition.shared_buffers
        self._num_known = 0
        self._frozen: list[SharedBuffer] = []
        self._active: list[SharedBuffer] = []
        self._planned_revision = -1
        self._exchanges: list[Exchange] = []
        self.buffers: list[Tensor] = []
        """With bucket views, the memory of the parameters; a new list when they have moved."""
        self.refresh()

    def refresh(self) -> None:
        """Plans the exchanges again if parameters were added, moved or unfrozen."""
        partition = self._partition
        partition.detect_moves()
        if partition.shared_buffers is not self._known:
            self._known, self._num_known = partition.shared_buffers, 0
            self._frozen, self._active = [], []
        self._frozen += self._known[self._num_known :]
        self._num_known = len(self._known)
        unfrozen = [shared for shared in self._frozen if self._can_change(shared)]
        if not unfrozen and partition.revision == self._planned_revision:
            return
        self._frozen = [shared for shared in self._frozen if shared not in unfrozen]
        self._active += unfrozen
        if self._as_views:
            self.buffers = []
            self._exchanges = [self._plan_buffer(shared) for shared in self._active]
            partition.detect_moves()
        else:
            indices = [index for shared in self._active for index in shared.params]
            self._exchanges = plan_piece_exchanges(partition, self._group, indices, local_peers=self._peers)
        self._planned_revision = partition.revision

    @property
    def polls_failure(self) -> bool:
        """Whether all waits poll the watchdog, and so end by themselves after a failure."""
        return all(isinstance(exchange, DirectReads) for exchange in self._exchanges)

    def run(self) -> None:
        """Runs the planned exchanges: afterwards all ranks have all stepped parameters."""
        for pending in [exchange.issue() for exchange in self._exchanges]:
            pending.wait()

    def _can_change(self, shared: SharedBuffer) -> bool:
        params = self._partition.params
        return any(params[index].requires_grad or params[index].grad is not None for index in shared.params)

    def _plan_buffer(self, shared: SharedBuffer) -> Exchange:
        """Moves parameters into a newly allocated shared buffer, and plans the exchange of its sections."""
        layout = shared.layout
        device = self._partition.params[shared.params[0]].device
        if self._peers is not None and device.type == "cpu":
            buffer = zeros_in_huge_pages(layout.total_bytes)
        else:
            buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=device)
        for index, start in zip(shared.params, layout.starts, strict=True):
            param = self._partition.params[index]
            memory = buffer[start : start + param.numel() * param.element_size()].view(param.dtype)
            # Each parameter gets a storage of its own over the buffer's memory: with a plain view, saving one
            # parameter would save the whole buffer, and tools that forbid shared storage would refuse the model.
            alias = from_dlpack(memory).as_strided(param.size(), param.stride())
            alias.copy_(param.detach())
            param.data = alias
        self.buffers.append(buffer)
        sections = [[buffer[span.start : span.stop]] for span in layout.spans]
        return plan_exchange(
            sections, self._group, buffer=buffer if layout.is_even else None, local_peers=self._peers
        )


def plan_piece_exchanges(
    partition: Partition,
    group: dist.ProcessGroup,
    indices: Iterable[int],
    *,
    local_peers: ProcessVMPeers | None = None,
    tag_offset: int = 0,
) -> list[Exchange]:
    """Plans one exchange per device, which sends the parameters' pieces from their owners to all other ranks."""
    sections: dict[torch.device, list[list[Tensor]]] = defaultdict(lambda: [[] for _ in range(group.size())])
    for index in indices:
        for piece in partition.pieces[index]:
            sections[partition.params[index].device][piece.owner].append(partition.memory_of(piece))
    return [
        plan_exchange(by_owner, group, local_peers=local_peers, tag_offset=tag_offset)
        for by_owner in sections.values()
    ]


# --- before a step --------------------------------------------------------------------------------------------------

_EXCHANGE = collective_code("exchange the parameters that a ZeroRedundancyOptimizer has stepped")


class OptimizerAgreement:
    """Agreement on an optimizer's steps: no rank starts one alone, and no rank is left waiting when one raises."""

    def __init__(self, partition: Partition, group: dist.ProcessGroup) -> None:
        self._partition = partition
        self._group = group
        # Created now, so that ranks that wait in their first step can already see where this one is.
        self._channel = self._find_channel()
        self._codes: dict[tuple[int, ...] | None, int] = {}

    @property
    def channel(self) -> Channel:
        if self._channel.device.type != self._partition.params[0].device.type:
            self._channel = self._find_channel()
        return self._channel

    def _find_channel(self) -> Channel:
        return channel_of(self._group, self._partition.params[0].device)

    def agree(self, *, has_gradients: bool) -> None:
        """Waits until all ranks are about to step; raises if they have gradients of different parameters."""
        params = self._partition.params
        absent = None
        if has_gradients:
            absent = tuple([number for number, param in enumerate(params) if param.grad is None])
        code = self._codes.get(absent)
        if code is None:
            words = "step a ZeroRedundancyOptimizer"
            if absent is not None:
                words += f" of {len(params)} parameters"
            if absent:
                words += f", without gradients of {listed(absent)}"
            code = self._codes[absent] = collective_code(words)
        self.channel.agree(code)

    def exchanging(self, *, polls_failure: bool = False) -> AbstractContextManager[None]:
        """Returns a context for the exchange of stepped pieces, in which the watchdog ends waits for lost ranks."""
        return self.channel.watched(_EXCHANGE, polls_failure=polls_failure)

    def report_torn_step(self, error: BaseException) -> None:
        """Tells the other ranks that this rank's step raised."""
        checkpoint = f" ({last_checkpoint()})" if last_checkpoint() else ""
        self.channel.abort_step(
            f"{type(error).__name__} in the step of a ZeroRedundancyOptimizer, which is torn: some parameters are "
            f"updated and some are not; load the last checkpoint{checkpoint}"
        )
