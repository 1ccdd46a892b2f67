"""Lanes: named streams beside the user's own, and the twin of a lane for devices that have none.

The compute stream is the user's; a lane runs work beside it. Whatever crosses from one to the other is ordered by a
mark, and a mark is an event on the device: the host never waits.

    compute   ──●────────────▶──▲──        ● mark    ▲ waits for it
    gather         ▲──copy──●───┘

On a CPU everything already happens in program order, so the twin does nothing.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any, Protocol

import torch

from shardwise.torch_internals import (
    StreamKey,
    cuda_mark,
    cuda_stream,
    current_cuda_stream,
    set_cuda_stream,
    unseen_by_modes,
)


class StreamEvent(Protocol):
    """A point in a stream's work that another stream can wait for."""


class SideStream(Protocol):
    """A stream of its own; ``with lane:`` issues work on it."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...

    def wait_compute(self) -> None:
        """Makes the lane wait for everything the compute stream was given so far."""

    def wait_event(self, event: StreamEvent) -> None:
        """Makes the lane wait for a mark."""

    def record_event(self) -> StreamEvent:
        """A mark behind everything the lane was given so far."""


class SideStreams(Protocol):
    """The lanes of one root, and the compute stream's side of the marks."""

    gather: SideStream
    reduce: SideStream
    replicate: SideStream
    host_runs_ahead: bool

    def record_compute(self) -> StreamEvent: ...

    def compute_waits_for(self, event: StreamEvent) -> None: ...

    def host_waits_for(self, event: StreamEvent) -> None:
        """Blocks the host until the mark is reached: only where the host itself reads or writes the data."""


class _NoEvent:
    __slots__ = ()


_NO_EVENT = _NoEvent()


class HostStream:
    """The twin: no stream, no waiting."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        pass

    def wait_compute(self) -> None:
        pass

    def wait_event(self, event: StreamEvent) -> None:
        pass

    def record_event(self) -> StreamEvent:
        return _NO_EVENT


class HostStreams:
    def __init__(self) -> None:
        self.host_runs_ahead = False
        self.gather: SideStream = HostStream()
        self.reduce: SideStream = self.gather
        self.replicate: SideStream = self.gather

    def record_compute(self) -> StreamEvent:
        return _NO_EVENT

    def compute_waits_for(self, event: StreamEvent) -> None:
        pass

    def host_waits_for(self, event: StreamEvent) -> None:
        pass


# More marks than any lane has waiting at a time.
_EVENTS_PER_STREAM = 32


class _CudaStream:
    """A stream and the events that mark its work, which are used over and over.

    An event that is recorded again stands for a later point of the same stream: whoever still waits for the earlier
    one waits longer, never too short.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        # A host that waits for one sleeps: the core is needed by optimizers that step on the host meanwhile.
        self._events = cycle([cuda_mark() for _ in range(_EVENTS_PER_STREAM)])

    def record_event(self) -> torch.cuda.Event:
        event = next(self._events)
        event.record(self.stream)
        return event


class _Compute:
    """The user's stream, which may be another one each time it is asked for."""

    def __init__(self, device_index: int) -> None:
        self._device_index = device_index
        self._known: dict[StreamKey, _CudaStream] = {}

    def current(self) -> _CudaStream:
        key = current_cuda_stream(self._device_index)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _CudaStream(cuda_stream(key))
        return known


class CudaSideStream:
    """A CUDA stream. Not reentrant: a lane is never entered twice."""

    def __init__(self, device: torch.device, priority: int, compute: _Compute) -> None:
        stream = torch.cuda.Stream(device, priority=priority)
        self._marks = _CudaStream(stream)
        self._stream = stream
        self._key = (stream.stream_id, stream.device_index, stream.device_type)
        self._compute = compute
        self._outer = self._key

    def __enter__(self) -> None:
        self._outer = current_cuda_stream(self._key[1])
        set_cuda_stream(self._key)

    def __exit__(self, *exception: object) -> None:
        set_cuda_stream(self._outer)

    def wait_compute(self) -> None:
        self._compute.current().record_event().wait(self._stream)

    # Marks here are events, some of them users' own: all have ``wait``.

    def wait_event(self, event: Any) -> None:
        event.wait(self._stream)

    def record_event(self) -> StreamEvent:
        return self._marks.record_event()


class CudaSideStreams:
    def __init__(self, device: torch.device) -> None:
        self.host_runs_ahead = True
        index = torch.cuda.current_device() if device.index is None else device.index
        self._compute = _Compute(index)
        # Communication is on the critical path of the units to come: it goes before compute where both could run.
        self.gather: SideStream = CudaSideStream(device, priority=-1, compute=self._compute)
        self.reduce: SideStream = CudaSideStream(device, priority=-1, compute=self._compute)
        self.replicate: SideStream = CudaSideStream(device, priority=-1, compute=self._compute)

    def record_compute(self) -> StreamEvent:
        return self._compute.current().record_event()

    def compute_waits_for(self, event: Any) -> None:
        event.wait(self._compute.current().stream)

    def host_waits_for(self, event: Any) -> None:
        event.synchronize()


def take_workspaces(device: torch.device) -> None:
    """Has matrix libraries take the memory that they keep for forward's thread and for backward's.

    Backward's, taken in the first backward, would come to lie in the midst of what activations have just left, and
    stand in the way of larger tensors for good.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing() or torch.is_inference_mode_enabled():
        return
    with torch.enable_grad(), unseen_by_modes():
        one = torch.zeros(1, 1, device=device, requires_grad=True)
        # A matrix library that is the first to use the device on a thread warns of it: the product comes second.
        (torch.mm(one, one) * 2).sum().backward()


def side_streams_for(device: torch.device) -> SideStreams:
    return CudaSideStreams(device) if device.type == "cuda" else HostStreams()
