"""Makes our own collectives visible to dispatch modes that count torch's collectives.

Such modes see what goes through torch's dispatcher. So our collective is called through the dispatcher, and a kernel of
ours below it, where a backend would be chosen, does the work: it counts as the one collective that it is.

Our kernels override torch's only during such a call. Anybody else's call meanwhile is passed on to torch's kernel, but
with the GIL held, which a backend's own threads may need to complete it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwise.torch_internals import defaults_of, finished_work, scoped_library

_OPS = ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_")


class _Request(threading.local):
    """What does the work in the call that this thread is making; None for calls that are not ours."""

    post: Callable[[], None] | None = None
    works: list[Any]


_request = _Request()
_call_lock = threading.Lock()


@contextmanager
def _override_kernels() -> Iterator[None]:
    with _call_lock, scoped_library("c10d") as library:
        with warnings.catch_warnings():
            # torch warns that its kernels are overridden, which is intended.
            warnings.simplefilter("ignore")
            for op in _OPS:
                kernel = _override(torch.library.get_kernel(op, "CPU"), defaults_of(op))
                library.impl(op, kernel, "CPU", with_keyset=True, allow_override=True)
        yield


def _override(native: Any, defaults: tuple[Any, ...]) -> Callable[..., Any]:
    def post_or_native(keys: Any, *args: Any) -> Any:
        post, _request.post = _request.post, None
        if post is None:
            # Trailing arguments that have their default value are not passed on to kernels.
            return native.call_boxed(keys, *args, *defaults[len(args) :])
        works = _request.works
        post()
        return args[0], works[0].boxed() if works else finished_work()

    return post_or_native


def dispatch_as(
    call: Callable[..., Any], tensors: tuple[torch.Tensor, ...], post: Callable[[], None], works: list[Any]
) -> None:
    """Makes torch's ``call``, in which ``post`` does the work and leaves gloo's works in ``works``."""
    _request.post, _request.works = post, works
    try:
        with _override_kernels():
            call(*tensors)
    finally:
        _request.post = None
        _request.works = []
