"""Uneven inputs: what a rank that has run out does while the others still step.

A joined rank still owns its pieces, so it has to step them, and it has no gradients of its own for that. All ranks
that still run hold the same reduced gradients; the first of them gives the joined ranks what they need.
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
    """Gives joined ranks the gradients of what they own. Called by every rank, before its step."""
    note = bytes([joined, *(param.grad is not None for param in partition.params)])
    notes = all_gather_bytes(note, group)
    is_joined = [bool(note[0]) for note in notes]
    if not any(is_joined) or all(is_joined):
        return
    source = is_joined.index(False)
    has_gradient = notes[source][1:]
    if joined:
        _make_room(partition, has_gradient)
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


def _make_room(partition: Partition, has_gradient: bytes) -> None:
    """Gradients of owned parameters where the source has them; no leftovers of earlier steps where it has none."""
    for piece in partition.owned:
        param = partition.params[piece.param]
        if not has_gradient[piece.param]:
            param.grad = None
        elif param.grad is None or param.grad.stride() != param.stride():
            param.grad = torch.zeros_like(param)
