"""The optimizer of a dry run: what its step allocates, and the work it gives the device or the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.engine.unit.unit import Unit
from shardwise.forecast.recording import TapeRecorder
from shardwise.forecast.tape import OPTIMIZER, Op

# Numbers that an optimizer keeps for each element.
_STATES = {"adamw": 2, "adamw-foreach": 2, "adamw-in-backward": 2, "sgd": 1}
_IN_BACKWARD = "adamw-in-backward"


class DryOptimizer:
    """Steps all shards of a rank."""

    def __init__(
        self,
        name: str | None,
        units: Sequence[Unit],
        whole: Sequence[torch.nn.Parameter],
        recorder: TapeRecorder,
    ) -> None:
        self._units = list(units)
        self._whole = list(whole)
        self._name = name
        self._recorder = recorder
        self._has_state = False
        if name == _IN_BACKWARD:
            recorder.steps_in_backward = _moved(2) / 2

    def zero_grad(self) -> None:
        for unit in self._units:
            for slot in unit.slots:
                slot.sharded.grad = None
        for param in self._whole:
            param.grad = None

    def step(self) -> None:
        if self._name is None:
            return
        shards = [
            (slot.local.numel(), slot.stored_dtype.itemsize, unit.home.is_offloaded)
            for unit in self._units
            for slot in unit.slots
            if slot.sharded.requires_grad
        ]
        shards += [
            (param.numel(), param.dtype.itemsize, False) for param in self._whole if param.requires_grad
        ]
        states = _STATES[self._name]
        recorder = self._recorder
        if not self._has_state:
            self._has_state = True
            for numel, itemsize, is_offloaded in shards:
                if not is_offloaded:
                    for _ in range(states):
                        recorder.hold(numel * itemsize, OPTIMIZER)
                    # The number of its steps, on the device where the optimizer is fused.
                    recorder.hold(4, OPTIMIZER)
        on_device = sum(numel * itemsize for numel, itemsize, is_offloaded in shards if not is_offloaded)
        on_host = sum(numel * itemsize for numel, itemsize, is_offloaded in shards if is_offloaded)
        # In backward, a unit is stepped as one tensor.
        if self._name != _IN_BACKWARD:
            recorder.host_calls(
                "optimizer_of_a_shard" if self._units else "optimizer_of_a_tensor", len(shards)
            )
        if on_device:
            self._step_on_device(on_device, states)
        if on_host and self._name != _IN_BACKWARD:
            recorder.host_work("optimizer", on_host * _moved(states) // 2)

    def _step_on_device(self, num_bytes: int, states: int) -> None:
        """A gradient is read; the parameter and its states are read and written."""
        tape = self._recorder.tape
        moved = num_bytes * _moved(states)
        if self._name != "adamw-foreach":
            tape.append(Op("optimizer", "optimizer", self._recorder.stream, 0, moved, "float32"))
            return
        # Its kernels run one after another over all shards, with the square roots of one state between them.
        roots = self._recorder.hold(num_bytes, OPTIMIZER)
        for _ in range(12):
            tape.append(Op("optimizer", "optimizer", self._recorder.stream, 0, 2 * num_bytes, "float32"))
        self._recorder.release(roots)


def _moved(states: int) -> int:
    """Bytes that a step reads and writes for each of the parameters: a gradient is read, all else both."""
    return 3 + 2 * states
