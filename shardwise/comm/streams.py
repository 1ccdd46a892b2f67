"""Side streams: CUDA streams beside the user's compute stream, and what stands for them on a CPU.

Work on a side stream runs beside the compute stream. What crosses from one to the other is ordered by an event on the
device, so the host never waits.

    compute   ──●────────────▶──▲──        ● event    ▲ waits for it
    gather         ▲──copy──●───┘

On a CPU everything happens in program order already.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any, Protocol

import torch

from shardwise.comm.dry_run import current_dry_run, is_dry
from shardwise.torch_internals import (
    StreamKey,
    cuda_event,
    cuda_stream,
    current_cuda_stream,
    set_cuda_stream,
    unseen_by_modes,
)


class StreamEvent(Protocol):
    """A point in a stream's work that another stream can wait for."""


_NO_EVENT: StreamEvent = object()


class SideStream:
    """A stream beside the compute stream; ``with stream:`` issues work on it. This one is a CPU's: it does nothing."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        pass

    def wait_compute(self) -> None:
        """Makes this stream wait for everything issued on the compute stream so far."""

    def wait_event(self, event: StreamEvent) -> None:
        """Makes this stream wait for an event."""

    def record_event(self) -> StreamEvent:
        """Records an event behind everything issued on this stream so far."""
        return _NO_EVENT


class SideStreams:
    """The side streams of one root, and waits between them and the compute stream or the host. These are a CPU's."""

    host_runs_ahead = False

    def __init__(self, gather: SideStream, reduce: SideStream, replicate: SideStream) -> None:
        self.gather = gather
        self.reduce = reduce
        self.replicate = replicate

    def record_compute(self) -> StreamEvent:
        return _NO_EVENT

    def compute_waits_for(self, event: StreamEvent) -> None:
        pass

    def host_waits_for(self, event: StreamEvent) -> None:
        """Blocks the host until the event is reached: only where the host itself reads or writes the data."""


# More events than are ever waited for on one stream at a time.
_EVENTS_PER_STREAM = 32


class _CudaStream:
    """A stream and its events, which are reused in turn.

    An event that is recorded again is a later point of the same stream: a wait for the earlier one becomes longer,
    never too short.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        # Blocking events, so that a waiting host sleeps: optimizers that step on the host need the core.
        self._events = cycle([cuda_event() for _ in range(_EVENTS_PER_STREAM)])

    def record_event(self) -> torch.cuda.Event:
        event = next(self._events)
        event.record(self.stream)
        return event


class _Compute:
    """The user's current stream, which may change between calls."""

    def __init__(self, device_index: int) -> None:
        self._device_index = device_index
        self._known: dict[StreamKey, _CudaStream] = {}

    def current(self) -> _CudaStream:
        key = current_cuda_stream(self._device_index)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _CudaStream(cuda_stream(key))
        return known


class CudaSideStream(_CudaStream, SideStream):
    """A CUDA stream beside the compute stream. Not reentrant: it must not be entered twice."""

    def __init__(self, device: torch.device, priority: int, compute: _Compute) -> None:
        super().__init__(torch.cuda.Stream(device, priority=priority))
        self._key = (self.stream.stream_id, self.stream.device_index, self.stream.device_type)
        self._compute = compute
        self._outer = self._key

    def __enter__(self) -> None:
        self._outer = current_cuda_stream(self._key[1])
        set_cuda_stream(*self._key)

    def __exit__(self, *exception: object) -> None:
        set_cuda_stream(*self._outer)

    def wait_compute(self) -> None:
        self._compute.current().record_event().wait(self.stream)

    # Some events are users' own: all have ``wait``.

    def wait_event(self, event: Any) -> None:
        event.wait(self.stream)


class CudaSideStreams(SideStreams):
    host_runs_ahead = True

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._compute = _Compute(index)
        # Communication is on the critical path of the next units: it has priority over compute.
        super().__init__(*(CudaSideStream(device, priority=-1, compute=self._compute) for _ in range(3)))

    def record_compute(self) -> StreamEvent:
        return self._compute.current().record_event()

    def compute_waits_for(self, event: Any) -> None:
        event.wait(self._compute.current().stream)

    def host_waits_for(self, event: Any) -> None:
        event.synchronize()


def take_workspaces(device: torch.device) -> None:
    """Makes matrix libraries allocate their workspaces now, for forward's thread and for backward's.

    Backward's workspace, allocated in the first backward, would fragment the memory that activations have just freed,
    for good.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing() or torch.is_inference_mode_enabled():
        return
    with torch.enable_grad(), unseen_by_modes():
        one = torch.zeros(1, 1, device=device, requires_grad=True)
        # cuBLAS warns if it is the first to use the device on a thread: so the matrix product is not the first.
        (torch.mm(one, one) * 2).sum().backward()


def side_streams_for(device: torch.device) -> SideStreams:
    if is_dry(device):
        return current_dry_run().side_streams()
    if device.type == "cuda":
        return CudaSideStreams(device)
    stream = SideStream()
    return SideStreams(stream, stream, stream)
