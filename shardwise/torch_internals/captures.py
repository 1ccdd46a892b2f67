"""CUDA graphs: what torch leaves undone if CUDA refuses to end a capture."""

from __future__ import annotations

import warnings
from contextlib import suppress

import torch

__all__ = ["forget_capture"]


def forget_capture(graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> None:
    """Ends what belongs to a capture that failed, if torch has not.

    After a capture that CUDA made invalid, torch's allocator keeps the memory that was taken for it, and the random
    generators raise in every eager operation.
    """
    try:
        graph.pool()
    except RuntimeError:
        pass
    else:
        return  # torch has ended it
    device = torch.cuda.current_device()
    with suppress(RuntimeError):  # it never began
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    # A capture that ends as it should takes the generators out of their recording state.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*CUDA Graph is empty.*")
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            pass
