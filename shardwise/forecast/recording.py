"""Writes the tape of a dry run: what torch and the engine ask of the device of this thread."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise import trace
from shardwise.comm.streams import SideStream, SideStreams
from shardwise.forecast.costs import bytes_of, flops_of, is_aligned, kind_of, temporaries_of
from shardwise.forecast.tape import (
    ACTIVATIONS,
    COMPUTE,
    GATHER,
    OPTIMIZER,
    REDUCE,
    REPLICATE,
    Allocate,
    Collective,
    Entry,
    Free,
    HostCalls,
    HostWork,
    Mark,
    Op,
    Record,
    Transfer,
    Wait,
)
from shardwise.planning.memory import GATHERING, GRADIENTS, SHARD_GRADIENTS
from shardwise.torch_internals import TorchDispatchMode, leaves_of


class TapeRecorder:
    """The dry run: the engine's streams, elastic buffers, kernels and collectives, written to one tape."""

    def __init__(self) -> None:
        self.tape: list[Entry] = []
        self.stream = COMPUTE
        self.phase = ""
        # What a thread of the host does with each byte of a gradient that has arrived there.
        self.steps_in_backward = 0.0
        self._num_events = 0
        self._num_keys = 0
        # Live storages: their key on the tape, and their entry, whose ``what`` is corrected as more is known.
        self._live: dict[int, Allocate] = {}
        self._streams = _Streams(self)

    # --- what the engine asks -------------------------------------------------------------------------------------

    def side_streams(self) -> SideStreams:
        return self._streams

    def resized(self, storage: torch.UntypedStorage, num_bytes: int, holds: str) -> None:
        key = storage._cdata
        if num_bytes:
            self._allocate(key, num_bytes, holds or ACTIVATIONS)
        else:
            self.freed(key)

    def moved(self, kind: str, sources: Sequence[torch.Tensor], num_bytes: int) -> None:
        read = sum(source.nbytes for source in sources) or num_bytes
        for source in sources:
            entry = self._live.get(source.untyped_storage()._cdata)
            if entry is not None and entry.what == ACTIVATIONS:
                entry.what = GRADIENTS
        self.tape.append(Op(kind, "copy", self.stream, num_bytes=read + num_bytes))

    def collective(self, kind: str, num_bytes: int, ranks: int, axis: str, num_tensors: int = 1) -> None:
        self.tape.append(Collective(kind, num_bytes, ranks, axis, self.stream, num_tensors))

    def forget(self) -> None:
        """Drops what is on the tape, and what would be freed later of it."""
        self.tape.clear()
        self._live.clear()

    # --- memory ---------------------------------------------------------------------------------------------------

    def _allocate(self, storage_key: int, num_bytes: int, what: str) -> None:
        self._num_keys += 1
        entry = Allocate(self._num_keys, num_bytes, what, self.stream)
        self._live[storage_key] = entry
        self.tape.append(entry)

    def freed(self, storage_key: int) -> None:
        entry = self._live.pop(storage_key, None)
        if entry is not None:
            self.tape.append(Free(entry.key))

    def hold(self, num_bytes: int, what: str) -> int | None:
        """Writes memory that stays, such as shards; returns its key, with which ``release`` ends it."""
        if not num_bytes:
            return None
        self._num_keys += 1
        self.tape.append(Allocate(self._num_keys, num_bytes, what, COMPUTE))
        return self._num_keys

    def release(self, key: int | None) -> None:
        if key is not None:
            self.tape.append(Free(key))

    def _use_of_new(self) -> str:
        """What a tensor made now is for: the engine itself makes some on its streams."""
        if self.phase == "optimizer":
            return OPTIMIZER
        return {GATHER: GATHERING, REDUCE: SHARD_GRADIENTS}.get(self.stream, ACTIVATIONS)

    def note_tensor(self, tensor: torch.Tensor, what: str | None = None) -> None:
        """Writes the memory of a tensor, unless it is known, and when it goes."""
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._live or not num_bytes:
            return
        self._allocate(key, num_bytes, what or self._use_of_new())
        weakref.finalize(storage, self.freed, key).atexit = False

    # --- points and waits -----------------------------------------------------------------------------------------

    def record_event(self, stream: str) -> int:
        self._num_events += 1
        self.tape.append(Record(self._num_events, stream))
        return self._num_events

    def wait(self, stream: str, event: Any) -> None:
        self.tape.append(Wait(event, stream))

    def mark(self, kind: str, unit: str = "", phase: str = "", num_params: int = 0) -> None:
        self.tape.append(Mark(kind, unit, phase, num_params))

    def begin_phase(self, phase: str) -> None:
        self.phase = phase
        self.mark("phase", "", phase)

    def host_work(self, kind: str, num_bytes: int) -> None:
        self.tape.append(HostWork(kind, num_bytes))

    def transfer(self, direction: str, num_bytes: int) -> None:
        self.tape.append(Transfer(direction, num_bytes, self.stream))
        if direction == "out" and self.phase == "backward" and self.steps_in_backward:
            work = int(self.steps_in_backward * num_bytes)
            self.tape.append(HostWork("optimizer", work, self.stream))

    def host_calls(self, price: str, count: int) -> None:
        self.tape.append(HostCalls(price, count))


class _Stream(SideStream):
    """A side stream of the dry run."""

    def __init__(self, recorder: TapeRecorder, name: str) -> None:
        self._recorder = recorder
        self._name = name
        self._outer = COMPUTE

    def __enter__(self) -> None:
        self._outer = self._recorder.stream
        self._recorder.stream = self._name

    def __exit__(self, *exception: object) -> None:
        self._recorder.stream = self._outer

    def wait_compute(self) -> None:
        self._recorder.wait(self._name, self._recorder.record_event(COMPUTE))

    def wait_event(self, event: Any) -> None:
        self._recorder.wait(self._name, event)

    def record_event(self) -> Any:
        return self._recorder.record_event(self._name)


class _Streams(SideStreams):
    host_runs_ahead = True

    def __init__(self, recorder: TapeRecorder) -> None:
        self._recorder = recorder
        super().__init__(*(_Stream(recorder, name) for name in (GATHER, REDUCE, REPLICATE)))

    def record_compute(self) -> Any:
        return self._recorder.record_event(COMPUTE)

    def compute_waits_for(self, event: Any) -> None:
        self._recorder.wait(COMPUTE, event)

    def host_waits_for(self, event: Any) -> None:
        self._recorder.wait("host", event)


class EngineEvents(trace.Recorder):
    """The engine's own trace, copied to the tape as marks."""

    def __init__(self, recorder: TapeRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        # By the name of their unit.
        self.num_params: dict[str, int] = {}

    def add(self, kind: str, unit: str, phase: str, rank: int) -> None:
        super().add(kind, unit, phase, rank)
        self._recorder.mark(kind, unit, phase, self.num_params.get(unit, 0))


class TorchCalls(TorchDispatchMode):
    """Writes every call that reaches torch's dispatcher, below autograd."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Torch compiles nothing under modes that it takes for a user's."""
        return True

    def __init__(self, recorder: TapeRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            # Its calls on local tensors come here by themselves.
            return NotImplemented
        kwargs = kwargs or {}
        inputs = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        packet = func._overloadpacket._qualified_op_name.split("::")[1]
        if any(each.device.type == "cpu" and each.numel() > 1 for each in inputs) or _makes_on_host(kwargs):
            handled, out = self._on_host(func, packet, args, kwargs, inputs)
            if handled:
                return out
        out = func(*args, **kwargs)
        self._write(func, packet, args, kwargs, inputs, out)
        return out

    def _write(
        self, func: Any, packet: str, args: Any, kwargs: Any, inputs: list[torch.Tensor], out: Any
    ) -> None:
        recorder = self._recorder
        outputs = [leaf for leaf in leaves_of(out) if isinstance(leaf, torch.Tensor)]
        mutates = func._schema.is_mutable
        if not mutates and outputs and _share_memory(outputs, inputs):
            recorder.tape.append(Op(packet, "view", recorder.stream))
            return
        for output in outputs:
            recorder.note_tensor(output)
        kind = kind_of(packet)
        flops = flops_of(func, args, kwargs, out) if kind in ("matmul", "attention") else 0
        touched = bytes_of(packet, inputs, outputs, mutates)
        widest = max(outputs or inputs, key=torch.Tensor.numel, default=None)
        dtype = "" if widest is None else str(widest.dtype).removeprefix("torch.")
        temporaries = temporaries_of(packet, inputs)
        share = "" if is_aligned(packet, (*inputs, *outputs)) else "unaligned"
        recorder.tape.append(Op(packet, kind, recorder.stream, flops, touched, dtype, temporaries, share))

    def _on_host(
        self, func: Any, packet: str, args: Any, kwargs: Any, inputs: list[torch.Tensor]
    ) -> tuple[bool, Any]:
        """Answers calls that involve host memory, which is reserved and never touched."""
        recorder = self._recorder
        if packet == "copy_":
            target, source = args[0], args[1]
            if target.device != source.device:
                direction = "in" if target.device.type == "meta" else "out"
                recorder.transfer(direction, target.nbytes)
            return True, target
        if packet == "_to_copy" and inputs[0].device.type == "meta":
            recorder.transfer("out", inputs[0].nbytes)
            return True, torch.empty_like(inputs[0], device="cpu", dtype=kwargs.get("dtype"))
        if packet in ("zeros", "empty"):
            return True, torch.empty(args[0], dtype=kwargs.get("dtype"), device="cpu")
        return False, None


def _makes_on_host(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and device.type == "cpu"


def _share_memory(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> bool:
    known = {each.untyped_storage()._cdata for each in inputs}
    return all(each.untyped_storage()._cdata in known for each in outputs)
