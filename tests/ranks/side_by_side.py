"""What tests that run one program with two libraries share: the device, and when two results are the same.

Tensors are made on the default device, so that the same program runs on CPUs and on GPUs.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def device() -> torch.device:
    return torch.get_default_device()


def on_gpu(function: Callable[..., Any], *args: Any) -> Any:
    """Calls ``function`` with this rank's GPU as the default device."""
    torch.set_default_device(torch.device("cuda", torch.cuda.current_device()))
    try:
        return function(*args)
    finally:
        torch.set_default_device(None)


def two_axes(*names: str) -> DeviceMesh:
    """Two ranks along the first axis; the second has one rank, or, of four ranks, two."""
    shape = (2, dist.get_world_size() // 2)
    return init_device_mesh(device().type, shape, mesh_dim_names=names or None)


def failures(named: Iterable[tuple[Callable[[], Any], str]]) -> list[str]:
    """What functions raise, as text under their names; all are called."""
    found = []
    for function, name in named:
        try:
            function()
        except Exception as error:  # noqa: BLE001  reported together
            trace = "".join(traceback.format_tb(error.__traceback__)[-3:])
            found.append(f"{name}: {type(error).__name__}: {error}\n{trace}")
    return found


def same(ours: Any, theirs: Any) -> bool:
    """Whether two results are equal; numbers within rounding: sums over ranks may be taken in another order."""
    if isinstance(theirs, torch.Tensor):
        alike = isinstance(ours, torch.Tensor) and (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        return alike and torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)
    if isinstance(theirs, float) and isinstance(ours, float):
        both_nan = math.isnan(ours) and math.isnan(theirs)
        return both_nan or math.isclose(ours, theirs, rel_tol=1e-4, abs_tol=2e-4)
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], value) for key, value in theirs.items())
    if isinstance(theirs, (list, tuple)) and isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)
