"""A whole training step as one CUDA graph: recorded once, then replayed at the price of a single launch.

    calls    1, 2, 3             4                            5, 6, ...
             run as they are     recorded, then replayed      replayed

The first calls are steps like any other; they let kernels, caches and optimizer state settle. Recording runs nothing:
the step that is recorded is then replayed, so no step is lost and none is made twice. What a replay reads from the host
is checked before each one: inputs of other shapes run as they are, and where parameters were replaced, frozen or
thawed, or an optimizer's options changed, the step is recorded anew. A step that cannot be recorded says why, once, and
goes on running as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from shardwise.engine.step.graph_capture import (
    begin_replay,
    collect_roots,
    end_replay,
    is_unchanged,
    join_streams,
    recording,
    why_not_capturable,
)
from shardwise.engine.step.root import Root
from shardwise.engine.tensor_trees import map_tensors, tensors_in
from shardwise.errors import ShardwiseError
from shardwise.torch_internals import same_structure
from shardwise.training_step.capturable_optimizers import CapturableOptimizers

_WARM_UP_CALLS = 3


def capture(step: Callable[..., Any], *example_inputs: Any) -> CapturedStep:
    """Makes a training step of static shapes replay as one CUDA graph.

    Args:
        step: does a whole step (forward, backward, clipping, optimizer, all micro-batches) and returns the loss, or any
            structure of tensors. It must not look at values on the host (``loss.item()``, printing).
        example_inputs: what it will be called with; shapes and dtypes count, values do not.

    Returns:
        What to call instead of ``step``. The tensors it returns are new ones each time. Learning rates become tensors
        and optimizers capturable, where they can; schedulers and code that sets ``group["lr"]`` go on working.
    """
    return CapturedStep(step, example_inputs)


class CapturedStep:
    """What ``capture`` returns: a step that is replayed where it can be."""

    def __init__(self, step: Callable[..., Any], example_inputs: tuple[Any, ...]) -> None:
        self._step = step
        self._shapes = _shapes(example_inputs)
        self._example = example_inputs
        self._calls_before = _WARM_UP_CALLS
        self._recording: _Recording | None = None
        self._optimizers = CapturableOptimizers()
        self._roots: list[Root] = []
        self._has_warned_of_shapes = False
        self.reason: str | None = None
        """Why the step is not replayed, if it is not."""
        if not torch.cuda.is_available():
            self._give_up("there is no CUDA device")
        elif any(tensor.device.type != "cuda" for tensor in tensors_in(example_inputs)):
            self._give_up("an input is not on a CUDA device")
        else:
            self._stream = torch.cuda.Stream()

    @property
    def is_captured(self) -> bool:
        return self._recording is not None

    def __call__(self, *inputs: Any) -> Any:
        if self.reason is not None:
            return self._step(*inputs)
        if _shapes(inputs) != self._shapes or not same_structure(inputs, self._example):
            self._warn_of_shapes()
            return self._run_as_is(inputs)
        if self._recording is not None and not self._recording.still_holds(self._optimizers):
            # One step as it is takes over what has changed; the next is recorded.
            self._recording, self._calls_before = None, 1
        if self._recording is None:
            if self._calls_before > 0:
                self._calls_before -= 1
                return self._run_as_is(inputs)
            self._recording = self._record(inputs)
            if self._recording is None:
                return self._step(*inputs)
        return self._recording.replay(inputs)

    def _run_as_is(self, inputs: tuple[Any, ...]) -> Any:
        """A step like any other, on the stream that will record: autograd remembers streams."""
        with self._optimizers.noticed(), collect_roots(self._roots), _on(self._stream):
            result = self._step(*inputs)
        if self._recording is None:
            self._optimizers.make_capturable()
        return result

    def _record(self, inputs: tuple[Any, ...]) -> _Recording | None:
        for root in self._roots:
            if (obstacle := why_not_capturable(root)) is not None:
                self._give_up(obstacle)
                return None
        gradients = self._optimizers.gradients()
        try:
            return _Recording(self._step, inputs, self._stream, self._roots, self._optimizers)
        except ShardwiseError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever cannot be recorded, the step itself may still run
            self._give_up(f"{type(error).__name__}: {error}")
        # Nothing ran, so parameters are what they were; what Python keeps of a step is put back.
        torch.cuda.synchronize()
        for root in self._roots:
            root.reset()
        for param, gradient in gradients:
            param.grad = gradient
        return None

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        warnings.warn(
            f"the training step is not captured, it runs as it is: {reason}", UserWarning, stacklevel=4
        )

    def _warn_of_shapes(self) -> None:
        if not self._has_warned_of_shapes:
            self._has_warned_of_shapes = True
            warnings.warn(
                "a training step was called with inputs unlike the example's; such steps run as they are. Pad or drop "
                "the odd batch to have them all replayed",
                UserWarning,
                stacklevel=3,
            )


class _Recording:
    """One recorded step with the memory it reads and writes."""

    def __init__(
        self,
        step: Callable[..., Any],
        inputs: tuple[Any, ...],
        stream: torch.cuda.Stream,
        roots: list[Root],
        optimizers: CapturableOptimizers,
    ) -> None:
        self._inputs = map_tensors(lambda tensor: tensor.detach().clone(), inputs)
        self._input_tensors = tensors_in(self._inputs)
        self._graph = torch.cuda.CUDAGraph()
        self._roots = roots
        # Other threads, such as NCCL's watchdog, may go on talking to the device meanwhile.
        with ExitStack() as stack:
            for root in roots:
                stack.enter_context(recording(root))
            stack.enter_context(
                torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local")
            )
            output = step(*self._inputs)
            for root in roots:
                join_streams(root)
        self._output = map_tensors(torch.Tensor.detach, output)
        self._options = optimizers.options()
        # alive: the gradients a replay writes, so that code after the step finds them
        self._gradients = optimizers.gradients()

    def still_holds(self, optimizers: CapturableOptimizers) -> bool:
        optimizers.take_over_rates()
        return all(is_unchanged(root) for root in self._roots) and optimizers.options() == self._options

    def replay(self, inputs: tuple[Any, ...]) -> Any:
        for static, tensor in zip(self._input_tensors, tensors_in(inputs), strict=True):
            static.copy_(tensor, non_blocking=True)
        for root in self._roots:
            begin_replay(root)
        self._graph.replay()
        for param, gradient in self._gradients:
            param.grad = gradient
        for root in self._roots:
            end_replay(root)
        return map_tensors(torch.Tensor.clone, self._output)


def _shapes(inputs: tuple[Any, ...]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors_in(inputs)]


@contextmanager
def _on(stream: torch.cuda.Stream) -> Iterator[None]:
    # order: what the caller did before the step, and the step before what the caller does next
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
