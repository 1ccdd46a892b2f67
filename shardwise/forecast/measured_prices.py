"""What this machine's work costs: ops, copies and calls of the host, timed on one rank of several that run at once.

Every price is the lower quartile of repeated runs: other programs can only make a run longer. Ranks of one machine
share its memory and cores, so they measure together: a price is what an op costs while the others work, too.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Clock", "fractions", "host_copies", "host_prices", "lower_quartile", "num_cores", "peaks"]

Run = Callable[[], object]


class Clock:
    """Times runs on one device: each for ``budget_seconds``, after one run to warm up.

    On a CPU with one thread a run's time is the thread's own, which other programs do not lengthen, times the number of
    ranks that share a core.
    """

    def __init__(self, device: torch.device, ranks: int = 1, budget_seconds: float = 0.12) -> None:
        self.device = device
        self._budget = budget_seconds
        self._is_alone = device.type == "cpu" and torch.get_num_threads() == 1
        self._ranks_a_core = max(1.0, ranks / num_cores()) if self._is_alone else 1.0

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Run, at_once: int = 1) -> float:
        """Returns the time of a run; ``at_once`` are issued before the device is waited for."""
        return self._timed(run, at_once, waits=True)

    def device_seconds(self, run: Run) -> float:
        """Returns how long the device works on a run, however long the host takes to issue it."""
        if self.device.type != "cuda":
            return self.seconds(run)
        for _ in range(2):
            run()
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return self.seconds(graph.replay)

    def host_seconds(self, run: Run, at_once: int = 20) -> float:
        """Returns the time that the host spends in a run, whatever the device does."""
        return self._timed(run, at_once, waits=False)

    def _timed(self, run: Run, at_once: int, waits: bool) -> float:
        now = time.thread_time if self._is_alone else time.perf_counter
        run()
        found: list[float] = []
        end = time.perf_counter() + self._budget
        while len(found) < 3 or time.perf_counter() < end:
            self.wait()
            begun = now()
            for _ in range(at_once):
                run()
            if waits:
                self.wait()
            found.append((now() - begun) / at_once)
        return lower_quartile(found) * self._ranks_a_core


def num_cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def lower_quartile(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=4, method="inclusive")[0]


# --- ops ----------------------------------------------------------------------------------------------------------

_Timed = tuple[float, float]  # flops or bytes, and seconds
_Input = Any


def peaks(clock: Clock, least_seconds: float) -> tuple[dict[str, float], dict[str, list[_Timed]], float]:
    """Returns the peak rate of each dtype, the times of ops by kind, and the peak rate of memory.

    The peaks are the highest rates seen: what curves of fractions refer to.
    """
    device = clock.device
    timed = {"matmul": _matmuls(clock, torch.float32), "attention": _attention(clock)}
    by_dtype = {"float32": timed["matmul"]}
    for dtype in (torch.bfloat16, torch.float16):
        if dtype == torch.bfloat16 or device.type == "cuda":
            by_dtype[str(dtype).removeprefix("torch.")] = _matmuls(clock, dtype)
    if device.type == "cuda":
        # Matrix products of a training step are in bfloat16 there; the curve's shape is theirs.
        timed["matmul"] = by_dtype["bfloat16"]
    flops = {name: max(_rates(times, least_seconds)) for name, times in by_dtype.items()}
    timed |= {
        "elementwise": _merged(_elementwise(clock), _activations(clock)),
        "reduction": _merged(_sums(clock), _softmaxes(clock)),
        "copy": _copies(clock),
        "optimizer": _optimizers(clock),
    }
    moving = [timed[kind] for kind in ("elementwise", "reduction", "copy", "optimizer")]
    return flops, timed, max(rate for times in moving for rate in _rates(times, least_seconds))


def fractions(
    timed: dict[str, list[_Timed]], peak_flops: float, peak_bytes: float, least_seconds: float
) -> dict[str, list[list[float]]]:
    """Returns each kind's curve: the fraction of the peak at each size. More work never takes less time."""
    curves = {}
    for kind, times in timed.items():
        peak = peak_flops if kind in ("matmul", "attention") else peak_bytes
        points, longest = [], 0.0
        for size, seconds in sorted(times):
            longest = max(1.001 * longest, _net(seconds, least_seconds), size / peak)
            points.append([float(size), size / peak / longest])
        curves[kind] = points
    return curves


def _net(seconds: float, least_seconds: float) -> float:
    """The time of the work itself: without what any op takes, of which a small op is all but a rest."""
    return max(seconds - least_seconds, seconds * 0.05)


def _rates(times: Sequence[_Timed], least_seconds: float) -> list[float]:
    """Rates of the sizes whose time is mostly work."""
    mostly_work = [(size, seconds) for size, seconds in times if seconds > 4 * least_seconds] or [max(times)]
    return [size / _net(seconds, least_seconds) for size, seconds in mostly_work]


def _merged(one: Sequence[_Timed], other: Sequence[_Timed]) -> list[_Timed]:
    return [(size, (a + b) / 2) for (size, a), (_, b) in zip(one, other, strict=True)]


class _InTurn:
    """Runs ops on several inputs in turn and keeps what they return until the next turn.

    As in a training step, inputs are not in the caches, and memory is not what the op before has just given back.
    """

    def __init__(self, op: Callable[[_Input], object], inputs: Sequence[_Input]) -> None:
        self._op, self._inputs = op, inputs
        self._kept: list[object] = []

    def __call__(self) -> None:
        self._kept = [self._op(each) for each in self._inputs]

    def seconds(self, clock: Clock) -> float:
        return clock.device_seconds(self) / len(self._inputs)


def _matmuls(clock: Clock, dtype: torch.dtype) -> list[_Timed]:
    """Products of a linear layer: forward, and gradients of its input and of its weight."""
    is_cuda = clock.device.type == "cuda"
    found = []
    for side in (256, 512, 1024, 2048, 4096, 8192) if is_cuda else (32, 64, 128, 256, 512, 1024):
        tokens = 2 * side if is_cuda else side // 2
        layers = [
            (
                torch.randn(tokens, side, device=clock.device).to(dtype),
                torch.randn(side, side, device=clock.device).to(dtype),
            )
            for _ in range(4)
        ]
        run = _InTurn(
            lambda layer: (layer[0] @ layer[1].t(), layer[0] @ layer[1], layer[0].t() @ layer[0]), layers
        )
        found.append((2.0 * tokens * side**2, run.seconds(clock) / 3))
    return found


def _attention(clock: Clock) -> list[_Timed]:
    """Forward and backward of causal attention; half of the square is computed, the backward 2.5 times the forward."""
    is_cuda = clock.device.type == "cuda"
    found = []
    for length in (512, 2048, 8192) if is_cuda else (64, 256, 512):
        heads, width = (16, 128) if is_cuda else (8, 64)
        dtype = torch.bfloat16 if is_cuda else torch.float32
        q, k, v = (
            torch.randn(1, heads, length, width, device=clock.device, dtype=dtype, requires_grad=True)
            for _ in range(3)
        )

        def run(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> None:
            functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

        # One op of the forward and one of the backward, as wide as their mean.
        seconds = clock.seconds(run) / 2
        found.append((4.0 * length**2 * heads * width / 2 * 3.5 / 2, seconds))
    return found


def _numels(device: torch.device) -> Sequence[int]:
    return [4**power for power in ((8, 10, 12, 13) if device.type == "cuda" else (5, 7, 9, 11, 12))]


def _moving(clock: Clock, bytes_an_element: int, op: Callable[[torch.Tensor], object]) -> list[_Timed]:
    found = []
    for numel in _numels(clock.device):
        tensors = [torch.rand(numel, device=clock.device) for _ in range(6)]
        found.append((float(numel * bytes_an_element), _InTurn(op, tensors).seconds(clock)))
    return found


def _elementwise(clock: Clock) -> list[_Timed]:
    return _moving(clock, 8, lambda tensor: tensor.mul(2.0))


def _activations(clock: Clock) -> list[_Timed]:
    return _moving(clock, 8, functional.silu)


def _sums(clock: Clock) -> list[_Timed]:
    return _moving(clock, 8, lambda tensor: tensor.view(-1, 64).sum(-1))


def _softmaxes(clock: Clock) -> list[_Timed]:
    return _moving(clock, 8, lambda tensor: tensor.view(-1, 64).softmax(-1))


def _copies(clock: Clock) -> list[_Timed]:
    return _moving(clock, 8, torch.clone)


def _optimizers(clock: Clock) -> list[_Timed]:
    def optimizer_of(tensor: torch.Tensor) -> torch.optim.Optimizer:
        parameter = nn.Parameter(tensor)
        parameter.grad = torch.rand_like(tensor)
        return torch.optim.AdamW([parameter], fused=True)

    found = []
    for numel in _numels(clock.device):
        optimizers = [optimizer_of(torch.rand(numel, device=clock.device)) for _ in range(3)]
        run = _InTurn(lambda optimizer: optimizer.step(), optimizers)
        # A fused step reads its number of steps from the host, which a graph cannot.
        found.append((28.0 * numel, clock.seconds(run) / len(optimizers)))
    return found


# --- the host -----------------------------------------------------------------------------------------------------


def host_prices(clock: Clock) -> dict[str, float]:
    """Returns what calls cost the host, in microseconds, for tensors so small that nothing else counts."""
    device = clock.device
    small = torch.ones(8, 8, device=device)
    weights = [torch.ones(8, 8, device=device, requires_grad=True) for _ in range(16)]
    layer = nn.Identity()

    def forward() -> torch.Tensor:
        out = small
        for weight in weights:
            out = out * weight
        return out

    # Backward has a product for either factor, and adds nothing up.
    num_forward, num_backward = len(weights), 2 * len(weights)
    both = clock.host_seconds(lambda: torch.autograd.backward(forward(), small), at_once=4)
    source = torch.ones(8, 8, device=device, dtype=torch.float64)
    calls: dict[str, Run] = {
        "view": lambda: small.view(64),
        "empty": lambda: torch.empty(64, device=device),
        "cast_copy": lambda: small.copy_(source),
        "module_call": lambda: layer(small),
    }
    found = {name: clock.host_seconds(run) * 1e6 for name, run in calls.items()}
    return {"op": both / (num_forward + num_backward) * 1e6, **found}


def host_copies(clock: Clock) -> tuple[float, float]:
    """Returns the rates of copies between host and device in bytes a second: one way alone, and both at once."""
    device = clock.device
    num_bytes = 1 << 28 if device.type == "cuda" else 1 << 25
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    here = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    one_way = num_bytes / clock.seconds(lambda: there.copy_(here, non_blocking=True))
    if device.type != "cuda":
        return one_way, one_way
    back, other = torch.empty_like(here, pin_memory=True), torch.cuda.Stream(device)
    source = torch.empty_like(there)

    def both() -> None:
        there.copy_(here, non_blocking=True)
        with torch.cuda.stream(other):
            back.copy_(source, non_blocking=True)

    return one_way, 2 * num_bytes / clock.seconds(both)
