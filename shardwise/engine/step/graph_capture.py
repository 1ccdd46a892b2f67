"""What recording a step in a CUDA graph, and replaying it, requires of the roots in it.

A step leaves a root as it found it, so one recording serves for all steps while modules show the same parameters.
Recording runs nothing on the device, and a replay runs no Python: channels must know both. The recording itself is in
``training_step/cuda_graph``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise import trace
from shardwise.engine.step.root import Root
from shardwise.engine.unit.collective_names import REPLAY
from shardwise.planning.lifecycle import SHARDED

# --- recording --------------------------------------------------------------------------------------------------------


def why_not_capturable(root: Root) -> str | None:
    """Returns why a CUDA graph cannot capture a step of this model; None if it can."""
    if not root.streams.host_runs_ahead:
        return f"the model is sharded over {root.top.mesh.device}"
    for unit in root.units:
        if unit.home.is_offloaded:
            return f"the shards of unit '{unit.name}' live on the host, which would have to run in every step"
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
    """Within it, collectives are recorded and do not run."""
    for channel in root.agreement.channels:
        channel.is_capturing = True
    try:
        yield
    finally:
        for channel in root.agreement.channels:
            channel.last_event = None
            channel.is_capturing = False


def join_streams(root: Root) -> None:
    """Makes the compute stream wait for every side stream in a capture, which must end in one stream."""
    streams = root.streams
    for stream in (streams.gather, streams.reduce, streams.replicate):
        with stream:
            takes_part = torch.cuda.is_current_stream_capturing()
        if takes_part:
            # order: the side stream's work before the end of the capture, because a graph has one end
            streams.compute_waits_for(stream.record_event())


# --- replaying --------------------------------------------------------------------------------------------------------


def is_unchanged(root: Root) -> bool:
    """Whether no parameter was replaced, frozen or thawed since the last gathers."""
    return all(unit.is_unchanged() for unit in root.units)


def begin_replay(root: Root) -> None:
    """Returns once all ranks are about to replay; the recorded step includes the optimizer's."""
    for channel in root.agreement.channels:
        channel.agree(REPLAY)


def end_replay(root: Root) -> None:
    """Lets the watchdog follow the replay, and reshards gathered units: the replay has changed their shards."""
    for channel in root.agreement.channels:
        channel.after_backend_collective()
    for unit in root.units:
        if unit.state is not SHARDED:
            unit.reshard(trace.IDLE)
