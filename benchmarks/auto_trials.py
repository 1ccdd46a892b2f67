"""One trial of `auto_plan.py`: a model sharded by given settings takes steps on a device, alone or by turns."""

from __future__ import annotations

import gc
import random
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import auto_models
import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.forecast.rehearsal import sharded_as
from shardwise.forecast.settings import Settings


def settings_of(spec: dict[str, Any], changed: dict[str, Any]) -> Settings:
    alone = tuple(changed.get("alone", ()))
    return Settings(mp_policy=auto_models.precision(spec), **{**changed, "alone": alone})


class Trial:
    """A model that is sharded as a record says, and takes steps on the device."""

    def __init__(self, record: dict[str, Any], mesh: DeviceMesh) -> None:
        device = torch.device(mesh.device_type)
        self.name = record.get("name", "")
        spec = record["model"]
        self._device = device
        self._settings = settings_of(spec, record["settings"])
        with torch.device("meta"):
            model = auto_models.build(spec)
        self._model = sharded_as(model, self._settings, mesh)
        self._model.to_empty(device="cpu" if self._settings.offload else device)
        fill_quickly(self._model)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        micro_batches = self._settings.micro_batches
        self._inputs = auto_models.inputs(spec, spec["batch"] // micro_batches, device)

    def step(self) -> float:
        """Takes one step and returns its milliseconds."""
        wait(self._device)
        begun = time.perf_counter()
        for _ in range(self._settings.micro_batches):
            output = self._model(*self._inputs)
            loss = output if output.dim() == 0 else output.sum()
            (loss / self._settings.micro_batches).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        wait(self._device)
        return 1e3 * (time.perf_counter() - begun)


def fill_quickly(model: Any) -> None:
    with torch.no_grad():
        for param in model.parameters():
            local = param.to_local()
            local.fill_(1.0) if param.dim() == 1 else local.normal_(0.0, 0.02)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def clear(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peaks(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {}
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
    }


def allow(device: torch.device, num_bytes: int | None) -> None:
    """Gives torch's allocator so many bytes; None: all that there are."""
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if num_bytes is None else min(1.0, num_bytes / whole))


def tried(record: dict[str, Any], mesh: DeviceMesh, steps: int, warmup: int) -> dict[str, Any]:
    """Runs one trial and returns what came of it; an error is a result as well."""
    device = torch.device(mesh.device_type)
    clear(device)
    begun, found = time.perf_counter(), {}
    before = peaks(device)
    try:
        trial = Trial(record, mesh)
        found["ms"] = [trial.step() for _ in range(warmup + steps)][warmup:]
        found |= {"ended": "ok", "median_ms": statistics.median(found["ms"]), "least_ms": min(found["ms"])}
    except torch.OutOfMemoryError as error:
        found |= {"ended": "out of memory", "error": str(error)[:600]}
    except Exception as error:  # noqa: BLE001  one failure must not end the others
        found |= {"ended": type(error).__name__, "error": traceback.format_exc()[-1500:]}
    after = peaks(device)
    if after:
        after["retries"] -= before["retries"]
        # What other trials have left behind was there before.
        after["held_before"] = before["allocated"]
    return {**found, "peak": after, "took_s": round(time.perf_counter() - begun, 2)}


def warm_up(device: torch.device) -> None:
    """Lets cuBLAS take its workspaces, of forward's thread and of backward's, as a plan has it."""
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.ones(256, 256, device=device, dtype=dtype, requires_grad=True)
        (weight @ weight).sum().backward()


def take_turns(
    trials: Sequence[Trial], rounds: int, steps: int, is_late: Callable[[], bool]
) -> dict[str, list[float]]:
    """Times so many steps of each trial in every round, after an untimed one; no two rounds have the same order."""
    times: dict[str, list[float]] = {trial.name: [] for trial in trials}
    for number in range(rounds):
        if number and is_late():
            break
        order = list(trials)
        random.Random(number).shuffle(order)
        for trial in order:
            trial.step()
            times[trial.name] += [trial.step() for _ in range(steps)]
        gc.collect()
    return times


def in_rounds(times: Sequence[float], steps: int) -> list[float]:
    """The median of each round."""
    return [statistics.median(times[at : at + steps]) for at in range(0, len(times), steps)]
