"""Uneven inputs: how a rank that has run out of inputs ("joined", in torch's terms) keeps stepping.

A joined rank still owns pieces and has to step them, but has no gradients. All ranks that still run hold the same
reduced gradients; the first of them sends the joined ranks what they need.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook

from shardwise.comm.exchange import all_gather_bytes, plan_exchange
from shardwise.zero.partition import Partition

__all__ = ["ZeroJoinHook", "share_gradients"]


class ZeroJoinHook(JoinHook):
    """Steps along with the ranks that still have inputs."""

    def __init__(self, *, step: Callable[[], object], leave: Callable[[], object]) -> None:
        self._step = step
        self._leave = leave

    def main_hook(self) -> None:
        self._step()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._leave()


def share_gradients(partition: Partition, group: dist.ProcessGroup, *, joined: bool) -> None:
    """Sends joined ranks the gradients of the pieces they own. Called by every rank, before its step."""
    flags = bytes([joined, *(param.grad is not None for param in partition.params)])
    flags_by_rank = all_gather_bytes(flags, group)
    is_joined = [bool(flags[0]) for flags in flags_by_rank]
    if not any(is_joined) or all(is_joined):
        return
    source = is_joined.index(False)
    has_gradient = flags_by_rank[source][1:]
    if joined:
        _allocate_gradients(partition, has_gradient)
    sections: dict[torch.device, list[list[Tensor]]] = defaultdict(lambda: [[] for _ in range(group.size())])
    for pieces in partition.pieces:
        for piece in pieces:
            if is_joined[piece.owner] and has_gradient[piece.param]:
                param = partition.params[piece.param]
                if partition.rank in (source, piece.owner):
                    assert param.grad is not None
                    memory = partition.gradient_of(piece, param.grad).contiguous()
                else:
                    memory = torch.empty(piece.numel, dtype=param.dtype, device=param.device)
                sections[param.device][source].append(memory)
    for by_source in sections.values():
        plan_exchange(by_source, group).issue().wait()


def _allocate_gradients(partition: Partition, has_gradient: bytes) -> None:
    """Gives owned parameters a gradient where the source has one, and drops old gradients where it has none."""
    for piece in partition.owned:
        param = partition.params[piece.param]
        if not has_gradient[piece.param]:
            param.grad = None
        elif param.grad is None or param.grad.stride() != param.stride():
            param.grad = torch.zeros_like(param)
