"""Lanes: named streams beside the user's own, and the twin of a lane for devices that have none.

The compute stream is the user's; a lane runs work beside it. Whatever crosses from one to the other is ordered by a
mark, and a mark is an event on the device: the host never waits.

    compute   ──●────────────▶──▲──        ● mark    ▲ waits for it
    gather         ▲──copy──●───┘

On a CPU everything already happens in program order, so the twin does nothing.
"""

from __future__ import annotations

from typing import Protocol

import torch

from shardwise.torch_internals import set_cuda_stream


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
    host_runs_ahead = False

    def __init__(self) -> None:
        self.gather: Lane = HostLane()
        self.reduce: Lane = self.gather
        self.replicate: Lane = self.gather

    def mark_compute(self) -> Mark:
        return _NO_MARK

    def compute_after(self, mark: Mark) -> None:
        pass

    def host_after(self, mark: Mark) -> None:
        pass


class CudaLane:
    """A CUDA stream. Not reentrant: a lane is never entered twice."""

    def __init__(self, device: torch.device, priority: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=priority)
        self._outer: torch.cuda.Stream | None = None

    def __enter__(self) -> None:
        self._outer = torch.cuda.current_stream(self._device)
        set_cuda_stream(self._stream)

    def __exit__(self, *exception: object) -> None:
        assert self._outer is not None
        set_cuda_stream(self._outer)
        self._outer = None

    def after_compute(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def after(self, mark: Mark) -> None:
        assert isinstance(mark, torch.Event | torch.cuda.Event)
        self._stream.wait_event(mark)

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event


class CudaLanes:
    host_runs_ahead = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Communication is on the critical path of the units to come: it goes before compute where both could run.
        self.gather: Lane = CudaLane(device, priority=-1)
        self.reduce: Lane = CudaLane(device, priority=-1)
        self.replicate: Lane = CudaLane(device, priority=-1)

    def mark_compute(self) -> Mark:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def compute_after(self, mark: Mark) -> None:
        assert isinstance(mark, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(mark)

    def host_after(self, mark: Mark) -> None:
        assert isinstance(mark, torch.cuda.Event)
        mark.synchronize()


def lanes_for(device: torch.device) -> Lanes:
    return CudaLanes(device) if device.type == "cuda" else HostLanes()
