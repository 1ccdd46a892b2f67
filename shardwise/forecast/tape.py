"""The tape of a dry run: everything that the host would have issued, in its order.

An entry is an op on a stream, memory that came or went, a point in a stream and a wait for it, a collective, or a mark
that says where in the step it is. ``allocator`` plays the tape for memory and ``clock`` for time.
"""

from __future__ import annotations

from dataclasses import dataclass

COMPUTE, GATHER, REDUCE, REPLICATE = "compute", "gather", "reduce", "replicate"

# Kinds of memory beside those of ``planning/memory``.
ACTIVATIONS = "activations"
OPTIMIZER = "optimizer"
INPUTS = "inputs and buffers"
WORKSPACES = "workspaces"


@dataclass(slots=True)
class Op:
    """A call of torch: ``kind`` is a price's name, "view" where the device does nothing."""

    name: str
    kind: str
    stream: str
    flops: int = 0
    num_bytes: int = 0
    dtype: str = "float32"
    # The memory that it takes while it runs, and no tensor shows.
    temporaries: tuple[int, ...] = ()
    # Why its kernels reach less than others of its kind (``prices.SHARES``), if they do.
    share: str = ""


@dataclass(slots=True)
class Allocate:
    key: int
    num_bytes: int
    # What holds it, of the kinds above and those of ``planning/memory``.
    what: str
    stream: str


@dataclass(slots=True)
class Free:
    key: int


@dataclass(slots=True)
class Record:
    """A point in a stream that another one can wait for."""

    event: int
    stream: str


@dataclass(slots=True)
class Wait:
    """``stream`` waits for the point; the host itself where it is "host"."""

    event: int
    stream: str


@dataclass(slots=True)
class Collective:
    """``num_bytes`` are those of all ranks' rows together; ``axis`` is "shard", "replicate" or "part"."""

    kind: str
    num_bytes: int
    ranks: int
    axis: str
    stream: str
    num_tensors: int = 1


@dataclass(slots=True)
class Transfer:
    """A copy between host and device; ``direction`` is "in" or "out"."""

    direction: str
    num_bytes: int
    stream: str


@dataclass(slots=True)
class Mark:
    """An event of the engine (``trace.KINDS``), or a phase of the step that begins."""

    kind: str
    unit: str
    phase: str
    # Of the unit.
    num_params: int = 0


@dataclass(slots=True)
class HostWork:
    """Work of the host itself, such as an optimizer that steps there.

    With ``after``, another thread does it, once that stream has come here.
    """

    kind: str
    num_bytes: int
    after: str = ""


@dataclass(slots=True)
class HostCalls:
    """``count`` calls on the host, by their name in the price list; what they give the device is on the tape, too."""

    price: str
    count: int


Entry = Op | Allocate | Free | Record | Wait | Collective | Transfer | Mark | HostWork | HostCalls
