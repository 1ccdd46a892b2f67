"""Reduce-scatter on gloo: rows are exchanged and summed here, in rank order.

gloo's own reduce-scatter is an all-reduce of everything followed by a slice: twice the bytes, and a sum whose order
depends on the algorithm. Here each rank sends every other rank its row (an all-to-all) and adds up what it receives,
rank 0 first. The result is bitwise that of a loop over ranks, for any number of ranks.

    rank 0 has  a0 a1      sends a1, receives b0      own row = a0 + b0
    rank 1 has  b0 b1      sends b0, receives a1      own row = a1 + b1

It still is one ``_reduce_scatter_base_`` to whoever counts collectives: the call goes through torch's dispatcher, and
only below it, where a backend would be picked, does a kernel of ours take over the calls that ask for it. All other
calls, of any group, go to torch's kernel as before.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch
import torch.distributed as dist

from shardwise.torch_internals import backend_of, reduce_scatter_call

_OP = "c10d::_reduce_scatter_base_"


class _Request(threading.local):
    """Where the call that this thread is making wants the other ranks' rows; None for calls that are not ours."""

    received: torch.Tensor | None = None


_request = _Request()
_install_lock = threading.Lock()
_library: torch.library.Library | None = None


def can_exchange() -> bool:
    """Whether this torch lets a kernel stand in front of its own (it does from 2.10 on)."""
    return hasattr(torch.library, "get_kernel")


def _install() -> None:
    """Puts the kernel in front of torch's, once a process."""
    global _library
    with _install_lock:
        if _library is not None:
            return
        native = torch.library.get_kernel(_OP, "CPU")

        def exchange_or_native(keys: Any, output: Any, rows: Any, group: Any, op: Any, *rest: Any) -> Any:
            received, _request.received = _request.received, None
            if received is None:
                return native.call_boxed(keys, output, rows, group, op, *(rest or (True, -1)))
            backend = backend_of(dist.ProcessGroup.unbox(group), rows.device)
            work = backend.alltoall_base(received, rows, [], [], dist.AllToAllOptions())
            return output, work.boxed()

        library = torch.library.Library("c10d", "IMPL")
        with warnings.catch_warnings():
            # That torch's kernel now stands behind another is the point, and no news to the user.
            warnings.simplefilter("ignore")
            library.impl(_OP, exchange_or_native, "CPU", with_keyset=True, allow_override=True)
        _library = library


class Exchange:
    """An exchange under way: ``wait`` sums what has arrived into the own row."""

    def __init__(self, work: Any, received: torch.Tensor, output: torch.Tensor) -> None:
        self._work = work
        self._received = received
        self._output = output

    def wait(self) -> None:
        self._work.wait()
        first, *others = self._received.view(-1, self._output.numel()).unbind()
        if not others:
            self._output.copy_(first)
            return
        torch.add(first, others[0], out=self._output)
        for row in others[1:]:
            self._output.add_(row)


class ExchangeReduce:
    """Reduce-scatter of one gloo group by exchange."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        _install()
        self._reduce_scatter = reduce_scatter_call(group)

    def issue(self, output: torch.Tensor, rows: torch.Tensor) -> Exchange:
        received = torch.empty_like(rows)
        _request.received = received
        try:
            work = self._reduce_scatter(output, rows)
        finally:
            _request.received = None
        return Exchange(work, received, output)
