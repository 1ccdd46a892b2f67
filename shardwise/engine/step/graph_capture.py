"""What a step that is recorded in a CUDA graph, and then replayed, asks of the roots that run in it.

A step leaves a root as it found it, so one recording stands for all steps, as long as modules show the parameters that
it was made with. Recording runs nothing, and a replay runs without Python: wires must know both. Who records and
replays is not told here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from shardwise import trace
from shardwise.engine.unit.collective_names import REPLAY
from shardwise.plan.lifecycle import SHARDED

if TYPE_CHECKING:
    from shardwise.engine.step.root import Root


class _RootCollector(threading.local):
    """Who wants to know which roots run on this thread."""

    seen: list[Root] | None = None


_root_collector = _RootCollector()


@contextmanager
def collect_roots(seen: list[Root]) -> Iterator[None]:
    """While it is open, roots whose forward begins on this thread are added to ``seen``, in that order."""
    outer, _root_collector.seen = _root_collector.seen, seen
    try:
        yield
    finally:
        _root_collector.seen = outer


def report_root(root: Root) -> None:
    """The forward of a root begins."""
    if _root_collector.seen is not None and root not in _root_collector.seen:
        _root_collector.seen.append(root)


# --- recording --------------------------------------------------------------------------------------------------------


def why_not_capturable(root: Root) -> str | None:
    """Why a CUDA graph cannot hold a step of this model, if it cannot."""
    if not root.streams.host_runs_ahead:
        return f"the model is sharded over {root.top.mesh.device}"
    for unit in root.units:
        if unit.is_offloaded:
            return f"the shards of unit '{unit.name}' live on the host, which takes part in every step"
        for calls in (unit.mesh.shard, unit.mesh.replicate):
            if calls is not None and not calls.ordered_by_stream:
                return f"the host waits for the collectives of {calls.backend} (unit '{unit.name}')"
        if unit.state is not SHARDED:
            return (
                f"unit '{unit.name}' stays unsharded between steps, so a step depends on the one before it; "
                "set_reshard_after_backward(True) frees it"
            )
    return None


@contextmanager
def recording(root: Root) -> Iterator[None]:
    """While it is open, what is issued is recorded and does not run."""
    for channel in root.agreement.channels:
        channel.is_capturing = True
    try:
        yield
    finally:
        for channel in root.agreement.channels:
            channel.last_event = None
            channel.is_capturing = False


def join_streams(root: Root) -> None:
    """Makes the compute stream wait for every lane that takes part in a capture, which must end in one stream."""
    streams = root.streams
    for stream in (streams.gather, streams.reduce, streams.replicate):
        with stream:
            takes_part = torch.cuda.is_current_stream_capturing()
        if takes_part:
            # order: the lane's work before the end of the capture, because a graph has one end
            streams.compute_waits_for(stream.record_event())


# --- replaying --------------------------------------------------------------------------------------------------------


def is_unchanged(root: Root) -> bool:
    """Whether parameters are the ones that the last gathers found, trained or frozen as they were."""
    return all(unit.is_unchanged() for unit in root.units)


def begin_replay(root: Root) -> None:
    """Lets a recorded step run once all ranks have come to it alike: it holds the optimizer's step, too."""
    for channel in root.agreement.channels:
        channel.agree(REPLAY)


def end_replay(root: Root) -> None:
    """Watches the recorded step, and reshards units left unsharded: the shards have changed unseen."""
    for channel in root.agreement.channels:
        channel.after_backend_collective()
    for unit in root.units:
        if unit.state is not SHARDED:
            unit.reshard(trace.IDLE)
