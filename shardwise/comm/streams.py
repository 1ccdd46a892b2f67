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


class Mark(Protocol):
    """A point in a stream's work that another stream can wait for."""


class Lane(Protocol):
    """A stream of its own; ``with lane:`` issues work on it."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...

    def after_compute(self) -> None:
        """Makes the lane wait for everything the compute stream was given so far."""

    def after(self, mark: Mark) -> None:
        """Makes the lane wait for a mark."""

    def mark(self) -> Mark:
        """A mark behind everything the lane was given so far."""


class Lanes(Protocol):
    """The lanes of one root, and the compute stream's side of the marks."""

    gather: Lane
    reduce: Lane
    replicate: Lane
    host_runs_ahead: bool

    def mark_compute(self) -> Mark: ...

    def compute_after(self, mark: Mark) -> None: ...

    def host_after(self, mark: Mark) -> None:
        """Blocks the host until the mark is reached: only where the host itself reads or writes the data."""


class _NoMark:
    __slots__ = ()


_NO_MARK = _NoMark()


class HostLane:
    """The twin: no stream, no waiting."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        pass

    def after_compute(self) -> None:
        pass

    def after(self, mark: Mark) -> None:
        pass

    def mark(self) -> Mark:
        return _NO_MARK


class HostLanes:
    def __init__(self) -> None:
        self.host_runs_ahead = False
        self.gather: Lane = HostLane()
        self.reduce: Lane = self.gather
        self.replicate: Lane = self.gather

    def mark_compute(self) -> Mark:
        return _NO_MARK

    def compute_after(self, mark: Mark) -> None:
        pass

    def host_after(self, mark: Mark) -> None:
        pass


# More marks than any lane has waiting at a time.
_MARKS_A_STREAM = 32


class _CudaStream:
    """A stream and the events that mark its work, which are used over and over.

    An event that is recorded again stands for a later point of the same stream: whoever still waits for the earlier
    one waits longer, never too short.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        # A host that waits for one sleeps: the core is needed by optimizers that step on the host meanwhile.
        self._events = cycle([cuda_mark() for _ in range(_MARKS_A_STREAM)])

    def mark(self) -> torch.cuda.Event:
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


class CudaLane:
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

    def after_compute(self) -> None:
        self._compute.current().mark().wait(self._stream)

    # Marks here are events, some of them users' own: all have ``wait``.

    def after(self, mark: Any) -> None:
        mark.wait(self._stream)

    def mark(self) -> Mark:
        return self._marks.mark()


class CudaLanes:
    def __init__(self, device: torch.device) -> None:
        self.host_runs_ahead = True
        index = torch.cuda.current_device() if device.index is None else device.index
        self._compute = _Compute(index)
        # Communication is on the critical path of the units to come: it goes before compute where both could run.
        self.gather: Lane = CudaLane(device, priority=-1, compute=self._compute)
        self.reduce: Lane = CudaLane(device, priority=-1, compute=self._compute)
        self.replicate: Lane = CudaLane(device, priority=-1, compute=self._compute)

    def mark_compute(self) -> Mark:
        return self._compute.current().mark()

    def compute_after(self, mark: Any) -> None:
        mark.wait(self._compute.current().stream)

    def host_after(self, mark: Any) -> None:
        mark.synchronize()


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


def lanes_for(device: torch.device) -> Lanes:
    return CudaLanes(device) if device.type == "cuda" else HostLanes()
