"""A dry run: the engine takes a step on the meta device, where nothing is allocated, computed or sent.

A model sharded over a mesh of meta devices runs the engine as it is: its schedule, its streams and waits, its buffers
that come and go. What the engine would ask of CUDA or of a process group, it asks of this thread's *dry run*, which
writes down what would have happened. ``forecast`` has the one that does; the engine only knows where to ask.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

from shardwise.errors import StateError

if TYPE_CHECKING:
    from shardwise.comm.streams import SideStreams


class DryRun(Protocol):
    """What answers for a device."""

    def side_streams(self) -> SideStreams: ...

    def resized(self, storage: torch.UntypedStorage, num_bytes: int, holds: str) -> None:
        """Is told that an elastic buffer was allocated by the current stream, or freed (0 bytes)."""

    def moved(self, kind: str, sources: Sequence[torch.Tensor], num_bytes: int) -> None:
        """Is told of a kernel of ours that packs or copies out, and writes that many bytes."""


class _Current(threading.local):
    dry_run: DryRun | None = None


_current = _Current()


@contextmanager
def rehearsing(dry_run: DryRun) -> Iterator[None]:
    """Within it, meshes of meta devices on this thread ask ``dry_run``."""
    outer, _current.dry_run = _current.dry_run, dry_run
    try:
        yield
    finally:
        _current.dry_run = outer


def current_dry_run() -> DryRun:
    found = _current.dry_run
    if found is None:
        raise StateError(
            "a model is sharded over meta devices, and nothing is there to predict its step",
            where="a mesh of meta devices",
            fix="shard over 'cuda' or 'cpu'; to predict a step use shardwise.plan",
        )
    return found


def is_dry(device: torch.device) -> bool:
    """Whether a mesh of this device is one of a dry run."""
    return device.type == "meta"


def is_like_cuda(device: torch.device) -> bool:
    """Whether the engine does for this device what it does for CUDA: dry runs are predictions for a GPU."""
    return device.type in ("cuda", "meta")
