"""Exchange: sends every rank's own tensors to every other rank, received in place, in one operation.

    before   rank 0  [A'][B ][C ]        after   rank 0  [A'][B'][C']
             rank 1  [A ][B'][C ]                rank 1  [A'][B'][C']
             rank 2  [A ][B ][C']                rank 2  [A'][B'][C']

An exchange is planned once, for tensors that keep their memory, and issued as often as they change. How the data
travels depends on the group:

    gloo, CPU                   point to point: small tensors packed into one message, large ones by themselves
    the same, on one host       tensors are read from the peers' memory (shared_memory/process_vm)
    NCCL, equal sections        one all-gather in place
    NCCL                        grouped broadcasts, the small tensors of each rank packed into one
    a device without a backend  one of these, on copies on a device that has a backend
    any other backend           one all-gather through a padded buffer

It moves bytes, so tensors of any dtype travel together. It does not know parameters or optimizers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.channels.channel import Channel
from shardwise.comm.shared_memory.process_vm import (
    DirectReads,
    InFlight,
    ProcessVMPeers,
    find_process_vm_peers,
)
from shardwise.torch_internals import all_gather_call, copy_all, issue_grouped_broadcasts

__all__ = [
    "Exchange",
    "Pending",
    "all_gather_bytes",
    "plan_exchange",
    "process_vm_peers_of",
    "transport_device",
]

# Below this size a message of its own costs more than packing and unpacking.
_PACKED_BYTES = 128 * 1024
# Not the default tag 0, so that a user's own send is not mistaken for one of ours.
_TAG = 0x5A45


class Pending(Protocol):
    """An issued exchange."""

    def wait(self) -> object:
        """Waits until the other ranks' values are in place: on the host, or in the order of the CUDA stream."""


class Exchange(Protocol):
    in_lockstep: bool
    """Whether all ranks must issue their exchanges, and the group's collectives, in the same order."""

    def issue(self) -> Pending: ...


def plan_exchange(
    sections: Sequence[Sequence[Tensor]],
    group: dist.ProcessGroup,
    *,
    buffer: Tensor | None = None,
    local_peers: ProcessVMPeers | None = None,
    tag_offset: int = 0,
) -> Exchange:
    """Plans an exchange.

    Args:
        sections: by rank, the tensors that this rank sends and all others receive; contiguous, on one device, with
            the same sizes on every rank.
        group: the ranks.
        buffer: the tensor of which the sections are equal, consecutive parts, if there is one.
        local_peers: the ranks, if they can read each other's memory (``process_vm_peers_of``). Then ``wait`` does the
            copying, so pass None where something else should run meanwhile.
        tag_offset: the same number on all ranks. Exchanges that are not in lockstep must be issued in the same order
            for each number, in any order across numbers.
    """
    views = [[_as_bytes(tensor) for tensor in section if tensor.numel()] for section in sections]
    devices = {view.device for section in views for view in section}
    if group.size() == 1 or not devices:
        return _NothingToExchange()
    (device,) = devices
    transport = transport_device(group, device)
    if transport.type != device.type:
        return _ThroughTransport(views, group, transport, tag_offset)
    backend = _backends(group)[device.type]
    if backend == "gloo" and device.type == "cpu":
        if local_peers is not None:
            return DirectReads(views, group.rank(), local_peers)
        return _PointToPoint(views, group, _TAG + tag_offset)
    if backend == "nccl":
        return _GroupedBroadcasts(views, group) if buffer is None else _GatherInPlace(buffer, group)
    return _GatherPadded(views, group)


def transport_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Returns the device on which a tensor of ``device`` travels in this group."""
    backends = _backends(group)
    # gloo takes CUDA tensors only in collectives, and stages them through the host anyway.
    if device.type in backends and (backends[device.type] != "gloo" or device.type == "cpu"):
        return device
    if "cpu" in backends:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def process_vm_peers_of(group: dist.ProcessGroup, channel: Channel) -> ProcessVMPeers | None:
    """Returns the ranks of a gloo group if they can read each other's memory, else None. Called by all ranks.

    Args:
        group: the ranks.
        channel: the group's channel, by whose log they agree, and which is watched while they wait for each other.
    """
    if group.size() == 1 or _backends(group).get("cpu") != "gloo":
        return None
    return find_process_vm_peers(channel, partial(all_gather_bytes, group=group))


def all_gather_bytes(message: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Returns every rank's message, in rank order; messages may differ in length."""
    device = transport_device(group, torch.device("cpu"))
    world = group.size()
    lengths = torch.empty(world, dtype=torch.int64, device=device)
    dist.all_gather(list(lengths.split(1)), torch.tensor([len(message)], device=device), group=group)
    sizes = lengths.tolist()
    if not any(sizes):
        return [b""] * world
    buffers = [torch.zeros(max(sizes), dtype=torch.uint8, device=device) for _ in range(world)]
    own = torch.zeros_like(buffers[0])
    if message:
        own[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device)
    dist.all_gather(buffers, own, group=group)
    held = [buffer.cpu() for buffer in buffers]
    return [ctypes.string_at(buffer.data_ptr(), size) for buffer, size in zip(held, sizes, strict=True)]


class _NothingToExchange:
    in_lockstep = False

    def issue(self) -> _NothingToExchange:
        return self

    def wait(self) -> None:
        pass


class _PointToPoint:
    """gloo transfers messages in the background, both ways at once, in whatever order the ranks issue them."""

    in_lockstep = False

    def __init__(self, sections: Sequence[Sequence[Tensor]], group: dist.ProcessGroup, tag: int) -> None:
        self._group = group
        self._tag = tag
        self._rank = group.rank()
        self._peers = [rank for rank in range(group.size()) if rank != self._rank]
        self._large = [[view for view in section if view.numel() >= _PACKED_BYTES] for section in sections]
        self._small = [[view for view in section if view.numel() < _PACKED_BYTES] for section in sections]

    def issue(self) -> Pending:
        works: list[dist.Work] = []
        packs: list[tuple[Tensor, list[Tensor]]] = []
        for peer in self._peers:
            for message in self._incoming(peer, packs):
                works.append(self._group.recv([message], peer, self._tag))
        outgoing = self._outgoing()
        for peer in self._peers:
            for message in outgoing:
                works.append(self._group.send([message], peer, self._tag))
        # alive: what is sent, until it has been sent
        return InFlight(partial(self._finish, works, packs, outgoing))

    def _finish(
        self, works: list[dist.Work], packs: list[tuple[Tensor, list[Tensor]]], outgoing: list[Tensor]
    ) -> None:
        for work in works:
            work.wait()
        for pack, views in packs:
            copy_all(views, list(pack.split([view.numel() for view in views])))
        for finished in (works, packs, outgoing):
            finished.clear()

    def _incoming(self, peer: int, packs: list[tuple[Tensor, list[Tensor]]]) -> list[Tensor]:
        """Returns where to receive a peer's messages: large ones in place, small ones in a pack for later."""
        small = self._small[peer]
        if len(small) < 2:
            return small + self._large[peer]
        pack = torch.empty(sum(view.numel() for view in small), dtype=torch.uint8, device="cpu")
        packs.append((pack, small))
        return [pack, *self._large[peer]]

    def _outgoing(self) -> list[Tensor]:
        small = self._small[self._rank]
        packed = small if len(small) < 2 else [torch.cat(small)]
        return packed + self._large[self._rank]


class _GatherInPlace:
    in_lockstep = True

    def __init__(self, buffer: Tensor, group: dist.ProcessGroup) -> None:
        self._buffer = _as_bytes(buffer)
        self._own = self._buffer.chunk(group.size())[group.rank()]
        self._gather = all_gather_call(group)

    def issue(self) -> Pending:
        work: dist.Work = self._gather(self._buffer, self._own)
        return work


class _GroupedBroadcasts:
    """Grouped broadcasts: large tensors by themselves, the small ones of each rank as one pack."""

    in_lockstep = True

    def __init__(self, sections: Sequence[Sequence[Tensor]], group: dist.ProcessGroup) -> None:
        self._group = group
        self._device = next(view.device for section in sections for view in section)
        self._sent: list[list[Tensor]] = []
        own: list[tuple[Tensor, Tensor]] = []
        others: list[tuple[Tensor, Tensor]] = []
        for rank, section in enumerate(sections):
            small = [view for view in section if view.numel() < _PACKED_BYTES]
            if len(small) < 2:
                self._sent.append(list(section))
                continue
            pack = torch.empty(sum(view.numel() for view in small), dtype=torch.uint8, device=self._device)
            self._sent.append([pack, *(view for view in section if view.numel() >= _PACKED_BYTES)])
            (own if rank == group.rank() else others).extend(zip(small, _parts_of(pack, small), strict=True))
        self._own_views, self._own_parts = [view for view, _ in own], [part for _, part in own]
        self._views, self._parts = [view for view, _ in others], [part for _, part in others]

    def issue(self) -> Pending:
        _copy_views(self._own_parts, self._own_views)
        work = issue_grouped_broadcasts(self._group, self._device, self._sent)
        return InFlight(partial(self._finish, work)) if self._views else work

    def _finish(self, work: dist.Work) -> None:
        work.wait()
        _copy_views(self._views, self._parts)


class _GatherPadded:
    """One all-gather, with every section padded to the largest: works on any backend."""

    in_lockstep = True

    def __init__(self, sections: Sequence[Sequence[Tensor]], group: dist.ProcessGroup) -> None:
        self._sections = sections
        self._rank = group.rank()
        self._group = group
        self._section_bytes = max(sum(view.numel() for view in section) for section in sections)

    def issue(self) -> Pending:
        world = len(self._sections)
        device = next(view.device for section in self._sections for view in section)
        gathered = [torch.empty(self._section_bytes, dtype=torch.uint8, device=device) for _ in range(world)]
        own = torch.zeros(self._section_bytes, dtype=torch.uint8, device=device)
        _copy_views(_parts_of(own, self._sections[self._rank]), self._sections[self._rank])
        work = dist.all_gather(gathered, own, group=self._group, async_op=True)
        return InFlight(partial(self._finish, work, gathered))

    def _finish(self, work: dist.Work | None, gathered: list[Tensor]) -> None:
        if work is not None:
            work.wait()
        for source, (buffer, views) in enumerate(zip(gathered, self._sections, strict=True)):
            if source != self._rank:
                _copy_views(views, _parts_of(buffer, views))
        gathered.clear()


class _ThroughTransport:
    """The exchange on copies, for tensors on a device that the group has no backend for."""

    def __init__(
        self,
        sections: Sequence[Sequence[Tensor]],
        group: dist.ProcessGroup,
        transport: torch.device,
        tag_offset: int,
    ) -> None:
        self._sections = sections
        self._rank = group.rank()
        self._copies = [
            [torch.empty_like(view, device=transport) for view in section] for section in sections
        ]
        self._inner = plan_exchange(self._copies, group, tag_offset=tag_offset)
        self.in_lockstep = self._inner.in_lockstep

    def issue(self) -> Pending:
        # A plain copy between devices synchronizes with both, so it reads what the optimizer wrote.
        _copy_views(self._copies[self._rank], self._sections[self._rank])
        return InFlight(partial(self._finish, self._inner.issue()))

    def _finish(self, inner: Pending) -> None:
        inner.wait()
        for source, (views, copies) in enumerate(zip(self._sections, self._copies, strict=True)):
            if source != self._rank:
                _copy_views(views, copies)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _parts_of(buffer: Tensor, views: Sequence[Tensor]) -> list[Tensor]:
    sizes = [view.numel() for view in views]
    return list(buffer[: sum(sizes)].split(sizes)) if sizes else []


def _copy_views(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        copy_all(list(targets), list(sources))


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Returns device type to backend name, such as ``{"cpu": "gloo", "cuda": "nccl"}``."""
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    # Some torch versions list NCCL for the CPU, where it transfers nothing.
    return {device: backend for device, backend in pairs if (device, backend) != ("cpu", "nccl")}
