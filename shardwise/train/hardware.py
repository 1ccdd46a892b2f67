"""Figures of the hardware that a run reports: peak speed of a GPU, memory used so far."""

from __future__ import annotations

import resource

import torch

__all__ = ["memory_bytes", "peak_flops"]

_TERA = 1e12
_PEAK_BF16 = {
    "H200": 989 * _TERA,
    "H100": 989 * _TERA,
    "B200": 2250 * _TERA,
    "A100": 312 * _TERA,
    "L40": 181 * _TERA,
    "L4": 121 * _TERA,
    "4090": 165 * _TERA,
    "3090": 71 * _TERA,
}
"""Dense bf16 FLOPs per second, from vendors' data sheets, by a word in the device's name; the longest match wins."""


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Returns the peak FLOPs per second of a GPU in bf16; None if unknown, or in another precision."""
    if device.type != "cuda" or precision != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    fitting = [word for word in _PEAK_BF16 if word in name]
    return _PEAK_BF16[max(fitting, key=len)] if fitting else None


def memory_bytes(device: torch.device) -> int:
    """Returns the peak memory of this rank so far: of its GPU, or else of the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
