"""A step as lanes of bars and a curve of memory: what is predicted, what was measured, and what a page draws.

lane      what happens one after another: compute, gather, reduce, host, copies
bar       one thing in a lane, from start to end
memory    bytes by kind, at every time at which they change
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["LANES", "Bar", "Lane", "Memory", "Timeline"]

LANES = ("compute", "gather", "reduce", "copies", "host")


@dataclass(frozen=True, slots=True)
class Bar:
    """One thing that a lane does; times are seconds since the step began. ``unit`` is "" for the root."""

    start: float
    end: float
    # What it is: "forward", "backward", "gather", "reduce", "optimizer", ...
    kind: str
    unit: str = ""
    # What a reader may want to know besides: bytes sent, floating-point operations.
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Lane:
    name: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank's device: ``levels[i]`` has those of each kind from ``times[i]`` on."""

    kinds: tuple[str, ...]
    times: tuple[float, ...]
    levels: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step of one rank. ``name`` says where it comes from, such as "predicted" or "measured"."""

    name: str
    seconds: float
    lanes: tuple[Lane, ...]
    memory: Memory | None = None
    # What a reader sees beside the picture: settings, device, totals.
    facts: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
