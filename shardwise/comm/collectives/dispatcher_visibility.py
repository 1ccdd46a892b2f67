"""Collectives of our own making that count as torch's.

Whoever counts collectives does so where torch dispatches them. A call that goes through torch's dispatcher, and only
below it, where a backend would be picked, finds a kernel of ours, is seen as the one collective that it is.

The kernels stand in front of torch's for no longer than such a call. A call of somebody else's that meets them goes on
to torch's kernel, but with the interpreter's lock held, and a backend's own threads may need that lock to let it go on.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwise.torch_internals import defaults_of, finished_work, passing_library

_OPS = ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_")


class _Request(threading.local):
    """What stands in for the backend in the call that this thread is making; None for calls that are not ours."""

    post: Callable[[], None] | None = None
    works: list[Any]


_request = _Request()
_one_call_at_a_time = threading.Lock()


@contextmanager
def _kernels_in_front() -> Iterator[None]:
    with _one_call_at_a_time, passing_library("c10d") as library:
        with warnings.catch_warnings():
            # That torch's kernels now stand behind others is the point, and no news to the user.
            warnings.simplefilter("ignore")
            for op in _OPS:
                kernel = _in_front_of(torch.library.get_kernel(op, "CPU"), defaults_of(op))
                library.impl(op, kernel, "CPU", with_keyset=True, allow_override=True)
        yield


def _in_front_of(native: Any, defaults: tuple[Any, ...]) -> Callable[..., Any]:
    def post_or_native(keys: Any, *args: Any) -> Any:
        post, _request.post = _request.post, None
        if post is None:
            # Arguments at the end that have their default value do not arrive here.
            return native.call_boxed(keys, *args, *defaults[len(args) :])
        works = _request.works
        post()
        return args[0], works[0].boxed() if works else finished_work()

    return post_or_native


def dispatch_as(
    call: Callable[..., Any], tensors: tuple[torch.Tensor, ...], post: Callable[[], None], works: list[Any]
) -> None:
    """Makes torch's ``call``, in which ``post`` does the work and leaves what the group does for it in ``works``."""
    _request.post, _request.works = post, works
    try:
        with _kernels_in_front():
            call(*tensors)
    finally:
        _request.post = None
        _request.works = []
